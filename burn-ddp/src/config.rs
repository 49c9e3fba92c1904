//! Options of a wrapped model.

use crate::{group::ReduceOp, reducer::BucketCaps};

/// What the ranks' gradients become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over ranks: the learning rate does not depend on the number of ranks.
    #[default]
    Mean,
    /// The sum over ranks.
    Sum,
}

impl From<Reduction> for ReduceOp {
    fn from(reduction: Reduction) -> Self {
        match reduction {
            Reduction::Mean => ReduceOp::Mean,
            Reduction::Sum => ReduceOp::Sum,
        }
    }
}

/// Options of [`Ddp::wrap_with`](crate::Ddp::wrap_with). Must be equal on all ranks, which `wrap` checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrapConfig {
    pub(crate) caps: BucketCaps,
    pub(crate) reduction: Reduction,
    pub(crate) learn_uses: bool,
}

impl Default for WrapConfig {
    fn default() -> Self {
        Self {
            caps: BucketCaps {
                first: 1 << 20,
                rest: 25 << 20,
            },
            reduction: Reduction::Mean,
            learn_uses: true,
        }
    }
}

impl WrapConfig {
    /// The defaults: mean, 25 MiB buckets with a first one of 1 MiB, learned uses.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gradient bytes after which a bucket is closed (default 25 MiB). A larger one has fewer operations, a smaller
    /// one starts earlier. A parameter larger than this has a bucket of its own.
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.caps.rest = bytes;
        self
    }

    /// The same for the bucket that is launched first (default 1 MiB).
    pub fn first_bucket_bytes(mut self, bytes: usize) -> Self {
        self.caps.first = bytes;
        self
    }

    /// Mean (default) or sum over ranks.
    pub fn reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = reduction;
        self
    }

    /// Whether a parameter that was used as often as in the backward pass before is expected to
    /// get as many gradient contributions as then (default true).
    ///
    /// Some uses never reach the loss (a shape query, a head that is not used), and waiting for
    /// them would move that parameter's bucket to the end of backward. Turn this off for a model that uses a
    /// parameter several times and feeds another selection of those uses to the loss from step to step.
    pub fn learn_uses(mut self, learn: bool) -> Self {
        self.learn_uses = learn;
        self
    }
}
