//! What surrounds the gradient in data-parallel training.

pub mod checkpoint;
mod clip;
#[cfg(feature = "train")]
pub mod learner;
mod loss_scaler;
mod lr;
mod mean;
mod optimizer_error;
mod params;
mod sync_batch_norm;
mod zero;

pub use checkpoint::{Checkpoint, CheckpointManager, Snapshot};
pub use clip::Norm;
pub use loss_scaler::LossScaler;
pub use lr::LinearScaling;
pub use mean::Mean;
pub use optimizer_error::OptimizerError;
pub use sync_batch_norm::SyncBatchNorm;
pub use zero::{StateBytes, ZeroRedundancyOptimizer};
