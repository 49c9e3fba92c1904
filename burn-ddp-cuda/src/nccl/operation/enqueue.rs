//! The calls of NCCL.

use super::Operation;
use crate::nccl::{
    Stream,
    ffi::{RawComm, SUCCESS},
    is_error,
    library::Functions,
};
use std::ffi::c_int;

impl Operation {
    /// Hands it to NCCL and returns NCCL's code.
    ///
    /// # Safety
    ///
    /// `comm` is a communicator that nothing else is using at the moment; [`check`](Self::check) has passed; the buffers are on its device
    /// and stay until `stream`, a stream of that device, has passed the operation.
    pub(in crate::nccl) unsafe fn enqueue(
        &self,
        nccl: &Functions,
        comm: RawComm,
        Stream(stream): Stream,
    ) -> c_int {
        // SAFETY: the types are NCCL's; the rest is the caller's promise. Roots and peers are below the world size, which is a c_int.
        unsafe {
            match *self {
                Operation::AllReduce {
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                } => (nccl.all_reduce)(
                    send.raw(),
                    recv.raw(),
                    count,
                    dtype.code(),
                    op.code(),
                    comm,
                    stream,
                ),
                Operation::Reduce {
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                    root,
                } => (nccl.reduce)(
                    send.raw(),
                    recv.raw(),
                    count,
                    dtype.code(),
                    op.code(),
                    root as c_int,
                    comm,
                    stream,
                ),
                Operation::Broadcast {
                    send,
                    recv,
                    count,
                    dtype,
                    root,
                } => (nccl.broadcast)(
                    send.raw(),
                    recv.raw(),
                    count,
                    dtype.code(),
                    root as c_int,
                    comm,
                    stream,
                ),
                Operation::AllGather {
                    send,
                    recv,
                    count,
                    dtype,
                } => (nccl.all_gather)(send.raw(), recv.raw(), count, dtype.code(), comm, stream),
                Operation::ReduceScatter {
                    send,
                    recv,
                    count,
                    dtype,
                    op,
                } => (nccl.reduce_scatter)(
                    send.raw(),
                    recv.raw(),
                    count,
                    dtype.code(),
                    op.code(),
                    comm,
                    stream,
                ),
                Operation::Send {
                    send,
                    count,
                    dtype,
                    peer,
                } => (nccl.send)(send.raw(), count, dtype.code(), peer as c_int, comm, stream),
                Operation::Recv {
                    recv,
                    count,
                    dtype,
                    peer,
                } => (nccl.recv)(recv.raw(), count, dtype.code(), peer as c_int, comm, stream),
            }
        }
    }

    /// Hands several to NCCL as one, and returns the first code that is an error, else that of the whole.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue), for each.
    pub(in crate::nccl) unsafe fn enqueue_group(
        operations: &[Self],
        nccl: &Functions,
        comm: RawComm,
        stream: Stream,
    ) -> c_int {
        // SAFETY: takes no argument. NCCL keeps the group on this thread until the end below, and nothing in between can unwind.
        let start = unsafe { (nccl.group_start)() };
        if start != SUCCESS {
            return start;
        }
        let mut first = SUCCESS;
        for operation in operations {
            // SAFETY: the caller's promise.
            let code = unsafe { operation.enqueue(nccl, comm, stream) };
            if is_error(code) {
                first = code;
                break;
            }
        }
        // SAFETY: takes no argument; belongs to the start above. Necessary after an error, too.
        let end = unsafe { (nccl.group_end)() };
        if first == SUCCESS { end } else { first }
    }
}
