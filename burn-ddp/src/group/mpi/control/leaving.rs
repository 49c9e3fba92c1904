//! How a rank leaves: one group, the job, and at last the process.

use super::{Control, LAST_WORDS, State};
use crate::group::{
    GroupError,
    mpi::{
        library::{self, Mpi},
        message::Message,
        request,
    },
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// How long a rank that failed stays for the others to learn of it: as soon as it ends, mpirun ends them.
const ALL_KNOW: Duration = Duration::from_secs(1);

impl State {
    pub(super) fn note_left(&mut self, rank: usize, group: u32, sequence: u64) {
        let ranks = self.done.len();
        let left = self.left.entry(group).or_insert_with(|| vec![None; ranks]);
        left[rank] = Some((sequence, Instant::now()));
        if left.iter().all(Option::is_some) {
            self.left.remove(&group);
            self.positions.remove(&group);
        }
    }
}

impl Control {
    /// This rank drops `group` before its operation `sequence`.
    pub(in crate::group::mpi) fn leave(&self, group: u32, sequence: u64) {
        self.state().note_left(self.comm.rank, group, sequence);
        if let Some(mpi) = library::enter() {
            self.tell(&mpi, &Message::Left { group, sequence });
        }
    }

    /// This rank has dropped the last group of the job.
    ///
    /// After a failure stays for a moment, so that the peers end with an error that says why and not by a signal.
    pub(in crate::group::mpi) fn end(self: &Arc<Self>) {
        if self.failure.get().is_none()
            && let Some(mpi) = library::enter()
        {
            self.say_done(&mpi);
        }
        let told = self.state().told;
        let rank = self.comm.rank;
        self.poll_until(if told { ALL_KNOW } else { LAST_WORDS }, |state| {
            state.outbox.is_empty() && (!told || all(&state.know, rank))
        });
        library::job_ends(self);
    }

    /// The process exits in the middle of the job.
    pub(in crate::group::mpi) fn exits(&self) {
        let rank = self.comm.rank;
        let error = GroupError::aborted(rank, rank, "its process ended");
        self.fail_with(error, &Message::Exits);
    }

    /// Tells the peers, once, that nothing more will come from this rank.
    pub(in crate::group::mpi) fn say_done(&self, mpi: &Mpi) {
        let before = std::mem::replace(&mut self.state().done[self.comm.rank], true);
        if !before {
            self.tell(mpi, &Message::Done);
        }
    }

    /// Whether no rank has more to say, which this rank learns as long as this is called.
    pub(in crate::group::mpi) fn all_done(&self, mpi: &Mpi) -> bool {
        // After a refusal there is nothing to wait for.
        if self.poll(mpi).is_err() {
            return true;
        }
        let state = self.state();
        state.outbox.is_empty() && all(&state.done, self.comm.rank)
    }

    /// Whether an operation of this rank has failed, so that it has an error to return.
    pub(in crate::group::mpi) fn has_suffered(&self) -> bool {
        self.state().suffered
    }

    /// Leaves no message behind that MPI could still write to.
    pub(in crate::group::mpi) fn close(&self) {
        let mut state = self.state();
        state.inbox = None;
        state.outbox.clear();
        drop(state);
        // What is pending even then is seen to at the end of the process.
        if let Some(mpi) = library::enter() {
            request::reap(&mpi);
        }
    }
}

fn all(ranks: &[bool], but: usize) -> bool {
    let mut ranks = ranks.iter().enumerate();
    ranks.all(|(rank, is)| rank == but || *is)
}
