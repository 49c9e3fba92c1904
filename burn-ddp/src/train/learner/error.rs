//! Why ranks that train together stop.

use crate::Error;
use burn::train::{
    TrainingError,
    train::{MultiDeviceStepError, WorkerFailure},
};

/// What stops the training on all ranks. Burn shows it as a worker's failure, the worker being the rank.
#[derive(Debug, thiserror::Error)]
pub(super) enum LearnerError {
    /// Communication, or the model cannot be wrapped.
    #[error(transparent)]
    Ddp(#[from] Error),
    /// The ranks set up their trainings differently.
    #[error(
        "rank {rank}: the ranks train differently: {what} is {theirs} on rank {peer} but {reference} on rank 0. Give every rank the same settings"
    )]
    Settings {
        rank: usize,
        what: &'static str,
        peer: usize,
        theirs: String,
        reference: String,
    },
    /// One rank has another number of batches.
    #[error(
        "rank {rank}: the training loaders have different numbers of batches: rank {peer} has {theirs}, rank 0 has {reference}. Take a loader of \
         `ddp.loader` with `Tail::Pad` or `Tail::Drop` for training"
    )]
    Uneven {
        rank: usize,
        peer: usize,
        theirs: String,
        reference: String,
    },
    /// Another rank's error.
    #[error("rank {peer} has stopped: {cause}")]
    Peer { peer: usize, cause: String },
}

impl LearnerError {
    /// In Burn's words; `rank` is this one.
    pub(super) fn into_training(self, rank: usize) -> TrainingError {
        let device_id = match &self {
            Self::Peer { peer, .. } | Self::Settings { peer, .. } | Self::Uneven { peer, .. } => {
                *peer
            }
            Self::Ddp(_) => rank,
        };
        let message = self.to_string();
        MultiDeviceStepError::Workers(vec![WorkerFailure { device_id, message }]).into()
    }
}
