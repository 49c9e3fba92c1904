//! Model checks of the shared-memory protocol.
//!
//! The protocol's source is compiled a second time here, on loom's atomics, with a futex made of a
//! mutex and a condition variable. A package of its own, because nothing else of burn-ddp can run under
//! loom. `cargo test -p burn-ddp-loom --release` explores every interleaving up to the bound.
#![cfg(test)]
#![allow(clippy::expect_used, clippy::unwrap_used)]

#[path = "../../../burn-ddp/src/group/host/shm/sync.rs"]
mod sync;

mod futex;
mod rounds;
