//! Failures, departures, and who has come to an operation: what the ranks of a job know of each other.
//!
//! Messages are looked at whenever a rank begins an operation or waits in one; there is no thread for it. That a
//! process has died is mpirun's to notice, and it ends the job.

mod failure;
mod leaving;

use super::{
    library::{self, Mpi},
    message::{LONGEST, Message},
    request::{Comm, Received, Receiving, Refusal, Sending},
};
use crate::group::{GroupError, OpDescriptor};
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
    /// An operation of this rank has failed.
    suffered: bool,
    /// Who knows that the job has failed.
    know: Vec<bool>,
    /// Who will not say more: has left in good order, or has failed and is about to exit.
    done: Vec<bool>,
}

impl Control {
    pub(super) fn new(mpi: &Mpi, comm: Comm, hosts: Vec<String>) -> Result<Arc<Self>, Refusal> {
        let inbox = mpi.receive(&comm, vec![0; LONGEST], None, TAG)?;
        let state = State {
            inbox: Some(inbox),
            outbox: Vec::new(),
            positions: HashMap::new(),
            left: HashMap::new(),
            here: HashMap::new(),
            told: false,
            suffered: false,
            know: vec![false; comm.size],
            done: vec![false; comm.size],
        };
        let control = Arc::new(Self {
            comm,
            hosts,
            failure: OnceLock::new(),
            state: Mutex::new(state),
        });
        library::job_begins(&control);
        Ok(control)
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
            Some(Message::Panicked) => self.lose(mpi, state, source, "its thread panicked"),
            Some(Message::Exits) => self.lose(mpi, state, source, "its process ended"),
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
                state.note_left(source, group, sequence);
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
}
