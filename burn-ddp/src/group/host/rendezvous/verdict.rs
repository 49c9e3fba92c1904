//! Whether a caller fits the job.

use super::{Answer, Hello, Peer};
use std::cmp::Ordering;

/// What a hello means, before the other ranks' are looked at.
pub(super) enum Verdict {
    Fits,
    /// Only this caller is wrong here.
    Reject(Answer),
    /// The job is wrong.
    Contradicts(String),
    /// The caller's generation is later: the job has been restarted, and this rank 0 is the one that is to be replaced.
    Ahead,
}

impl Hello {
    pub(super) fn verdict(&self, theirs: &Hello) -> Verdict {
        let (rank, peer) = (theirs.peer.rank, &theirs.peer);
        match theirs.generation.cmp(&self.generation) {
            Ordering::Less => {
                return Verdict::Reject(Answer::Stale {
                    generation: self.generation,
                });
            }
            Ordering::Greater => return Verdict::Ahead,
            Ordering::Equal => {}
        }
        if theirs.version != self.version {
            return Verdict::Contradicts(format!(
                "rank 0 has burn-ddp {}, rank {rank} ({peer}) has burn-ddp {}",
                self.version, theirs.version
            ));
        }
        if theirs.world_size != self.world_size {
            return Verdict::Contradicts(format!(
                "rank 0 ({}) says the world size is {}, rank {rank} ({peer}) says {}",
                self.peer, self.world_size, theirs.world_size
            ));
        }
        if theirs.transport != self.transport {
            return Verdict::Contradicts(format!(
                "rank 0 asks for the transport {:?}, rank {rank} ({peer}) for {:?}",
                self.transport, theirs.transport
            ));
        }
        if rank >= self.world_size {
            return Verdict::Contradicts(format!(
                "{peer} says it is rank {rank}, but the world size is {}",
                self.world_size
            ));
        }
        if rank == self.peer.rank {
            return Verdict::Contradicts(duplicate(rank, &self.peer, peer));
        }
        Verdict::Fits
    }
}

impl Hello {
    /// For a caller of a later generation, whose own rank 0 is about to come.
    pub(super) fn still_here(&self, theirs: &Hello) -> Answer {
        let (ours, theirs) = (self.generation, theirs.generation);
        let reason = format!(
            "rank 0 is still that of generation {ours}, this process is of generation {theirs}"
        );
        Answer::Busy { reason }
    }
}

impl Answer {
    /// Why a caller is rejected, for the log; `None` for what all ranks are told.
    pub(super) fn rejection(&self) -> Option<String> {
        match self {
            Answer::Refused { reason } | Answer::Busy { reason } => Some(reason.clone()),
            Answer::Stale { generation } => Some(format!(
                "a stale generation: the job is in generation {generation}"
            )),
            Answer::Welcome { .. }
            | Answer::Inconsistent { .. }
            | Answer::Lost { .. }
            | Answer::TimedOut { .. } => None,
        }
    }
}

#[cfg(any(test, fuzzing))]
impl Hello {
    pub(super) fn contradiction_with(&self, theirs: &Hello) -> Option<String> {
        match self.verdict(theirs) {
            Verdict::Contradicts(reason) => Some(reason),
            Verdict::Fits | Verdict::Reject(_) | Verdict::Ahead => None,
        }
    }
}

pub(super) fn duplicate(rank: usize, first: &Peer, second: &Peer) -> String {
    format!("two processes say they are rank {rank}: {first} and {second}")
}
