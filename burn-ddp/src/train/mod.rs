//! What surrounds the gradient in data-parallel training.

pub mod checkpoint;
mod clip;
mod loss_scaler;
mod lr;
mod optimizer_error;
mod params;
mod zero;

pub use checkpoint::{Checkpoint, CheckpointManager, Snapshot};
pub use clip::Norm;
pub use loss_scaler::LossScaler;
pub use lr::LinearScaling;
pub use optimizer_error::OptimizerError;
pub use zero::{StateBytes, ZeroRedundancyOptimizer};
