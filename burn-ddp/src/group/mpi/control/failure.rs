//! The first failure of a job: how a rank learns of it, and tells it.

use super::{AFTERTHOUGHT, Control, LAST_WORDS, State};
use crate::group::{
    GroupError, OpDescriptor,
    mpi::{
        library::{self, Mpi},
        message::Message,
        request::Refusal,
    },
    ops::Identity,
};
use std::time::{Duration, Instant};

impl Control {
    /// The job's failure as this rank sees it.
    pub(in crate::group::mpi) fn failure(&self, id: &Identity) -> Option<GroupError> {
        let (origin, error) = self.failure.get()?;
        Some(self.view(id, *origin, error, String::new()))
    }

    fn view(&self, id: &Identity, origin: usize, error: &GroupError, doing: String) -> GroupError {
        let mut view = id.view(origin, error);
        match &mut view {
            GroupError::Aborted {
                host, operation, ..
            } if origin != id.rank => {
                *host = self.host(origin);
                *operation = doing;
            }
            GroupError::PeerLost { operation, .. } if operation.is_empty() => *operation = doing,
            _ => {}
        }
        view
    }

    /// The failure of an operation that this rank is in, if the job has failed or a rank will not come to it.
    pub(in crate::group::mpi) fn check(
        &self,
        id: &Identity,
        ours: &OpDescriptor,
    ) -> Result<(), GroupError> {
        if let Some((origin, error)) = self.failure.get() {
            return Err(our_side(id, ours, *origin, error)
                .unwrap_or_else(|| self.view(id, *origin, error, ours.to_string())));
        }
        let state = self.state();
        let gone = |at: &Option<(u64, Instant)>| {
            at.is_some_and(|(first, since)| {
                first <= ours.sequence && since.elapsed() >= AFTERTHOUGHT
            })
        };
        let left = state.left.get(&ours.group);
        match left.and_then(|left| left.iter().position(gone)) {
            None => Ok(()),
            Some(peer) => Err(GroupError::PeerLeft {
                rank: id.rank,
                peer,
                host: self.host(peer),
                operation: ours.to_string(),
                elapsed: Duration::ZERO,
            }),
        }
    }

    pub(super) fn learn(
        &self,
        mpi: &Mpi,
        state: &mut State,
        source: usize,
        failure: (usize, GroupError),
    ) -> Result<(), Refusal> {
        state.know[source] = true;
        library::job_failed();
        let _ = self.failure.set(failure);
        self.send(mpi, state, source, &Message::Known)
    }

    /// Rank `source` will not come again, by its own last word.
    pub(super) fn lose(
        &self,
        mpi: &Mpi,
        state: &mut State,
        source: usize,
        cause: &str,
    ) -> Result<(), Refusal> {
        let rank = self.comm.rank;
        let lost = GroupError::PeerLost {
            rank,
            peer: source,
            host: self.host(source),
            cause: cause.to_owned(),
            operation: String::new(),
            elapsed: Duration::ZERO,
        };
        self.learn(mpi, state, source, (rank, lost))
    }

    /// Records that an operation of this rank has failed, unless the job has before, and tells the peers.
    pub(in crate::group::mpi) fn fail(&self, error: GroupError) {
        self.state().suffered = true;
        self.fail_with(error.clone(), &Message::Failed(error));
    }

    /// As [`fail`](Self::fail), while this thread unwinds.
    pub(in crate::group::mpi) fn panicked(&self) {
        self.state().suffered = true;
        let rank = self.comm.rank;
        let error = GroupError::aborted(rank, rank, "its thread panicked");
        self.fail_with(error, &Message::Panicked);
    }

    pub(super) fn fail_with(&self, error: GroupError, last_words: &Message) {
        if self.failure.set((self.comm.rank, error)).is_err() {
            return;
        }
        library::job_failed();
        let Some(mpi) = library::enter() else { return };
        self.tell(&mpi, last_words);
        drop(mpi);
        self.state().told = true;
        self.poll_until(LAST_WORDS, |state| state.outbox.is_empty());
    }
}

/// A mismatch that another rank has found in the operation that this one is in: at least one of its sides is not ours.
fn our_side(
    id: &Identity,
    ours: &OpDescriptor,
    origin: usize,
    error: &GroupError,
) -> Option<GroupError> {
    let GroupError::Mismatch {
        peer,
        ours: first,
        theirs: second,
        ..
    } = error
    else {
        return None;
    };
    if origin == id.rank || (first.group, first.sequence) != (ours.group, ours.sequence) {
        return None;
    }
    let sides = [(origin, first), (*peer, second)];
    let (peer, theirs) = sides.into_iter().find(|(_, side)| ***side != *ours)?;
    Some(GroupError::Mismatch {
        rank: id.rank,
        peer,
        ours: Box::new(*ours),
        theirs: theirs.clone(),
    })
}
