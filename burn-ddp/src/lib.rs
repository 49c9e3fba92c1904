//! Data-parallel training for Burn: one process per device, gradients averaged while backward is
//! still running.

pub mod group;
