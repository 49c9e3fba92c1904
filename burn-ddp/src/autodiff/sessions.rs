//! What all wrapped models of a process share.

use super::session::Session;
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicUsize, Ordering},
};

/// Whether backward passes synchronise: off while any `no_sync` guard lives.
#[derive(Debug, Default)]
pub(crate) struct SyncSwitch(AtomicUsize);

impl SyncSwitch {
    pub(crate) fn hold(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
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
