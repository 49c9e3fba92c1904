//! The time that an operation has, and the warning on the way.

use super::control::Control;
use crate::{
    group::{GroupError, Ranks, Result, ops::Call},
    notice,
};
use std::{
    cell::Cell,
    time::{Duration, Instant},
};

/// From the start of one operation. Warns when half of the limit is over, so that a hang shows in the log before it
/// is an error; without a limit, again and again at that pace.
pub(super) struct Deadline<'a> {
    control: &'a dyn Control,
    start: Instant,
    limit: Option<Duration>,
    warning: Cell<Option<Duration>>,
}

impl<'a> Deadline<'a> {
    /// For `call`, which begins now.
    pub(super) fn new(control: &'a dyn Control, call: Call) -> Self {
        let limit = control.operation_timeout();
        Self {
            control,
            start: Instant::now(),
            limit: call.is_limited().then_some(limit),
            warning: Cell::new(Some(limit / 2)),
        }
    }

    /// At most `slice`, and not beyond the next moment that matters here.
    pub(super) fn slice(&self, slice: Duration) -> Duration {
        let next = self.limit.into_iter().chain(self.warning.get()).min();
        let left = next.map(|next| next.saturating_sub(self.start.elapsed()));
        left.map_or(slice, |left| left.min(slice))
    }

    /// The error once the time is over. `operation` and `missing` are only evaluated for a text.
    pub(super) fn check(
        &self,
        operation: &dyn Fn() -> String,
        missing: &dyn Fn() -> Vec<usize>,
    ) -> Result<()> {
        let (elapsed, rank) = (self.start.elapsed(), self.control.name(self.control.rank()));
        let over = self.limit.is_some_and(|limit| elapsed >= limit);
        let warn = self.warning.get().is_some_and(|at| elapsed >= at);
        if !over && !warn {
            return Ok(());
        }
        let (operation, missing) = (operation(), missing());
        let hosts: Vec<_> = missing
            .iter()
            .map(|rank| self.control.host(*rank))
            .collect();
        let missing: Vec<_> = missing
            .into_iter()
            .map(|rank| self.control.name(rank))
            .collect();
        if over {
            return Err(GroupError::Timeout {
                rank,
                operation,
                elapsed,
                missing,
                hosts,
            });
        }
        let half = self.control.operation_timeout() / 2;
        let (next, then) = match self.limit {
            Some(limit) => (None, format!("it fails after {limit:.1?}")),
            None => (
                Some(elapsed + half),
                "it goes on as long as they live".into(),
            ),
        };
        self.warning.set(next);
        notice::warn(format_args!(
            "rank {rank}: {operation} has waited {elapsed:.1?} for {}; {then}",
            Ranks(&missing, &hosts)
        ));
        Ok(())
    }
}
