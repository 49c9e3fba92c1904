//! The host group.

mod auth;
mod control;
mod control_tcp;
mod door;
pub mod env;
mod poll;
mod rendezvous;
mod rendezvous_error;
mod secret;
mod tcp;
mod wire;

pub use env::{Heartbeat, Overrides, Rendezvous, SettingsError, Transport};
pub use rendezvous_error::RendezvousError;
pub use secret::{KeyFileError, Secret};
