//! The GPU half of burn-ddp: an NCCL communicator and the cubecl kernels that pack gradients into
//! buckets on the device.
//!
//! This crate holds what touches devices and nothing else, and it does not depend on `burn-ddp`: the
//! process-group trait and the reducer stay there and adapt what this crate offers, so that a build
//! without a GPU never compiles it.

#[cfg(feature = "kernels")]
pub mod kernels;
