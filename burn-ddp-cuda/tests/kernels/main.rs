//! Packing, unpacking, norms and sums by value, on each runtime that was built in. What is expected is computed on the host.
//!
//! On a machine without a GPU, Mesa's lavapipe is the device of the runtime `wgpu`:
//! `VK_ICD_FILENAMES=/usr/share/vulkan/icd.d/lvp_icd.x86_64.json cargo test -p burn-ddp-cuda --features wgpu`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod device;
mod errors;
mod host;
mod norms;
mod packing;
mod streams;
mod sums;
mod unpacking;
