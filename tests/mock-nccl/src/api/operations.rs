//! Those that put an operation on a stream.

use super::{Handle, hang_if};
use crate::{
    code::INVALID_USAGE,
    element, group, message,
    operation::{Kind, Operation},
    registry,
};
use std::{
    ffi::{c_int, c_void},
    ptr,
    sync::atomic::Ordering,
};

/// An operation, called.
fn call(
    function: &str,
    kind: Kind,
    [send, recv]: [*const c_void; 2],
    count: usize,
    dtype: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let entered = match registry::enter_ready(comm, function) {
        Ok(entered) => entered,
        Err(code) => return group::error(code),
    };
    let comm = &entered.comm;
    let number = comm.called.fetch_add(1, Ordering::Relaxed);
    hang_if(comm.faults.hits("call-hang", number));
    if comm.faults.hits("call-unknown", number) {
        return group::error(99);
    }
    if comm.faults.hits("call-error", number) || element::size(dtype) == 0 {
        message::set(&format!("mock: {function} was made to fail"));
        comm.set_state(INVALID_USAGE);
        return group::error(INVALID_USAGE);
    }
    let operation = Operation {
        kind,
        send: send.addr(),
        recv: recv.addr(),
        count,
        dtype,
        number,
    };
    group::add(comm.clone(), operation, stream.addr())
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let kind = Kind::AllReduce { op };
    call(
        "ncclAllReduce",
        kind,
        [send, recv],
        count,
        dtype,
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduce(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let root = root as usize;
    let kind = Kind::Reduce { op, root };
    call("ncclReduce", kind, [send, recv], count, dtype, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let kind = Kind::ReduceScatter { op };
    call(
        "ncclReduceScatter",
        kind,
        [send, recv],
        count,
        dtype,
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclBroadcast(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let root = root as usize;
    let kind = Kind::Broadcast { root };
    call(
        "ncclBroadcast",
        kind,
        [send, recv],
        count,
        dtype,
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let kind = Kind::AllGather;
    call(
        "ncclAllGather",
        kind,
        [send, recv],
        count,
        dtype,
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let peer = peer as usize;
    let kind = Kind::Send { peer };
    let buffers = [send, ptr::null()];
    call("ncclSend", kind, buffers, count, dtype, comm, stream)
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(
    recv: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Handle,
    stream: Handle,
) -> c_int {
    let peer = peer as usize;
    let kind = Kind::Recv { peer };
    let buffers = [ptr::null(), recv.cast_const()];
    call("ncclRecv", kind, buffers, count, dtype, comm, stream)
}
