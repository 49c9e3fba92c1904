//! Log lines about callers that were rejected, so few that nobody outside can fill the log.

use std::{
    fmt,
    net::SocketAddr,
    time::{Duration, Instant},
};

/// Lines before they become rare.
const FIRST: usize = 10;
/// Between two later lines.
const EVERY: Duration = Duration::from_secs(60);

/// The callers that one process has rejected.
#[derive(Debug, Default)]
pub(super) struct RejectionLog {
    lines: usize,
    silent: u64,
    last: Option<Instant>,
}

impl RejectionLog {
    /// Warns about a caller, or counts it for a later line.
    pub(super) fn rejected(&mut self, rank: usize, from: SocketAddr, why: &dyn fmt::Display) {
        match self.count(Instant::now()) {
            Some(0) => tracing::warn!("rank {rank} rejected {from}: {why}"),
            Some(others) => tracing::warn!(
                "rank {rank} rejected {from}: {why}; and {others} others since the last such line"
            ),
            None => {}
        }
    }

    /// Whether to write a line, and how many callers had none since the last.
    fn count(&mut self, now: Instant) -> Option<u64> {
        let due = self.lines < FIRST
            || self
                .last
                .is_none_or(|last| now.saturating_duration_since(last) >= EVERY);
        if !due {
            self.silent += 1;
            return None;
        }
        self.lines += 1;
        self.last = Some(now);
        Some(std::mem::take(&mut self.silent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_and_then_one_a_minute_with_a_count() {
        let (mut log, start) = (RejectionLog::default(), Instant::now());
        let mut at = |seconds| log.count(start + Duration::from_secs(seconds));
        let first: Vec<_> = (0..12).map(|_| at(0)).collect();
        assert_eq!(first[..10], [Some(0); 10]);
        assert_eq!(first[10..], [None; 2]);
        assert_eq!(
            [at(59), at(60), at(61), at(120)],
            [None, Some(3), None, Some(1)]
        );
        assert_eq!(at(600), Some(0));
    }
}
