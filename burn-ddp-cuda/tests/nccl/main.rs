//! The NCCL communicator, between real processes, with the mock in place of NCCL.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod aborts;
mod common;
mod ending;
mod faults;
mod leaks;
mod loading;
mod real;
mod values;
