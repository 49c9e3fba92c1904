//! One operation, as it was called.

use std::ffi::c_int;

/// What, with the ranks that it names.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    AllReduce { op: c_int },
    Reduce { op: c_int, root: usize },
    Broadcast { root: usize },
    AllGather,
    ReduceScatter { op: c_int },
    Send { peer: usize },
    Recv { peer: usize },
}

/// Pointers are addresses of host memory that the caller keeps until the stream has passed the operation.
#[derive(Clone, Copy)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    pub(crate) send: usize,
    pub(crate) recv: usize,
    pub(crate) count: usize,
    pub(crate) dtype: c_int,
    /// Its number on this communicator, from 0.
    pub(crate) number: u64,
}
