//! Checkpoints: everything that a training run needs to go on, in one directory per step that is there as a whole or not at all.
//!
//! ```text
//! checkpoints/
//!   latest                        the name of the newest step, for people and scripts
//!   step-200/
//!     manifest.json               step, world size, and length and SHA-256 of every other file
//!     model.bpk  optimizer.bpk    Burn's own records
//!     loader.postcard             a value
//!     noise.rank-0.postcard       a value of one rank
//!   .step-250.tmp-5f0c…           a save that is under way, or that was killed
//! ```
//!
//! A save writes into a temporary directory, syncs files and directory, renames it, syncs the parent and then replaces `latest`. Global rank 0
//! is the only process that touches the directory: what other ranks have to save travels to it, and what is loaded travels from it. So
//! nothing depends on which machine sees which file, and no two ranks can decide differently.

mod directory;
mod draft;
mod error;
mod files;
mod load;
mod lock;
mod manager;
mod manifest;
mod mismatch;
mod save;
mod snapshot;
#[cfg(test)]
mod tests;
mod transfer;

pub use error::CheckpointError;
pub use load::Checkpoint;
pub use manager::CheckpointManager;
pub use snapshot::Snapshot;
