//! The C functions.

#![allow(non_snake_case)]

mod operations;

use crate::{
    code::{IN_PROGRESS, INVALID_ARGUMENT, SUCCESS, SYSTEM_ERROR},
    comm::Comm,
    faults::{self, Faults},
    group, lock, message, registry,
    segment::Segment,
    stream,
    worker::{self, Job},
};
use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    process, ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, SystemTime},
};

/// `ncclUniqueId`.
#[repr(C)]
pub(crate) struct UniqueId([u8; 128]);

/// `ncclConfig_t` of NCCL 2.19.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    numbers: [c_int; 3],
    net_name: *const c_char,
    more_numbers: [c_int; 2],
}

type Handle = *mut c_void;

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let number = faults::version().unwrap_or(22703);
    // SAFETY: the caller's pointer is writable.
    unsafe { *version = number as c_int };
    SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.unwrap_or_default().as_nanos();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("mock-nccl-{}-{now}-{number}", process::id());
    let mut bytes = [0; 128];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the caller's pointer is writable.
    unsafe { *id = UniqueId(bytes) };
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetLastError(_: Handle) -> *const c_char {
    message::last()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommInitRankConfig(
    handle: *mut Handle,
    world: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const Config,
) -> c_int {
    // SAFETY: the caller's pointer is readable and has at least the fields of NCCL 2.19.
    let config = unsafe { &*config };
    let unset = config.numbers.iter().chain(&config.more_numbers);
    if config.size != 48
        || config.magic != 0xcafe_beef
        || config.version < 21700
        || config.blocking != 0
        || !config.net_name.is_null()
        || unset.into_iter().any(|number| *number != c_int::MIN)
    {
        registry::breach("a configuration that is not NCCL_CONFIG_INITIALIZER with blocking = 0");
        return INVALID_ARGUMENT;
    }
    let (rank, world) = (rank as usize, world as usize);
    let faults = Faults::of(rank);
    let id = CStr::from_bytes_until_nul(&id.0).map(CStr::to_string_lossy);
    let segment = id
        .map_err(|_| ())
        .and_then(|id| Segment::open(&id, world).map_err(|_| ()));
    let Ok(segment) = segment else {
        message::set("mock: the file of the communicator cannot be opened");
        return SYSTEM_ERROR;
    };
    if faults.has("init-refused") {
        segment.unlink();
        message::set("mock: the start was refused");
        // SAFETY: the caller's pointer is writable.
        unsafe { *handle = ptr::null_mut() };
        return SYSTEM_ERROR;
    }
    let (jobs, todo) = mpsc::channel();
    let comm = Arc::new(Comm::new(rank, world, segment, faults, jobs));
    let weak = Arc::downgrade(&comm);
    let thread = thread::spawn(move || worker::main(&weak, &todo));
    *lock(&comm.worker) = Some(thread);
    comm.submit(Job::Init);
    // SAFETY: the caller's pointer is writable.
    unsafe { *handle = registry::add(comm) };
    IN_PROGRESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(comm: Handle, code: *mut c_int) -> c_int {
    match registry::enter(comm, "ncclCommGetAsyncError") {
        Ok(entered) => {
            // SAFETY: the caller's pointer is writable.
            unsafe { *code = entered.comm.state() };
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: Handle) -> c_int {
    match registry::enter_ready(comm, "ncclCommFinalize") {
        Ok(entered) => {
            entered.comm.submit(Job::Finalize);
            IN_PROGRESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: Handle) -> c_int {
    match registry::enter_ready(comm, "ncclCommDestroy") {
        Ok(entered) => {
            hang_if(entered.comm.faults.has("destroy-hang"));
            entered.comm.stop();
            entered.remove();
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: Handle) -> c_int {
    match registry::enter(comm, "ncclCommAbort") {
        Ok(entered) => {
            hang_if(entered.comm.faults.has("abort-hang"));
            entered.comm.abort();
            entered.remove();
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> c_int {
    group::start()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> c_int {
    group::end()
}

fn hang_if(fault: bool) {
    if fault {
        loop {
            thread::park();
        }
    }
}

/// Only here: waits for the stream, `milliseconds` at most; 0 when everything on it is done, else 1.
#[unsafe(no_mangle)]
extern "C" fn mockStreamSynchronize(stream: Handle, milliseconds: u64) -> c_int {
    let done = stream::of(stream.addr()).synchronize(Duration::from_millis(milliseconds));
    c_int::from(!done)
}

/// Only here: how many communicators of this process are neither destroyed nor aborted.
#[unsafe(no_mangle)]
extern "C" fn mockLiveCommunicators() -> c_int {
    registry::live() as c_int
}

/// Only here: how often this process broke NCCL's rules.
#[unsafe(no_mangle)]
extern "C" fn mockBreaches() -> c_int {
    registry::breaches()
}
