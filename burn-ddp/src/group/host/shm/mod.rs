//! The host group through shared memory (Linux).
//!
//! | file | holds |
//! |---|---|
//! | `sync` | arrival counters: publish, wait, sleep; model-checked |
//! | `futex` | the two system calls under it |
//! | `wait` | spin, then sleep, with deadline and liveness |
//! | `segment` | a file of shared memory that all ranks have mapped, or none |
//! | `rounds` | the protocol: two areas a rank, written and read in turns |
//! | `collectives` | all operations on the caller's memory, as rounds |
//! | `shards` | an all-reduce in two halves, for ranks that go on to other machines between them |
//! | `group` | [`ShmGroup`] |
//! | `buffer` | buffers that live in a segment of their own |
//!
//! Everything rests on one invariant, stated and argued in `rounds`; the algorithms above it are
//! safe code.

mod buffer;
mod collectives;
mod futex;
mod group;
#[cfg(test)]
mod mock;
mod rounds;
mod segment;
mod shards;
mod sync;
mod wait;

pub(super) use collectives::{Operation, share};
pub(crate) use group::{Options, ShmGroup};
#[cfg(test)]
pub(crate) use mock::MockControl;
pub(super) use segment::NoSharedMemory;
