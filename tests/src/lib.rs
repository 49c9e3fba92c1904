//! The harness of the multi-process tests, and the models and oracles they share.
//!
//! A test runs its body on real processes, one per rank: [`Ranks::run`] starts the test binary once per rank with the
//! test's own name, collects what each rank returned, and kills all of them at a hard limit.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod dying;
mod far_link;
mod hosts;
mod launched;
mod log;
mod mark;
pub mod models;
pub mod oracle;
mod ports;
mod random;
mod ranks;
mod relay;
mod words;

pub use hosts::{Hosts, PORT, skip};
pub use launched::{Launched, launched, processes_with};
pub use log::log_to_stderr;
pub use mark::mark;
pub use ports::{free_port, listening_addresses};
pub use random::Random;
pub use ranks::{Ending, Ranks, Trace, in_rank, ranks};
pub use relay::Relay;
pub use words::assert_says;
