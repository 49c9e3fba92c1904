//! Data-parallel training for Burn: one process per device, gradients averaged while backward is
//! still running.

mod autodiff;
mod config;
pub mod data;
mod ddp;
mod dtype;
mod error;
pub mod group;
pub mod launch;
mod reducer;
mod replica;

pub use config::{Reduction, WrapConfig};
pub use ddp::{Ddp, NoSync, Stats};
pub use error::{BackwardPanic, Error, try_backward};
pub use group::ReduceOp;
pub use launch::{Launcher, launch};
pub use reducer::{BucketTrace, ReducerError, RoundTrace};
