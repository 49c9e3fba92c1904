//! Where a loader stands.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Epoch and cursor, shared by a loader and its running pass.
#[derive(Debug, Default)]
pub(super) struct Position(Mutex<Inner>);

#[derive(Clone, Debug, Default)]
struct Inner {
    epoch: u64,
    cursor: usize,
    /// A pass over `epoch` has begun.
    begun: bool,
    /// Names the newest pass; an older one that is still alive must not move the position.
    ticket: u64,
}

/// Where a pass begins, and its name.
pub(super) struct Start {
    pub(super) epoch: u64,
    pub(super) cursor: usize,
    pub(super) ticket: u64,
}

impl Position {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn copy(&self) -> Self {
        Self(Mutex::new(self.lock().clone()))
    }

    /// Names a new pass: what is left of the current epoch if it has not been begun, else the next epoch.
    pub(super) fn begin(&self) -> Start {
        let mut inner = self.lock();
        if inner.begun {
            inner.epoch = inner.epoch.wrapping_add(1);
            inner.cursor = 0;
        }
        inner.begun = true;
        inner.ticket += 1;
        Start {
            epoch: inner.epoch,
            cursor: inner.cursor,
            ticket: inner.ticket,
        }
    }

    pub(super) fn get(&self) -> (u64, usize) {
        let inner = self.lock();
        (inner.epoch, inner.cursor)
    }

    pub(super) fn set(&self, epoch: u64, cursor: usize) {
        let mut inner = self.lock();
        let ticket = inner.ticket + 1;
        *inner = Inner {
            epoch,
            cursor,
            begun: false,
            ticket,
        };
    }

    pub(super) fn advance(&self, ticket: u64, cursor: usize) {
        let mut inner = self.lock();
        if inner.ticket == ticket {
            inner.cursor = cursor;
        }
    }

    pub(super) fn finish(&self, ticket: u64) {
        let mut inner = self.lock();
        // `begun` is false once finished: asking an ended pass again must not skip an epoch.
        if inner.ticket == ticket && inner.begun {
            *inner = Inner {
                epoch: inner.epoch.wrapping_add(1),
                cursor: 0,
                begun: false,
                ticket,
            };
        }
    }
}
