//! Where the threads meet.

use super::super::{
    DType, GroupError, OpDescriptor, ReduceOp, Result,
    ops::{Call, Identity},
    reduce::reduce_into,
};
use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// No limit to speak of, and still in the range of every clock.
const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// All groups of one set of threads. One lock for the whole: this is not the fast group.
pub(super) struct Job {
    state: Mutex<State>,
    changed: Condvar,
    /// The first failure and the rank that met it.
    failure: OnceLock<(usize, GroupError)>,
    world_size: usize,
}

#[derive(Default)]
pub(super) struct State {
    groups: Vec<Meeting>,
}

/// Where the ranks of one group meet. Between operations it is empty.
struct Meeting {
    /// Filled by the last rank to arrive, who puts an empty one in its place.
    current: Arc<OnceLock<Arc<Round>>>,
    arrived: Vec<Option<(OpDescriptor, Vec<u8>)>>,
    /// Whether the last handle of a rank was dropped, and that by a panic.
    left: Vec<Option<Departure>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Departure {
    Finished,
    Panicked,
}

/// What all ranks brought to one operation.
pub(super) struct Round {
    descriptors: Vec<OpDescriptor>,
    pub(super) inputs: Vec<Vec<u8>>,
    /// Computed by the first rank that asks.
    reduced: OnceLock<Vec<u8>>,
    /// The number of the group that `new_group` made.
    pub(super) group: OnceLock<u32>,
}

impl State {
    pub(super) fn open_group(&mut self, world_size: usize) -> u32 {
        self.groups.push(Meeting {
            current: Arc::default(),
            arrived: (0..world_size).map(|_| None).collect(),
            left: vec![None; world_size],
        });
        (self.groups.len() - 1) as u32
    }
}

impl Job {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            failure: OnceLock::new(),
            world_size,
        }
    }

    // The state is consistent whenever the lock is free: nothing panics while it is held.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("failure", &self.failure)
            .finish_non_exhaustive()
    }
}

/// One rank of one group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) job: Arc<Job>,
    pub(super) id: Identity,
    pub(super) timeout: Duration,
    /// Held during an operation, so that the threads of one rank take turns.
    counters: Mutex<Counters>,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    sequence: u64,
    pub(super) buffers: u32,
}

impl Member {
    pub(super) fn new(job: Arc<Job>, group: u32, rank: usize, timeout: Duration) -> Arc<Self> {
        let id = Identity {
            rank,
            world_size: job.world_size,
            job: 0,
            generation: 0,
            group,
        };
        Arc::new(Self {
            job,
            id,
            timeout,
            counters: Mutex::default(),
        })
    }

    pub(super) fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fail(&self, error: GroupError) -> GroupError {
        // The first failure wins. Waiters check it under the lock before they sleep.
        let _state = self.job.lock();
        let _ = self.job.failure.set((self.id.rank, error.clone()));
        self.job.changed.notify_all();
        error
    }

    pub(super) fn failure(&self) -> Option<GroupError> {
        self.job
            .failure
            .get()
            .map(|(origin, error)| self.id.view(*origin, error))
    }

    /// Brings `input` to the next operation and waits for the others.
    pub(super) fn meet(
        &self,
        counters: &mut Counters,
        call: Call,
        input: &[u8],
    ) -> Result<Arc<Round>> {
        let ours = self.id.describe(call, counters.sequence);
        let limit = match call.is_limited() {
            true => self.timeout,
            false => UNLIMITED,
        };
        let round = self.arrive_and_wait(limit, ours, input)?;
        counters.sequence += 1;
        let theirs = round.descriptors.iter().copied();
        self.id
            .compare(&ours, theirs, |rank| rank)
            .map_err(|error| self.fail(error))?;
        Ok(round)
    }

    fn arrive_and_wait(
        &self,
        limit: Duration,
        ours: OpDescriptor,
        input: &[u8],
    ) -> Result<Arc<Round>> {
        let start = Instant::now();
        let group = self.id.group as usize;
        let mut state = self.job.lock();
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let meeting = &mut state.groups[group];
        let cell = meeting.current.clone();
        meeting.arrived[self.id.rank] = Some((ours, input.to_vec()));
        if meeting.arrived.iter().all(Option::is_some) {
            let (descriptors, inputs) = meeting.arrived.iter_mut().filter_map(Option::take).unzip();
            let round = Round {
                descriptors,
                inputs,
                reduced: OnceLock::new(),
                group: OnceLock::new(),
            };
            let _ = cell.set(Arc::new(round));
            meeting.current = Arc::default();
            self.job.changed.notify_all();
        }
        loop {
            if let Some(round) = cell.get() {
                return Ok(round.clone());
            }
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let meeting = &state.groups[group];
            let missing: Vec<usize> = (0..self.id.world_size)
                .filter(|k| meeting.arrived[*k].is_none())
                .collect();
            let gone = missing
                .iter()
                .find_map(|k| meeting.left[*k].map(|how| (*k, how)));
            let elapsed = start.elapsed();
            let rank = self.id.rank;
            let error = match gone {
                Some((peer, Departure::Finished)) => GroupError::PeerLeft {
                    rank,
                    peer,
                    host: String::new(),
                    operation: ours.to_string(),
                    elapsed,
                },
                Some((peer, Departure::Panicked)) => GroupError::PeerLost {
                    rank,
                    peer,
                    host: String::new(),
                    cause: "its thread panicked".into(),
                    operation: ours.to_string(),
                    elapsed,
                },
                None if elapsed >= limit => GroupError::Timeout {
                    rank,
                    operation: ours.to_string(),
                    elapsed,
                    missing,
                    hosts: Vec::new(),
                },
                None => {
                    let wait = self.job.changed.wait_timeout(state, limit - elapsed);
                    state = wait.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
            };
            drop(state);
            return Err(self.fail(error));
        }
    }
}

impl Round {
    pub(super) fn reduced(&self, dtype: DType, op: ReduceOp) -> &[u8] {
        self.reduced.get_or_init(|| {
            let inputs: Vec<&[u8]> = self.inputs.iter().map(Vec::as_slice).collect();
            let mut out = vec![0; inputs[0].len()];
            reduce_into(&mut out, &inputs, dtype, op);
            out
        })
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            Departure::Panicked
        } else {
            Departure::Finished
        };
        self.job.lock().groups[self.id.group as usize].left[self.id.rank] = Some(how);
        self.job.changed.notify_all();
    }
}
