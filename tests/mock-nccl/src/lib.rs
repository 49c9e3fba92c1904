//! A stand-in for NCCL's library, for tests of burn-ddp-cuda on machines without a GPU.
//!
//! It has the C functions that burn-ddp-cuda calls, for communicators that do not block, and does their work between processes, on *host*
//! pointers: through a file in the directory `MOCK_NCCL_DIR` (else the system's for temporary files), which the ranks map. As with NCCL, a
//! communicator starts on a thread of its own, operations are put on a stream in the background and done there in order, and an abort
//! ends what hangs. A stream is any number; each has a thread.
//!
//! NCCL's rules are checked: one thread at a time, nothing while a call is in progress, nothing after the end. A breach is counted (and printed),
//! see `mockBreaches`. `MOCK_NCCL_FAULT` makes it fail, see `faults`.

mod api;
mod comm;
mod element;
mod faults;
mod group;
mod message;
mod operation;
mod registry;
mod run;
mod segment;
mod stream;
mod worker;

/// `ncclResult_t`.
pub(crate) mod code {
    use std::ffi::c_int;

    pub(crate) const SUCCESS: c_int = 0;
    pub(crate) const SYSTEM_ERROR: c_int = 2;
    pub(crate) const INVALID_ARGUMENT: c_int = 4;
    pub(crate) const INVALID_USAGE: c_int = 5;
    pub(crate) const REMOTE_ERROR: c_int = 6;
    pub(crate) const IN_PROGRESS: c_int = 7;
}

/// A lock whose holder has not left anything half-way.
pub(crate) fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}
