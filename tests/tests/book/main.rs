//! The book. Its code is compiled and run here; what it says of other files is compared with them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod checkpoints;
mod cluster;
mod code;
mod learner;
mod messages;
mod names;
mod optimizers;
mod pages;
mod steps;
