//! The communicators that live, by handle, and the rules for their use.

use crate::{
    code::{IN_PROGRESS, INVALID_ARGUMENT},
    comm::Comm,
    lock,
};
use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    ptr,
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicI32, AtomicUsize, Ordering},
    },
};

static COMMS: LazyLock<Mutex<HashMap<usize, Entry>>> = LazyLock::new(Mutex::default);
/// Handles are never used again, so that a use after the end shows.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
static BREACHES: AtomicI32 = AtomicI32::new(0);

struct Entry {
    comm: Arc<Comm>,
    /// A thread is in a function of this communicator.
    busy: bool,
}

pub(crate) fn breach(what: &str) {
    BREACHES.fetch_add(1, Ordering::Relaxed);
    eprintln!("mock-nccl: a breach of NCCL's rules: {what}");
}

pub(crate) fn breaches() -> c_int {
    BREACHES.load(Ordering::Relaxed)
}

pub(crate) fn live() -> usize {
    lock(&COMMS).len()
}

pub(crate) fn add(comm: Arc<Comm>) -> *mut c_void {
    let handle = NEXT.fetch_add(16, Ordering::Relaxed);
    lock(&COMMS).insert(handle, Entry { comm, busy: false });
    ptr::without_provenance_mut(handle)
}

/// A thread in a function of a communicator.
pub(crate) struct Entered {
    pub(crate) comm: Arc<Comm>,
    handle: usize,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(entry) = lock(&COMMS).get_mut(&self.handle) {
            entry.busy = false;
        }
    }
}

impl Entered {
    /// The communicator is gone with this call.
    pub(crate) fn remove(&self) {
        lock(&COMMS).remove(&self.handle);
    }
}

/// Enters a function that is legal at any time.
pub(crate) fn enter(handle: *mut c_void, function: &str) -> Result<Entered, c_int> {
    let handle = handle.addr();
    let mut comms = lock(&COMMS);
    let Some(entry) = comms.get_mut(&handle) else {
        breach(&format!("{function} with a communicator that is gone"));
        return Err(INVALID_ARGUMENT);
    };
    if entry.busy {
        breach(&format!("{function} while another thread is in a call"));
    }
    entry.busy = true;
    let comm = entry.comm.clone();
    Ok(Entered { comm, handle })
}

/// Enters a function that is legal when no call is in progress and no error was reported.
pub(crate) fn enter_ready(handle: *mut c_void, function: &str) -> Result<Entered, c_int> {
    let entered = enter(handle, function)?;
    match entered.comm.state() {
        0 => Ok(entered),
        IN_PROGRESS => {
            breach(&format!("{function} while a call is in progress"));
            Err(INVALID_ARGUMENT)
        }
        error => Err(error),
    }
}
