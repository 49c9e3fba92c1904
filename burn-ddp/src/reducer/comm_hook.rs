//! Communication hooks: how a bucket's gradients are averaged over the ranks.

use super::{layout::ParamSpec, plan::Placement};
use crate::group::{DType, GroupError, ProcessGroup};
use std::{fmt, ops::Range};

/// Averages buckets of gradients in place of the plain all-reduce, mostly to send less.
///
/// Set with [`WrapConfig::comm_hook`](crate::WrapConfig::comm_hook). A hook belongs to one wrapped model, whose communication thread calls it
/// for bucket after bucket, in the same order on every rank; what it keeps between steps (error memory, buffers) lies behind its own lock.
/// The idea and the name are PyTorch's (`DistributedDataParallel.register_comm_hook`).
pub trait CommHook: fmt::Debug + Send + Sync {
    /// Name and options. `wrap` compares them over the ranks.
    fn describe(&self) -> String;

    /// Replaces [`bucket.data_mut()`](GradBucket::data_mut) by its mean over all ranks of [`bucket.group()`](GradBucket::group), the same bits on every rank. Collective:
    /// all ranks are in it with the same bucket. Blocks until the peers have come.
    ///
    /// Parameters that this rank has not used are zeros; those that [no rank has used](BucketParam::used) are left out afterwards, whatever the hook leaves
    /// there. In the step in which parameters are unfrozen, all buckets come twice, and what was reduced the first time is unused the second time. What
    /// only some ranks are to count (weights, ranks without data) is settled afterwards, by a [factor](GradBucket::factor).
    /// A bucket in which [`NonFinitePolicy::Skip`](crate::NonFinitePolicy::Skip) finds what is not finite goes around the hook.
    ///
    /// # Errors
    ///
    /// What the group's operations return. The job ends with it.
    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError>;
}

/// A bucket on its way, as a [`CommHook`] sees it.
pub struct GradBucket<'a> {
    pub(super) index: usize,
    pub(super) group: &'a dyn ProcessGroup,
    pub(super) dtype: DType,
    pub(super) data: &'a mut [u8],
    pub(super) places: &'a [Placement],
    pub(super) specs: &'a [ParamSpec],
    pub(super) used: &'a [bool],
    pub(super) factor: f64,
}

/// Where one parameter's gradient lies in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketParam<'a> {
    /// Module path, which stays the same when buckets are made anew.
    pub path: &'a str,
    /// Shape of the parameter.
    pub shape: &'a [usize],
    /// Byte range in the bucket's data.
    pub range: Range<usize>,
    /// Whether some rank has used it in this step; the same on all ranks.
    pub used: bool,
}

impl fmt::Debug for GradBucket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters: Vec<_> = self.parameters().collect();
        f.debug_struct("GradBucket")
            .field("index", &self.index)
            .field("dtype", &self.dtype)
            .field("parameters", &parameters)
            .finish()
    }
}

impl<'a> GradBucket<'a> {
    /// Position among the model's buckets; those of lower index have been reduced. Changes when buckets are made anew, after the first
    /// step and when parameters are frozen or unfrozen.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The ranks, in an ordering domain of the model's own.
    pub fn group(&self) -> &'a dyn ProcessGroup {
        self.group
    }

    /// Element type of all gradients in the bucket.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The gradients, end to end, elements of [`dtype`](Self::dtype) in the machine's byte order.
    pub fn data(&self) -> &[u8] {
        self.data
    }

    /// The gradients, to be replaced.
    pub fn data_mut(&mut self) -> &mut [u8] {
        self.data
    }

    /// What the mean is multiplied with afterwards to be the step's gradient; the same on all ranks. 1 for a mean over all ranks. A hook that adds what it kept
    /// from one step to the next must keep it in units of the gradient: the factor differs from step to step.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Whose gradients they are, in the order of their places.
    pub fn parameters(&self) -> impl Iterator<Item = BucketParam<'a>> + use<'a> {
        self.places
            .iter()
            .zip(self.specs)
            .zip(self.used)
            .map(|((place, spec), used)| BucketParam {
                path: &spec.path,
                shape: &spec.shape,
                range: place.range(),
                used: *used,
            })
    }
}
