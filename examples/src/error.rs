use crate::data::DataError;
use crate::device::DeviceError;
use burn::data::dataset::DatasetError;
use burn::store::RecordError;
use burn::train::TrainingError;
use std::{path::PathBuf, sync::Arc};

/// Why an example stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The data files are missing or damaged.
    #[error(transparent)]
    Data(#[from] DataError),

    /// The device that was asked for is not part of this build.
    #[error(transparent)]
    Device(#[from] DeviceError),

    /// A data loader could not produce a batch.
    #[error("cannot load a batch: {0}")]
    Batch(#[from] DatasetError),

    /// Burn's learner stopped before its last epoch.
    #[error("the training stopped: {0}")]
    Training(Arc<TrainingError>),

    /// The command line asks for something that cannot be trained.
    #[error("{0}")]
    Usage(String),

    /// The folder for the model cannot be made or written to.
    #[error("cannot write to the output folder {}: {source}; name another one with --out", path.display())]
    Output {
        /// The folder.
        path: PathBuf,
        /// What the system answered.
        source: std::io::Error,
    },

    /// The model could not be written.
    #[error("cannot save the model: {0}")]
    Save(#[from] RecordError),

    /// The report could not be turned into JSON.
    #[error("cannot write the report: {0}")]
    Report(#[from] serde_json::Error),

    /// A collective operation failed, or this process could not join the others.
    #[cfg(feature = "ddp")]
    #[error(transparent)]
    Ddp(#[from] burn_ddp::Error),
}

#[cfg(feature = "ddp")]
impl From<burn_ddp::data::DataError> for Error {
    fn from(error: burn_ddp::data::DataError) -> Self {
        Self::Ddp(error.into())
    }
}
