//! Arrival counters: how ranks tell each other how far they are.
//!
//! Each rank owns one [`Line`], which counts the rounds that it has published. A rank writes its
//! memory of a round, publishes the round (release) and waits until every other rank has published
//! it too (acquire); then it may read theirs. [`Turn`] keeps the count and says which half of a
//! rank's memory a round uses.
//!
//! Sleeping is Dekker's pattern with the kernel's help. The waiter registers as sleeper, fences, and
//! looks at the counter; the publisher raises the counter, fences, and looks for sleepers. At least
//! one of them sees the other: either the waiter finds the new count, or the publisher finds a
//! sleeper and wakes it. A waiter that falls between look and sleep is caught by the futex, which
//! compares the word again before it sleeps.
//!
//! This file depends on `futex` alone, so that the model checker can run it (see the package
//! `burn-ddp-loom`).

use super::futex::{self, AtomicU32, Ordering, fence};
use std::time::Duration;

/// One rank's counter, on cache lines of its own (two: processors fetch them in pairs).
#[repr(C, align(128))]
pub(super) struct Line {
    /// The last round published. Compared with wrap-around: ranks are never two rounds apart.
    round: AtomicU32,
    /// Ranks that sleep on `round`. Never too small; too large after one was killed in its sleep, which
    /// costs a needless system call per round.
    sleepers: AtomicU32,
}

impl Line {
    #[cfg(any(test, loom))]
    pub(super) fn new() -> Self {
        Self {
            round: AtomicU32::new(0),
            sleepers: AtomicU32::new(0),
        }
    }

    /// Makes everything that this rank wrote before visible to those who see `round`.
    pub(super) fn publish(&self, round: u32) {
        self.round.store(round, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) != 0 {
            futex::wake_all(&self.round);
        }
    }

    /// Whether the rank has published `round`; if so, its writes before that are visible.
    pub(super) fn reached(&self, round: u32) -> bool {
        is_at(self.round.load(Ordering::Acquire), round)
    }

    /// Sleeps for `limit` at most, and not at all once the rank has published `round`. May wake up early.
    pub(super) fn sleep(&self, round: u32, limit: Duration) {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = self.round.load(Ordering::Relaxed);
        if !is_at(seen, round) {
            futex::wait(&self.round, seen, limit);
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
    }
}

fn is_at(seen: u32, round: u32) -> bool {
    seen.wrapping_sub(round) as i32 >= 0
}

/// The round that a rank is about to publish.
///
/// A rank has two memories, used in turn. In round `t` it writes the one of `t`; it may read, on all
/// ranks, the one of `t - 1`, which everybody has published.
#[derive(Debug)]
pub(super) struct Turn(u32);

impl Turn {
    /// The first turn: the counters of a fresh segment are zero.
    pub(super) fn first() -> Self {
        Self(1)
    }

    /// The memory that this rank may write.
    pub(super) fn writes(&self) -> usize {
        (self.0 & 1) as usize
    }

    /// The memory of every rank that this rank may read.
    pub(super) fn reads(&self) -> usize {
        (self.0.wrapping_sub(1) & 1) as usize
    }

    /// Publishes the round and lets `wait` return once all ranks have published it. If it
    /// fails, the turn stays where it was.
    pub(super) fn advance<E>(
        &mut self,
        own: &Line,
        wait: impl FnOnce(u32) -> Result<(), E>,
    ) -> Result<(), E> {
        own.publish(self.0);
        wait(self.0)?;
        self.0 = self.0.wrapping_add(1);
        Ok(())
    }
}
