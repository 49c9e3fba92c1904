//! Options of a wrapped model.

use crate::reducer::{BucketCaps, CommHook, Expect, Rule};
use std::sync::Arc;

/// What the ranks' gradients become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over the ranks that have data, all of them unless some have [joined](crate::Ddp::join): the learning rate does not depend on the number
    /// of ranks.
    #[default]
    Mean,
    /// The sum over ranks.
    Sum,
    /// The mean over samples: each rank's gradient counts as many times as it has samples (or tokens), which every backward pass says with
    /// [`Ddp::weighted`](crate::Ddp::weighted). For a loss that is the mean over the rank's own samples, this gives the gradient of the mean over all.
    WeightedMean,
}

/// What becomes of a step in which some rank has a gradient that is not a number or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NonFinitePolicy {
    /// Nothing is looked at: the values go to all ranks, and so into every replica.
    #[default]
    Pass,
    /// All ranks look at what was reduced and come to the same verdict: `backward` gives no gradient of the model on any rank, so that the
    /// optimizer's step does nothing, and [`Ddp::non_finite`](crate::Ddp::non_finite) says so. Costs two passes over the gradients, on the communication thread.
    Skip,
}

/// What becomes of running statistics (batch norm's), which every rank has of its own data, at the end of each backward pass that synchronises.
///
/// Ranks that have [run out of data](crate::Ddp::join) get the values and do not count. A running statistic is replaced, never changed in place: what a pending
/// backward pass or the user holds stays as it is. A rank whose statistics are no numbers does not count. A model without running statistics pays nothing, another one a small message a step, for which
/// each statistic is read from its device.
///
/// This is about [`RunningState`](burn::module::RunningState), not about other tensors that are not trained (frozen parameters). Burn makes new ones in `model.valid().train()`: go on with the model
/// that was wrapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BufferPolicy {
    /// The mean over ranks: statistics of all data (of a variance, the mean of the ranks' variances).
    #[default]
    Average,
    /// Those of rank 0, as PyTorch's `broadcast_buffers`; statistics of rank 0's data.
    Broadcast,
    /// They stay the rank's own. Make them equal with [`Ddp::average_buffers`](crate::Ddp::average_buffers) before evaluating and saving.
    Off,
}

/// Options of [`Ddp::wrap_with`](crate::Ddp::wrap_with). Must be equal on all ranks, which `wrap` checks.
#[derive(Clone, Debug)]
pub struct WrapConfig {
    pub(crate) caps: BucketCaps,
    reduction: Reduction,
    learn_uses: bool,
    pub(crate) non_finite: NonFinitePolicy,
    comm_hook: Option<Arc<dyn CommHook>>,
    gradient_as_bucket_view: bool,
    pub(crate) static_graph: bool,
    pub(crate) buffers: BufferPolicy,
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
            non_finite: NonFinitePolicy::Pass,
            comm_hook: None,
            gradient_as_bucket_view: false,
            static_graph: false,
            buffers: BufferPolicy::default(),
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

    /// Mean over ranks (default), sum, or mean over samples.
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

    /// Whether to look for gradients that are no numbers, and what to do then (default: pass them on).
    pub fn non_finite(mut self, policy: NonFinitePolicy) -> Self {
        self.non_finite = policy;
        self
    }

    /// How buckets are averaged, in place of the plain all-reduce (default): [`CompressHook`](crate::CompressHook) or a [`CommHook`] of your own. A hook
    /// belongs to one model; keep a clone of the `Arc` to look at its state.
    pub fn comm_hook(mut self, hook: Arc<dyn CommHook>) -> Self {
        self.comm_hook = Some(hook);
        self
    }

    /// Whether the gradients that `backward` returns point into the buckets (default false), in place of being copied out of them.
    ///
    /// Saves the memory of all gradients: a local gradient is freed as soon as it is in its bucket, and there is no other copy of the reduced ones. A
    /// gradient that is kept for longer than the next backward pass keeps the memory of its whole bucket, and that bucket gets another; one that is
    /// written to is copied first, as any shared tensor is. On one machine the reduction is slower, since such buckets do not lie in the ranks'
    /// shared memory. On devices with memory of their own (GPUs) it is host memory that is saved.
    pub fn gradient_as_bucket_view(mut self, view: bool) -> Self {
        self.gradient_as_bucket_view = view;
        self
    }

    /// What becomes of running statistics (default: their mean over ranks after each step).
    pub fn buffers(mut self, policy: BufferPolicy) -> Self {
        self.buffers = policy;
        self
    }

    /// A promise that every backward pass of the model on this rank uses the same parameters, each as many times, as the first one (default false).
    ///
    /// Nothing is counted in forward then, uses that never reach the loss cost no overlap from the second pass on, and parameters that no rank
    /// has used in the first synchronised pass are left out of the buckets: they take no part in any message. A pass that breaks
    /// the promise is an error on all ranks that names the parameter ([`ReducerError::StaticGraph`](crate::ReducerError::StaticGraph)). Parameters cannot be frozen
    /// or unfrozen.
    pub fn static_graph(mut self, promise: bool) -> Self {
        self.static_graph = promise;
        self
    }

    pub(crate) fn rule(&self) -> Rule {
        Rule {
            reduction: self.reduction,
            check_finite: self.non_finite != NonFinitePolicy::Pass,
            hook: self.comm_hook.clone(),
            views: self.gradient_as_bucket_view,
        }
    }

    pub(crate) fn expect(&self) -> Expect {
        match (self.static_graph, self.learn_uses) {
            (true, _) => Expect::AsFirst,
            (false, true) => Expect::AsBefore,
            (false, false) => Expect::Every,
        }
    }

    /// What the ranks compare.
    pub(crate) fn describe(&self) -> String {
        let Self {
            caps,
            reduction,
            learn_uses,
            non_finite,
            comm_hook,
            gradient_as_bucket_view,
            static_graph,
            buffers,
        } = self;
        let hook = comm_hook.as_ref().map(|hook| hook.describe());
        format!(
            "{caps:?} {reduction:?} learn_uses: {learn_uses} non_finite: {non_finite:?} comm_hook: {hook:?} gradient_as_bucket_view: {gradient_as_bucket_view} static_graph: {static_graph} buffers: {buffers:?}"
        )
    }
}
