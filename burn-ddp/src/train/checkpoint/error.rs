//! Why a checkpoint could not be saved or loaded.

use crate::group::GroupError;

/// Why a checkpoint could not be saved or loaded.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The ranks do not save the same things, or not at the same step.
    #[error(
        "rank {rank}: the ranks save different checkpoints: {ours} on rank {rank}, {theirs} on rank {peer}. Every rank must call \
         `save` with the same step and the same names in the same order"
    )]
    Disagreement {
        /// The rank that reports.
        rank: usize,
        /// The first rank that differs from it.
        peer: usize,
        /// This rank's step and entries.
        ours: String,
        /// The peer's.
        theirs: String,
    },
    /// Some rank could not do its part of a save. The steps that were there before are untouched.
    #[error("rank {rank}: the checkpoint of step {step} was not saved: rank {peer}: {cause}")]
    Save {
        /// The rank that reports.
        rank: usize,
        /// The step.
        step: u64,
        /// The rank that failed.
        peer: usize,
        /// Its error.
        cause: String,
    },
    /// Rank 0 could not find or read what was asked for.
    #[error("rank {rank}: no checkpoint was loaded: rank 0: {cause}")]
    Load {
        /// The rank that reports.
        rank: usize,
        /// Rank 0's error.
        cause: String,
    },
    /// The checkpoint has nothing of this name.
    #[error(
        "rank {rank}: the checkpoint of step {step} has no {kind} named `{name}`; it has {present}. Ask for what was saved, or test \
         `contains` first"
    )]
    Absent {
        /// The rank that reports.
        rank: usize,
        /// The step.
        step: u64,
        /// What it was asked for as.
        kind: &'static str,
        /// The name.
        name: String,
        /// What there is.
        present: String,
    },
    /// An entry is intact, but is not what it is loaded into.
    #[error("rank {rank}: `{name}` of the checkpoint of step {step} cannot be used here: {cause}")]
    Unfit {
        /// The rank that reports.
        rank: usize,
        /// The step.
        step: u64,
        /// The entry.
        name: String,
        /// What does not fit.
        cause: String,
    },
    /// The ranks could not speak to each other.
    #[error("while a checkpoint was saved or loaded: {0}")]
    Group(#[from] GroupError),
}

impl CheckpointError {
    /// Whether the cause is in another rank's output.
    pub(crate) fn is_secondary(&self) -> bool {
        match self {
            Self::Save { rank, peer, .. } => rank != peer,
            Self::Load { rank, .. } => *rank != 0,
            Self::Group(error) => error.is_secondary(),
            _ => false,
        }
    }
}
