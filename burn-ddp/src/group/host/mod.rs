//! The host group: ranks of one machine, through shared memory or TCP on loopback.
//!
//! # Rendezvous
//! # Transports
//! # Liveness

pub(crate) mod control;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
