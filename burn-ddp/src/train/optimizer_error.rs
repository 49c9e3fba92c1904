//! What can go wrong between the averaged gradient and the step.

/// An error of an optimizer, of gradient clipping or of loss scaling.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// The ranks divide the optimizer state differently, or stepped different parameters.
    #[error(
        "rank {rank}: the step of ZeroRedundancyOptimizer covers other parameters on rank {peer}: step with the gradients of a wrapped model on all \
         ranks, and load the same record on all of them or on none"
    )]
    StepsDiffer {
        /// The rank that reports.
        rank: usize,
        /// The first rank that differs.
        peer: usize,
    },
    /// An optimizer's record cannot be read or written.
    #[error("rank {rank}: the optimizer's record: {cause}")]
    Record {
        /// The rank that reports.
        rank: usize,
        /// What is wrong with it.
        cause: String,
    },
    /// The optimizer's record could not be gathered because of another rank.
    #[error(
        "rank {rank}: the optimizer's record cannot be gathered because rank {peer} has none; see its error"
    )]
    PeerHasNoRecord {
        /// The rank that reports.
        rank: usize,
        /// The first rank that has none.
        peer: usize,
    },
    /// A gradient is infinite or not a number. The averaged gradients are the same bits everywhere, so every rank says so.
    #[error(
        "rank {rank}: the gradient of `{path}` is not finite, so the gradients have no norm to clip: leave out this step (every rank gets this \
         error), or lower the learning rate or the loss scale"
    )]
    NonFiniteGradient {
        /// The rank that reports.
        rank: usize,
        /// Module path of the first parameter with such a gradient.
        path: String,
    },
    /// The ranks scale their losses differently.
    #[error(
        "rank {rank}: the loss scalers differ: rank {rank} has {ours}, rank {peer} has {theirs}. Call `unscale` on every rank once \
         per step, with averaged gradients, and restore the same state everywhere"
    )]
    ScalersDiffer {
        /// The rank that reports.
        rank: usize,
        /// The first rank that differs.
        peer: usize,
        /// This rank's scaler.
        ours: String,
        /// The peer's.
        theirs: String,
    },
}

impl OptimizerError {
    /// Whether this is the consequence of another rank's failure.
    pub(crate) fn is_secondary(&self) -> bool {
        matches!(self, Self::PeerHasNoRecord { .. })
    }
}
