//! What all wrapped models of a process share.

use super::{
    gather::{Gather, Step},
    session::Session,
};
use crate::{group::GroupError, reducer::CommHook};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
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
pub(crate) struct Sessions {
    all: Mutex<Vec<Weak<Session>>>,
    /// Of the statistics that layers exchange, once there are such layers.
    pub(super) gather: OnceLock<Gather>,
    /// Such layers so far.
    pub(super) layers: AtomicU64,
    /// What they have exchanged since the last synchronised pass.
    pub(super) exchanges: Mutex<Vec<Step>>,
}

impl Sessions {
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.all);
        sessions.retain(|s| s.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    /// Whether a model that lives has this hook.
    pub(crate) fn has_hook(&self, hook: &Arc<dyn CommHook>) -> bool {
        let live = self.live();
        let mut hooks = live.iter().filter_map(|session| session.rule.hook.as_ref());
        hooks.any(|other| Arc::ptr_eq(other, hook))
    }

    /// Whether layers exchange statistics.
    pub(crate) fn has_gather(&self) -> bool {
        self.gather.get().is_some()
    }

    /// How layers exchange statistics; made by `new` the first time.
    pub(crate) fn gather(
        &self,
        new: impl FnOnce() -> Result<Gather, GroupError>,
    ) -> Result<Gather, GroupError> {
        match self.gather.get() {
            Some(gather) => Ok(gather.clone()),
            None => {
                let gather = new()?;
                Ok(self.gather.get_or_init(|| gather).clone())
            }
        }
    }

    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        lock(&self.all).iter().filter_map(Weak::upgrade).collect()
    }
}

/// A panic while the lock was held left no half-made state that the next holder could not see.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
