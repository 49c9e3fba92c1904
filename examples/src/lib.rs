//! The models, the data sets and the displays that the programs in `examples/examples` share.
//!
//! Nothing in here knows of ranks or processes. The same library builds with the feature `ddp`
//! and without it, and that is the point: what data-parallel training adds to a program is all in
//! the program's `main` and between two epochs.

pub mod command;
pub mod data;
pub mod device;
mod error;
pub mod gpt;
pub mod model;
pub mod output;
pub mod progress;
pub mod schedule;
pub mod steps;

pub use error::Error;
