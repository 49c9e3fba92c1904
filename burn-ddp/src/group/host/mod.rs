//! The host group: ranks of one machine, through shared memory or TCP on loopback.
//!
//! # Rendezvous
//! # Transports
//! # Liveness

mod control;
