//! One rank's part in one group, and the operations of it.

use super::{
    Job, MpiGroup,
    exchange::{Operation, Pool},
};
use crate::group::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Engine, Payload},
    heap::HeapBuffer,
    ops::{Call, Identity},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::Ordering};

/// Groups are numbered by MPI's tags, of which the standard promises this many (MPI 3.1, 8.1.2), the first one for control.
const MOST_GROUPS: u32 = 32_767;

/// One rank of one group.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) job: Arc<Job>,
    id: Identity,
    /// Held during an operation, so that the threads of one rank take turns.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sequence: u64,
    buffers: u32,
    pool: Pool,
    /// Set while an operation runs; still set after it if it failed.
    broken: bool,
}

impl Member {
    pub(super) fn new(job: Arc<Job>, group: u32) -> Arc<Self> {
        let comm = job.control.comm();
        let id = Identity {
            rank: comm.rank,
            world_size: comm.size,
            job: job.number,
            generation: 0,
            group,
        };
        Arc::new(Self {
            job,
            id,
            state: Mutex::default(),
        })
    }

    /// A panic in an operation leaves the peers' messages as an error does, and `broken` says so either way.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_in<T>(
        &self,
        state: &mut State,
        call: Call,
        body: impl FnOnce(&mut Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        let control = &self.job.control;
        if state.broken {
            return Err(control
                .failure(&self.id)
                .unwrap_or_else(|| GroupError::Transport {
                    rank: self.id.rank,
                    operation: self.id.describe(call, state.sequence).to_string(),
                    cause: "an earlier operation of this group ended half-way".into(),
                }));
        }
        state.broken = true;
        let timeout = self.job.timeout;
        let result = Operation::begin(
            &self.id,
            control,
            &mut state.pool,
            timeout,
            call,
            state.sequence,
        )
        .and_then(|mut operation| body(&mut operation))
        .inspect_err(|error| control.fail(error.clone()))?;
        state.sequence += 1;
        state.broken = false;
        Ok(result)
    }

    fn run(&self, state: &mut State, call: Call, payload: Payload<'_>) -> Result<()> {
        let Job { tuning, place, .. } = &*self.job;
        self.run_in(state, call, |operation| {
            operation.run(payload, *tuning, place)
        })
    }

    /// Rank 0 numbers the groups, so that two that are made at the same time from different groups cannot get one number.
    fn next_group(&self) -> Result<u32> {
        let proposed = if self.id.rank == 0 {
            self.job.groups.fetch_add(1, Ordering::Relaxed)
        } else {
            0
        };
        let tuning = self.job.tuning;
        let number = self.run_in(&mut self.state(), Call::new_group(), |operation| {
            let blocks = operation.meet(&[], u64::from(proposed), tuning.inline)?;
            Ok(blocks[0].number)
        })?;
        let number = u32::try_from(number).ok().filter(|n| *n < MOST_GROUPS);
        let error = || GroupError::Transport {
            rank: self.id.rank,
            operation: "making a group".into(),
            cause: format!("a job has {MOST_GROUPS} groups at most, and all have been used"),
        };
        number
            .ok_or_else(error)
            .inspect_err(|error| self.job.control.fail(error.clone()))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.job.control.panicked();
        } else {
            let next = self.state().sequence;
            self.job.control.leave(self.id.group, next);
        }
    }
}

impl Engine for MpiGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "mpi"
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        self.0.run(&mut self.0.state(), call, payload)
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let mut state = self.0.state();
        let number = state.buffers + 1;
        self.0
            .run(&mut state, Call::buffer(number, bytes), Payload::Barrier)?;
        state.buffers = number;
        drop(state);
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let number = self.0.next_group()?;
        Ok(Arc::new(Self(Member::new(self.0.job.clone(), number))))
    }

    fn fail(&self, error: GroupError) {
        self.0.job.control.fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.0.job.control.failure(&self.0.id)
    }
}
