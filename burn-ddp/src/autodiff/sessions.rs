//! What all wrapped models of a process share.

use super::session::Session;
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicUsize, Ordering},
};

/// What the training script says of the backward passes to come.
#[derive(Debug, Default)]
pub(crate) struct SyncSwitch {
    /// `no_sync` guards that live. Backward passes synchronise while there are none.
    held: AtomicUsize,
    /// The number of samples, inside `weighted`.
    samples: Mutex<Option<u64>>,
}

impl SyncSwitch {
    pub(crate) fn hold(&self) {
        self.held.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self) {
        self.held.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.held.load(Ordering::Relaxed) == 0
    }

    /// Sets the number of samples and returns what it was.
    pub(crate) fn weigh(&self, samples: Option<u64>) -> Option<u64> {
        std::mem::replace(&mut *lock(&self.samples), samples)
    }

    pub(super) fn samples(&self) -> Option<u64> {
        *lock(&self.samples)
    }
}

/// All wrapped models of a process.
///
/// A graph may run through several of them; its first return step ends the rounds of all.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<Vec<Weak<Session>>>);

impl Sessions {
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.0);
        sessions.retain(|s| s.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A panic while the lock was held left no half-made state that the next holder could not see.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
