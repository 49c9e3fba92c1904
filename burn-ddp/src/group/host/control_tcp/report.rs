//! Gathers the ranks' last operations on rank 0 and writes them down, once.

use super::super::control::REPORT_LIMIT;
use crate::group::{
    GroupError,
    recorder::{Report, Tail},
};
use std::time::Instant;

/// A report in the making.
#[derive(Debug)]
pub(super) struct Collection {
    since: Instant,
    cause: GroupError,
    tails: Vec<Option<Tail>>,
}

impl Collection {
    /// With rank 0's own tail.
    pub(super) fn new(world_size: usize, cause: GroupError, own: Tail) -> Self {
        let mut tails = vec![None; world_size];
        tails[0] = Some(own);
        Self {
            since: Instant::now(),
            cause,
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
        let timeout = matches!(self.cause, GroupError::Timeout { .. });
        if timeout && !tracing::dispatcher::has_been_set() {
            eprintln!("burn-ddp: {report}");
        }
    }
}
