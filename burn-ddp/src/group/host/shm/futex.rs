//! What the arrival counters are built on. The model checker replaces this file by its own.

pub(super) use rustix::thread::futex;
pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::Duration;

/// Sleeps until [`wake_all`] on the same word, `limit`, a signal or a spurious wake-up, unless the
/// word is no longer `seen`. Between processes: the word lies in a shared mapping.
pub(super) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let limit = futex::Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    };
    // Every outcome sends the caller back to look at the word.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&limit));
}

pub(super) fn wake_all(word: &AtomicU32) {
    // Fails for a bad address only.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}
