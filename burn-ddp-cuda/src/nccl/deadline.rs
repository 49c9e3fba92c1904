//! The time that one operation has.

use std::time::{Duration, Instant};

/// What a rank is doing, since when, and for how long it may.
#[derive(Clone, Debug)]
pub(super) struct Deadline {
    pub(super) operation: String,
    start: Instant,
    pub(super) limit: Duration,
}

impl Deadline {
    /// For `operation`, which begins now.
    pub(super) fn new(operation: impl Into<String>, limit: Duration) -> Self {
        Self {
            operation: operation.into(),
            start: Instant::now(),
            limit,
        }
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The time that is left; zero is the end.
    pub(super) fn left(&self) -> Duration {
        self.limit.saturating_sub(self.elapsed())
    }
}
