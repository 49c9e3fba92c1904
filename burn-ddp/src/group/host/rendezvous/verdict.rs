//! Whether a caller fits the job.

use super::{Answer, Hello, Peer};

/// What a hello means, before the other ranks' are looked at.
pub(super) enum Verdict {
    Fits,
    /// Only this caller is wrong here.
    Turn(Answer),
    /// The job is wrong.
    Contradicts(String),
}

impl Hello {
    pub(super) fn verdict(&self, theirs: &Hello) -> Verdict {
        let (ours, stale) = (self.generation, theirs.generation);
        let (rank, peer) = (theirs.peer.rank, &theirs.peer);
        if stale < ours {
            let reason = format!(
                "stale generation {stale}: the job has been restarted and is in generation {ours}"
            );
            return Verdict::Turn(Answer::Refused { reason });
        }
        if stale > ours {
            // This rank 0 is the one that is to be replaced; the caller's own is about to come.
            let reason = format!(
                "rank 0 is still that of generation {ours}, this process is of generation {stale}"
            );
            return Verdict::Turn(Answer::Busy { reason });
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

#[cfg(test)]
impl Hello {
    pub(super) fn contradiction_with(&self, theirs: &Hello) -> Option<String> {
        match self.verdict(theirs) {
            Verdict::Contradicts(reason) => Some(reason),
            Verdict::Fits | Verdict::Turn(_) => None,
        }
    }
}

pub(super) fn duplicate(rank: usize, first: &Peer, second: &Peer) -> String {
    format!("two processes say they are rank {rank}: {first} and {second}")
}
