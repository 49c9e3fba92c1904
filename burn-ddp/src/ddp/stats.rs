//! What gradient reduction has cost.

use super::Ddp;
use crate::reducer::RoundTrace;
use serde::Serialize;

/// What gradient reduction has cost so far on this rank, over all wrapped models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stats {
    /// Synchronised backward passes.
    pub rounds: u64,
    /// Gradient collectives issued: one per bucket and round, and one when the buckets were ordered anew. Those of a communication hook are not counted.
    pub collectives: u64,
    /// Bytes that one synchronised backward pass reduces, control tails included (of the last one, summed over models); before a communication hook.
    pub gradient_bytes_per_step: usize,
    /// Buckets per synchronised backward pass, summed over models.
    pub buckets: usize,
    /// Seconds that the communication threads spent reducing.
    pub communication_seconds: f64,
    /// Share of that time that lay inside backward, 0 to 1; 0 when nothing was reduced.
    pub overlap_ratio: f64,
}

impl Ddp {
    /// What gradient reduction has cost so far, summed over the wrapped models that are alive; local.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        let mut overlapped = 0.0;
        for session in self.inner.sessions.live() {
            let totals = session.totals();
            stats.rounds += totals.rounds;
            stats.collectives += totals.collectives;
            stats.gradient_bytes_per_step += totals.bytes_per_round;
            stats.buckets += totals.buckets;
            stats.communication_seconds += totals.communication.as_secs_f64();
            overlapped += totals.overlapped.as_secs_f64();
        }
        if stats.communication_seconds > 0.0 {
            stats.overlap_ratio = overlapped / stats.communication_seconds;
        }
        stats
    }

    /// The timeline of the last synchronised backward pass of each wrapped model, in the order of `wrap`; local. Empty in a world of one.
    pub fn traces(&self) -> Vec<RoundTrace> {
        self.inner
            .sessions
            .live()
            .iter()
            .filter_map(|s| s.trace())
            .collect()
    }
}
