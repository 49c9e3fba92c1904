//! The futex under the model.

pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::sync::{Condvar, Mutex};
use std::time::Duration;

loom::lazy_static! {
    /// The kernel's bucket: all words share one, which only adds spurious wake-ups.
    static ref KERNEL: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());
}

/// As the kernel does it: compare and go to sleep under the lock that a waker takes. There is no
/// limit here: a wake-up that is lost is a deadlock, which loom reports.
pub(super) fn wait(word: &AtomicU32, seen: u32, _: Duration) {
    let guard = KERNEL.0.lock().unwrap();
    if word.load(Ordering::Relaxed) == seen {
        drop(KERNEL.1.wait(guard).unwrap());
    }
}

pub(super) fn wake_all(_: &AtomicU32) {
    let _guard = KERNEL.0.lock().unwrap();
    KERNEL.1.notify_all();
}
