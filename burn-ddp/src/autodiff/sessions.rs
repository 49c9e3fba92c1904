//! What all wrapped models of a process share.

use super::session::Session;
use crate::reducer::CommHook;
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

/// What the training script says of the backward passes to come.
#[derive(Debug, Default)]
pub(crate) struct SyncSwitch {
    /// `no_sync` guards that live. Backward passes synchronise while there are none.
    held: AtomicUsize,
    /// The number of samples of each thread that is inside `weighted`.
    samples: Mutex<HashMap<ThreadId, u64>>,
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

    /// Sets this thread's number of samples and returns what it was.
    pub(crate) fn weigh(&self, samples: Option<u64>) -> Option<u64> {
        let thread = thread::current().id();
        let mut all = lock(&self.samples);
        match samples {
            Some(samples) => all.insert(thread, samples),
            None => all.remove(&thread),
        }
    }

    pub(super) fn samples(&self) -> Option<u64> {
        lock(&self.samples).get(&thread::current().id()).copied()
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

    /// Whether a model that lives has this hook.
    pub(crate) fn has_hook(&self, hook: &Arc<dyn CommHook>) -> bool {
        let live = self.live();
        let mut hooks = live.iter().filter_map(|session| session.rule.hook.as_ref());
        hooks.any(|other| Arc::ptr_eq(other, hook))
    }

    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A panic while the lock was held left no half-made state that the next holder could not see.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
