//! Whether other threads of this process run backward passes of wrapped models meanwhile.
//!
//! Burn's graph is one for all threads, and the end of a pass on one thread clears away what another is still building
//! (tracel-ai/burn#5573). A pass counts from its first gradient until its thread next meets a hook, since Burn clears away after the
//! last step that it runs.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    thread::{self, ThreadId},
};

// Relaxed: the locks of Burn's graph lie between a pass and the harm that it does on another thread.
static STARTED: AtomicU64 = AtomicU64::new(0);
static RUNNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static OWN: Own = const { Own { started: Cell::new(0), running: Cell::new(false) } };
}

/// The part of this thread.
struct Own {
    started: Cell<u64>,
    running: Cell<bool>,
}

impl Own {
    fn end(&self) {
        if self.running.replace(false) {
            RUNNING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        self.end();
    }
}

/// A pass has its first gradient of a model on this thread.
pub(super) fn begin() {
    OWN.with(|own| {
        if !own.running.replace(true) {
            own.started.set(own.started.get() + 1);
            STARTED.fetch_add(1, Ordering::Relaxed);
            RUNNING.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// This thread meets a hook, so that the pass it was in is over.
pub(super) fn end() {
    OWN.with(Own::end);
}

/// A moment, to ask later what has happened since.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    thread: ThreadId,
    started: u64,
    own: u64,
    others_running: bool,
}

impl Mark {
    pub(super) fn now() -> Self {
        OWN.with(|own| Self {
            thread: thread::current().id(),
            started: STARTED.load(Ordering::Relaxed),
            own: own.started.get(),
            others_running: RUNNING.load(Ordering::Relaxed) > usize::from(own.running.get()),
        })
    }

    /// Whether any other thread has been in a pass since. Asked in a pass of this thread.
    pub(super) fn others_since(&self) -> bool {
        let own = match self.thread == thread::current().id() {
            true => OWN.with(|own| own.started.get()) - self.own,
            // The forward pass ran on another thread: of this one's passes, the present one came after.
            false => 1,
        };
        self.others_running || STARTED.load(Ordering::Relaxed) - self.started > own
    }
}
