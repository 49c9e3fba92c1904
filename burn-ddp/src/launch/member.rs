//! A rank as its supervisor sees it: what it said, how it ended, and whose fault that was.

use super::{
    error::{Outcome, RankFailure},
    report::Record,
    spawn::Rank,
};

pub(super) struct Member {
    pub(super) rank: Rank,
    pub(super) pid: u32,
    /// What it reported: the last failure of its training function, and the last panic anywhere.
    pub(super) failure: Option<Record>,
    pub(super) panic: Option<Record>,
    /// A signal had stopped it when the launcher lost patience.
    pub(super) stopped: bool,
    pub(super) end: Option<End>,
}

#[derive(Clone, Copy)]
pub(super) struct End {
    pub(super) outcome: Outcome,
    pub(super) nanos: u64,
}

/// The number that all Unixes give it.
const SIGABRT: i32 = 6;

impl Member {
    pub(super) fn new(rank: Rank) -> Self {
        Self {
            pid: rank.child.id(),
            rank,
            failure: None,
            panic: None,
            stopped: false,
            end: None,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some() || self.end.is_some_and(|end| end.outcome != Outcome::Exit(0))
    }

    /// Why it failed, in its own words.
    pub(super) fn last_word(&self) -> Option<&Record> {
        // Without a last word, an exit code or an abort may come from a panic outside the training function.
        match self.end?.outcome {
            Outcome::Exit(_) | Outcome::Signal(SIGABRT) => {
                self.failure.as_ref().or(self.panic.as_ref())
            }
            _ => self.failure.as_ref(),
        }
    }

    /// With the time at which it began; `missed` since when others have missed this rank.
    pub(super) fn failure(&self, missed: Option<u64>) -> Option<(u64, RankFailure)> {
        let end = self.end?;
        let mut failure = RankFailure {
            rank: self.rank.rank,
            pid: self.pid,
            outcome: end.outcome,
            cause: None,
            secondary: false,
            stderr: self.rank.tail.lines(),
        };
        if let Some(record) = self.last_word().filter(|_| self.has_failed()) {
            failure.cause = Some(record.text.clone());
            failure.secondary = record.secondary;
            return Some((record.nanos, failure));
        }
        // It cannot be told when a silent rank came to grief, but it was before the others noticed.
        let missed = missed.map(|nanos| nanos.saturating_sub(1));
        match (end.outcome, missed) {
            (Outcome::Stopped | Outcome::Unkillable, Some(nanos)) => {
                let cause = if self.stopped {
                    "it stopped answering: a signal (SIGSTOP, SIGTSTP) or a debugger had stopped it"
                } else {
                    "it stopped answering: it may be stuck in a loop, a system call or a device"
                };
                failure.outcome = Outcome::Unresponsive;
                failure.cause = Some(cause.to_owned());
                Some((nanos, failure))
            }
            (Outcome::Exit(0), Some(nanos)) => {
                let cause = "its process ended in the middle of the job, without an error";
                failure.cause = Some(cause.to_owned());
                Some((nanos, failure))
            }
            _ => self.has_failed().then_some((end.nanos, failure)),
        }
    }
}

impl RankFailure {
    /// 0 for a failure of its own, 1 for a consequence of another's, 2 for an end by the launcher.
    pub(super) fn rank_in_blame(&self) -> u8 {
        match (self.secondary, self.outcome, &self.cause) {
            (true, ..) => 1,
            (_, Outcome::Stopped | Outcome::Unkillable, None) => 2,
            _ => 0,
        }
    }
}
