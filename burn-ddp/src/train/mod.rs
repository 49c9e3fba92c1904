//! What surrounds the gradient in data-parallel training.

pub mod checkpoint;

pub use checkpoint::{Checkpoint, CheckpointManager, Snapshot};
