//! Failures, departures, and who has come to an operation: what the ranks of a job know of each other.
//!
//! Messages are looked at whenever a rank begins an operation or waits in one; there is no thread for it. That a
//! process has died is mpirun's to notice, and it ends the job.

use super::{
    library::{self, Mpi},
    message::{LONGEST, Message},
    request::{self, Comm, Received, Receiving, Refusal, Sending},
};
use crate::group::{GroupError, OpDescriptor, ops::Identity};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Groups use the tags from 1.
const TAG: i32 = 0;
/// How long the last words of a failed rank may take to leave it.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// How long a rank that failed stays for the others to learn of it: as soon as it ends, mpirun ends them.
const ALL_KNOW: Duration = Duration::from_secs(1);
/// How long a rank that has left may take to say that it has failed: it drops its groups first.
const AFTERTHOUGHT: Duration = Duration::from_millis(200);
/// How long the peers may take to say whether they have come to an operation.
const ANSWERS: Duration = Duration::from_millis(500);
/// Time between two looks.
const PAUSE: Duration = Duration::from_micros(200);

/// The control plane of one job.
#[derive(Debug)]
pub(super) struct Control {
    comm: Comm,
    /// Each rank's machine.
    hosts: Vec<String>,
    /// The first failure and the rank that met it.
    failure: OnceLock<(usize, GroupError)>,
    /// Always taken after the turn to call MPI.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// `None` only after a refusal.
    inbox: Option<Receiving>,
    outbox: Vec<Sending>,
    /// The operation that this rank has come to last, by group.
    positions: HashMap<u32, u64>,
    /// By group and rank, the first operation that the rank does not come to, and since when that is known.
    left: HashMap<u32, Vec<Option<(u64, Instant)>>>,
    /// Who has come to the operations that this rank has asked about.
    here: HashMap<(u32, u64), Vec<bool>>,
    /// This rank has told the others of a failure.
    told: bool,
    /// Who knows that the job has failed.
    know: Vec<bool>,
    /// Who has left the job in good order.
    done: Vec<bool>,
}

impl Control {
    pub(super) fn new(mpi: &Mpi, comm: Comm, hosts: Vec<String>) -> Result<Self, Refusal> {
        let inbox = mpi.receive(&comm, vec![0; LONGEST], None, TAG)?;
        let state = State {
            inbox: Some(inbox),
            outbox: Vec::new(),
            positions: HashMap::new(),
            left: HashMap::new(),
            here: HashMap::new(),
            told: false,
            know: vec![false; comm.size],
            done: vec![false; comm.size],
        };
        library::job_begins();
        Ok(Self {
            comm,
            hosts,
            failure: OnceLock::new(),
            state: Mutex::new(state),
        })
    }

    pub(super) fn comm(&self) -> &Comm {
        &self.comm
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.comm.rank;
        (0..self.comm.size).filter(move |peer| *peer != rank)
    }

    pub(super) fn host(&self, rank: usize) -> String {
        self.hosts.get(rank).cloned().unwrap_or_default()
    }

    /// The job's failure as this rank sees it.
    pub(super) fn failure(&self, id: &Identity) -> Option<GroupError> {
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
    pub(super) fn check(&self, id: &Identity, ours: &OpDescriptor) -> Result<(), GroupError> {
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

    /// Notes that this rank has come to an operation, and looks at what came in since the last.
    pub(super) fn begin(&self, mpi: &Mpi, ours: &OpDescriptor) -> Result<(), Refusal> {
        self.state().positions.insert(ours.group, ours.sequence);
        self.poll(mpi)
    }

    /// Sends and receives what there is. Never waits.
    pub(super) fn poll(&self, mpi: &Mpi) -> Result<(), Refusal> {
        let mut state = self.state();
        while let Some(inbox) = &mut state.inbox {
            let Some(received) = inbox.poll(mpi)? else {
                break;
            };
            state.inbox = None;
            self.handle(mpi, &mut state, &received)?;
            state.inbox = Some(mpi.receive(&self.comm, vec![0; LONGEST], None, TAG)?);
        }
        let mut refused = None;
        state.outbox.retain_mut(|message| match message.poll(mpi) {
            Ok(sent) => sent.is_none(),
            Err(refusal) => {
                refused = Some(refusal);
                false
            }
        });
        refused.map_or(Ok(()), Err)
    }

    fn handle(&self, mpi: &Mpi, state: &mut State, received: &Received) -> Result<(), Refusal> {
        let source = received.source;
        match Message::decode(&received.data) {
            // Only ranks of the job can send here; one that is built from another version fails in its first operation.
            None => Ok(()),
            Some(Message::Failed(error)) => self.learn(mpi, state, source, (source, error)),
            Some(Message::Panicked) => {
                let rank = self.comm.rank;
                let lost = GroupError::PeerLost {
                    rank,
                    peer: source,
                    host: self.host(source),
                    cause: "its thread panicked".into(),
                    operation: String::new(),
                    elapsed: Duration::ZERO,
                };
                self.learn(mpi, state, source, (rank, lost))
            }
            Some(Message::Done) => {
                state.done[source] = true;
                Ok(())
            }
            Some(Message::Known) => {
                state.know[source] = true;
                Ok(())
            }
            Some(Message::Where { group, sequence }) => match state.positions.get(&group) {
                Some(at) if *at >= sequence => {
                    self.send(mpi, state, source, &Message::Here { group, sequence })
                }
                _ => Ok(()),
            },
            Some(Message::Here { group, sequence }) => {
                if let Some(here) = state.here.get_mut(&(group, sequence)) {
                    here[source] = true;
                }
                Ok(())
            }
            Some(Message::Left { group, sequence }) => {
                self.note_left(state, source, group, sequence);
                Ok(())
            }
        }
    }

    fn send(
        &self,
        mpi: &Mpi,
        state: &mut State,
        peer: usize,
        message: &Message,
    ) -> Result<(), Refusal> {
        let bytes = Arc::new(message.encode(self.comm.rank));
        state.outbox.push(mpi.send(&self.comm, bytes, peer, TAG)?);
        Ok(())
    }

    /// To all peers. A rank that cannot be told is told by nobody; the failure at hand counts more.
    fn tell(&self, mpi: &Mpi, message: &Message) {
        let mut state = self.state();
        for peer in self.peers() {
            let _ = self.send(mpi, &mut state, peer, message);
        }
    }

    fn learn(
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

    /// Records this rank's failure, unless the job has failed already, and tells the peers.
    pub(super) fn fail(&self, error: GroupError) {
        if self.failure.set((self.comm.rank, error.clone())).is_ok() {
            self.last_words(&Message::Failed(error));
        }
    }

    /// As [`fail`](Self::fail), while this thread unwinds.
    pub(super) fn panicked(&self) {
        let rank = self.comm.rank;
        let error = GroupError::aborted(rank, rank, "its thread panicked");
        if self.failure.set((rank, error)).is_ok() {
            self.last_words(&Message::Panicked);
        }
    }

    fn last_words(&self, message: &Message) {
        library::job_failed();
        let Some(mpi) = library::enter() else { return };
        self.tell(&mpi, message);
        drop(mpi);
        self.state().told = true;
        self.poll_until(LAST_WORDS, |state| state.outbox.is_empty());
    }

    /// Polls until `done`, MPI refuses, or the time is over. Whether it is done.
    fn poll_until(&self, limit: Duration, done: impl Fn(&State) -> bool) -> bool {
        let end = Instant::now() + limit;
        loop {
            let polled = library::enter().is_some_and(|mpi| self.poll(&mpi).is_ok());
            if done(&self.state()) {
                return true;
            }
            if !polled || Instant::now() > end {
                return false;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Which peers have not come to `ours`, by their own word. Those that wait in some operation answer.
    pub(super) fn missing(&self, ours: &OpDescriptor) -> Vec<usize> {
        let key @ (group, sequence) = (ours.group, ours.sequence);
        let mut here = vec![false; self.comm.size];
        here[self.comm.rank] = true;
        self.state().here.insert(key, here);
        if let Some(mpi) = library::enter() {
            self.tell(&mpi, &Message::Where { group, sequence });
        }
        let all = |state: &State| {
            state
                .here
                .get(&key)
                .is_some_and(|here| here.iter().all(|h| *h))
        };
        self.poll_until(ANSWERS, |state| all(state) || self.failure.get().is_some());
        let here = self.state().here.remove(&key).unwrap_or_default();
        self.peers().filter(|peer| !here[*peer]).collect()
    }

    /// This rank drops `group` before its operation `sequence`.
    pub(super) fn leave(&self, group: u32, sequence: u64) {
        self.note_left(&mut self.state(), self.comm.rank, group, sequence);
        if let Some(mpi) = library::enter() {
            self.tell(&mpi, &Message::Left { group, sequence });
        }
    }

    fn note_left(&self, state: &mut State, rank: usize, group: u32, sequence: u64) {
        let ranks = self.comm.size;
        let left = state.left.entry(group).or_insert_with(|| vec![None; ranks]);
        left[rank] = Some((sequence, Instant::now()));
        if left.iter().all(Option::is_some) {
            state.left.remove(&group);
            state.positions.remove(&group);
        }
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

impl Control {
    /// This rank has dropped the last group of the job.
    ///
    /// After a failure stays for a moment, so that the peers end with an error that says why and not by a signal.
    pub(super) fn end(self: &Arc<Self>) {
        if self.failure.get().is_none()
            && let Some(mpi) = library::enter()
        {
            self.tell(&mpi, &Message::Done);
        }
        let told = self.state().told;
        let rank = self.comm.rank;
        self.poll_until(if told { ALL_KNOW } else { LAST_WORDS }, |state| {
            state.outbox.is_empty() && (!told || all(&state.know, rank))
        });
        if !library::keep(self) {
            self.close();
        }
        library::job_ends();
    }

    /// Whether every rank has left in good order, which it tells as long as this is called.
    pub(super) fn all_done(&self, mpi: &Mpi) -> bool {
        // After a refusal there is nothing to wait for.
        self.poll(mpi).is_err() || all(&self.state().done, self.comm.rank)
    }

    /// Leaves no message behind that MPI could still write to.
    pub(super) fn close(&self) {
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
