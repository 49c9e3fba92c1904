//! When things happened in one round.

use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};

/// The timeline of the last synchronised backward pass of one wrapped model on this rank. Times
/// count from the first gradient of the pass.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RoundTrace {
    /// Module path of each parameter and the time at which its gradient was complete, in that order.
    /// Parameters that this rank did not use are absent.
    pub ready: Vec<(String, Duration)>,
    /// The buckets in launch order.
    pub buckets: Vec<BucketTrace>,
    /// All layers' backward had run; from here on the pass only waited.
    pub backward_end: Duration,
    /// The reduced gradients were there.
    pub end: Duration,
}

/// One bucket's way through a round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BucketTrace {
    /// Module paths of the parameters in it.
    pub parameters: Vec<String>,
    /// Bytes reduced: gradients and control tail.
    pub bytes: usize,
    /// Its last gradient was packed and it was handed to the communication thread.
    pub launched: Duration,
    /// The communication thread took it up.
    pub started: Duration,
    /// Its reduced gradients were ready.
    pub finished: Duration,
}

impl RoundTrace {
    /// (time spent in communication, share of it that lay inside backward).
    pub(super) fn communication(&self) -> (Duration, Duration) {
        let inside = |b: &BucketTrace| b.finished.min(self.backward_end).saturating_sub(b.started);
        (
            self.buckets.iter().map(|b| b.finished - b.started).sum(),
            self.buckets.iter().map(inside).sum(),
        )
    }
}

/// The clock of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundClock(Instant);

impl RoundClock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    pub(super) fn at(self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.0)
    }

    pub(super) fn now(self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communication_counts_what_lies_inside_backward() {
        let ms = Duration::from_millis;
        let bucket = |started, finished| BucketTrace {
            started: ms(started),
            finished: ms(finished),
            ..Default::default()
        };
        let trace = RoundTrace {
            buckets: vec![bucket(10, 20), bucket(20, 40), bucket(50, 60)],
            backward_end: ms(30),
            ..Default::default()
        };
        assert_eq!(trace.communication(), (ms(40), ms(20)));
    }
}
