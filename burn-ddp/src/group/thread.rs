//! Ranks as threads of one process.
//!
//! For tests of what is built on a group: same trait, same checks and same errors as the
//! [`host`](super::host) group, but no sockets and no processes.

use super::{
    DType, GroupBuffer, GroupError, OpDescriptor, ProcessGroup, ReduceOp, Result,
    engine::{Engine, Payload},
    heap::HeapBuffer,
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

/// A group whose ranks are threads. Cloning gives another handle of the same rank.
#[derive(Clone, Debug)]
pub struct ThreadGroup(Arc<Member>);

impl ThreadGroup {
    /// A group of `world_size` ranks, one handle per rank, with an operation time-out of 60 s.
    pub fn new(world_size: usize) -> Vec<Self> {
        Self::with_timeout(world_size, Duration::from_secs(60))
    }

    /// As [`new`](Self::new), with the time that an operation waits for the slowest rank.
    pub fn with_timeout(world_size: usize, timeout: Duration) -> Vec<Self> {
        let job = Arc::new(Job::new(world_size));
        let meeting = job.lock().open_group(world_size);
        (0..world_size)
            .map(|rank| Self(Member::new(job.clone(), meeting, rank, timeout)))
            .collect()
    }
}

/// All groups of one set of threads. One lock for the whole: this is not the fast group.
struct Job {
    state: Mutex<State>,
    changed: Condvar,
    /// The first failure and the rank that met it.
    failure: OnceLock<(usize, GroupError)>,
    world_size: usize,
}

#[derive(Default)]
struct State {
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
struct Round {
    descriptors: Vec<OpDescriptor>,
    inputs: Vec<Vec<u8>>,
    /// Computed by the first rank that asks.
    reduced: OnceLock<Vec<u8>>,
    /// The number of the group that `new_group` made.
    group: OnceLock<u32>,
}

impl State {
    fn open_group(&mut self, world_size: usize) -> u32 {
        self.groups.push(Meeting {
            current: Arc::default(),
            arrived: (0..world_size).map(|_| None).collect(),
            left: vec![None; world_size],
        });
        (self.groups.len() - 1) as u32
    }
}

impl Job {
    fn new(world_size: usize) -> Self {
        Self {
            state: Mutex::default(),
            changed: Condvar::new(),
            failure: OnceLock::new(),
            world_size,
        }
    }

    // The state is consistent whenever the lock is free: nothing panics while it is held.
    fn lock(&self) -> MutexGuard<'_, State> {
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
struct Member {
    job: Arc<Job>,
    id: Identity,
    timeout: Duration,
    /// Held during an operation, so that the threads of one rank take turns.
    counters: Mutex<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    sequence: u64,
    buffers: u32,
}

impl Member {
    fn new(job: Arc<Job>, group: u32, rank: usize, timeout: Duration) -> Arc<Self> {
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

    fn counters(&self) -> MutexGuard<'_, Counters> {
        self.counters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: GroupError) -> GroupError {
        // The first failure wins. Waiters check it under the lock before they sleep.
        let _state = self.job.lock();
        let _ = self.job.failure.set((self.id.rank, error.clone()));
        self.job.changed.notify_all();
        error
    }

    fn failure(&self) -> Option<GroupError> {
        self.job
            .failure
            .get()
            .map(|(origin, error)| self.id.view(*origin, error))
    }

    /// Brings `input` to the next operation and waits for the others.
    fn meet(&self, counters: &mut Counters, call: Call, input: &[u8]) -> Result<Arc<Round>> {
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
    fn reduced(&self, dtype: DType, op: ReduceOp) -> &[u8] {
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

impl Engine for ThreadGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "thread"
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        let member = &self.0;
        let mut counters = member.counters();
        let mut meet = |input: &[u8]| member.meet(&mut counters, call, input);
        match payload {
            Payload::AllReduce { data, dtype, op } => {
                let round = meet(data)?;
                data.copy_from_slice(round.reduced(dtype, op));
            }
            Payload::Broadcast { data, root } if root == member.id.rank => {
                meet(data)?;
            }
            Payload::Broadcast { data, root } => data.copy_from_slice(&meet(&[])?.inputs[root]),
            Payload::AllGather { send, recv } => {
                recv.copy_from_slice(&meet(send)?.inputs.concat());
            }
            Payload::ReduceScatter {
                send,
                recv,
                dtype,
                op,
            } => {
                let block = member.id.rank * recv.len()..(member.id.rank + 1) * recv.len();
                recv.copy_from_slice(&meet(send)?.reduced(dtype, op)[block]);
            }
            Payload::Barrier => {
                meet(&[])?;
            }
        }
        Ok(())
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let member = &self.0;
        let mut counters = member.counters();
        let number = counters.buffers + 1;
        member.meet(&mut counters, Call::buffer(number, bytes), &[])?;
        counters.buffers = number;
        drop(counters);
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let member = &self.0;
        let round = member.meet(&mut member.counters(), Call::new_group(), &[])?;
        let open = || member.job.lock().open_group(member.id.world_size);
        let group = *round.group.get_or_init(open);
        Ok(Arc::new(Self(Member::new(
            member.job.clone(),
            group,
            member.id.rank,
            member.timeout,
        ))))
    }

    fn fail(&self, error: GroupError) {
        self.0.fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.0.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make(world_size: usize, timeout: Duration) -> Vec<Arc<dyn ProcessGroup>> {
        let ranks = ThreadGroup::with_timeout(world_size, timeout);
        ranks
            .into_iter()
            .map(|rank| Arc::new(rank) as Arc<dyn ProcessGroup>)
            .collect()
    }

    crate::group::conformance::suite!(make);
}
