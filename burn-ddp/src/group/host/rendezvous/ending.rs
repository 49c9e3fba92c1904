//! How a rendezvous ends without a job: every rank that can be reached is told.

use super::{
    super::{acceptor::Outcome, poll::Waker, rendezvous_error::RendezvousError},
    Answer, Peer,
    accept::JoinRequest,
    serve::Server,
};
use std::time::{Duration, Instant};

/// How long a failed rendezvous stays to tell the ranks that come late.
const FAREWELL: Duration = Duration::from_secs(2);

impl Server {
    /// Two ranks say things that cannot both be.
    pub(super) fn contradiction(
        &mut self,
        reason: String,
        last: JoinRequest,
        waker: &Waker,
    ) -> RendezvousError {
        let answer = Answer::Inconsistent {
            reason: reason.clone(),
        };
        self.end(&answer, Some(last), 0, waker);
        RendezvousError::Inconsistent { rank: 0, reason }
    }

    /// A rank that had come is gone.
    pub(super) fn lost(&mut self, peer: Peer, waker: &Waker) -> RendezvousError {
        self.end(&Answer::Lost { peer: peer.clone() }, None, 1, waker);
        peer.lost(0)
    }

    /// Gives `answer` to everyone, and for a while to those who come late, so that no rank waits for its time-out.
    /// `absent` ranks are not expected.
    fn end(&mut self, answer: &Answer, last: Option<JoinRequest>, absent: usize, waker: &Waker) {
        let mut told = absent;
        for request in last
            .into_iter()
            .chain(std::mem::take(&mut self.requests).into_values())
        {
            told += usize::from(self.answer(&request, answer));
        }
        let deadline = Instant::now() + FAREWELL;
        loop {
            while let Some(outcome) = self.acceptor.next_outcome() {
                if let Outcome::Accepted(request) = outcome {
                    told += usize::from(self.answer(&request, answer));
                }
            }
            let all_told = told + 1 >= self.us.world_size;
            if all_told || Instant::now() >= deadline || self.wait(waker, deadline).is_err() {
                break;
            }
        }
    }

    /// The generation that forms here is over before it has begun.
    pub(super) fn superseded(&self, ahead: &JoinRequest) -> RendezvousError {
        let generation = ahead.hello.generation;
        self.answer(ahead, &self.us.still_here(&ahead.hello));
        for request in self.requests.values() {
            self.answer(request, &Answer::Stale { generation });
        }
        RendezvousError::Superseded {
            stale: self.us.generation,
            generation,
            by: format!("rank {} ({})", ahead.hello.peer.rank, ahead.hello.peer),
        }
    }

    /// Not all have come.
    pub(super) fn time_out(self) -> RendezvousError {
        let mut reason = format!(
            "rank(s) {:?} did not come; rank 0 listened on {}",
            self.missing(),
            self.at
        );
        if !self.rejected.is_empty() {
            let each: Vec<_> = self
                .rejected
                .iter()
                .map(|(why, count)| format!("{count} x {why}"))
                .collect();
            let total: usize = self.rejected.values().sum();
            reason += &format!("; {total} connection(s) were rejected: {}", each.join(", "));
        }
        let answer = Answer::TimedOut {
            reason: reason.clone(),
        };
        for request in self.requests.values() {
            self.answer(request, &answer);
        }
        RendezvousError::Timeout {
            rank: 0,
            elapsed: self.start.elapsed(),
            reason,
        }
    }
}
