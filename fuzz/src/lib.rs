//! Fuzz targets for what burn-ddp reads from the network and the environment.
//!
//! ```sh
//! cargo install cargo-fuzz
//! cargo +nightly fuzz run control_frames -- -max_total_time=600
//! ```
//!
//! from the repository's root, for each file in `fuzz_targets`. The properties are in `burn-ddp/src/group/fuzzing.rs`, where
//! `cargo test` runs them too.
//!
//! The `group` module is compiled a second time here, under the sanitizer and without Burn, which it does not need.
#![cfg(fuzzing)]
// What the library uses outside of `group`, and its own lints' business.
#![allow(dead_code, unused_imports)]

#[path = "../../burn-ddp/src/group/mod.rs"]
pub mod group;

#[path = "../../burn-ddp/src/notice.rs"]
mod notice;

pub use group::fuzzing::{TARGETS, run};
