//! Gathers the ranks' last operations on rank 0 and writes them down, once.

use super::{
    super::control::REPORT_LIMIT,
    state::{Shared, State},
};
use crate::group::{
    GroupError,
    recorder::{Report, Tail},
};
use std::time::{Duration, Instant};

/// A report in the making.
#[derive(Debug)]
pub(super) struct Collection {
    since: Instant,
    cause: GroupError,
    /// A time-out, of whatever rank.
    hang: bool,
    tails: Vec<Option<Tail>>,
}

impl Collection {
    /// With rank 0's own tail.
    pub(super) fn new(world_size: usize, cause: GroupError, hang: bool, own: Tail) -> Self {
        let mut tails = vec![None; world_size];
        tails[0] = Some(own);
        Self {
            since: Instant::now(),
            cause,
            hang,
            tails,
        }
    }

    pub(super) fn add(&mut self, peer: usize, tail: Tail) {
        self.tails[peer] = Some(tail);
    }

    pub(super) fn due(&self) -> Instant {
        self.since + REPORT_LIMIT
    }

    /// Whether all `reachable` ranks have answered, or have had their time.
    pub(super) fn is_complete(
        &self,
        reachable: impl IntoIterator<Item = usize>,
        now: Instant,
    ) -> bool {
        now >= self.due() || reachable.into_iter().all(|rank| self.tails[rank].is_some())
    }

    /// To the log; a hang's also to stderr in a program without one, which has no other trace of it.
    pub(super) fn write(&self, hosts: &[String]) {
        let report = Report {
            cause: &self.cause.to_string(),
            hosts,
            tails: &self.tails,
        };
        tracing::error!("{report}");
        if self.hang && !tracing::dispatcher::has_been_set() {
            eprintln!("burn-ddp: {report}");
        }
    }
}

impl Shared {
    /// On rank 0: what another rank did last.
    pub(super) fn tail(&self, peer: usize, tail: Tail) {
        if let Some(collection) = &mut self.lock().collection {
            collection.add(peer, tail);
        }
    }

    /// On rank 0, by the monitor: writes the report as soon as all that can be reached have answered.
    pub(super) fn report(&self, reachable: impl IntoIterator<Item = usize>, now: Instant) {
        let mut state = self.lock();
        let complete = |collection: &mut Collection| collection.is_complete(reachable, now);
        let Some(collection) = state.collection.take_if(complete) else {
            return;
        };
        // Callers that wait for the report may exit as soon as they see it done, so it is written under the lock.
        collection.write(&self.hosts);
        self.changed.notify_all();
    }

    /// Until when the report may take, if one is being made.
    pub(super) fn report_due(&self) -> Option<Instant> {
        Some(self.lock().collection.as_ref()?.due())
    }

    /// Leaves the monitor the time to write the report, since the process may be about to exit.
    pub(super) fn wait_for_report(&self, limit: Duration) {
        let waiting = |state: &mut State| state.collection.is_some() && !state.finished;
        drop(self.changed.wait_timeout_while(self.lock(), limit, waiting));
    }
}
