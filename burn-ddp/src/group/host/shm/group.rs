//! The group.

use super::{
    buffer::ShmBuffer,
    collectives::{Operation, payload_size},
    rounds::{Layout, Rounds},
    segment::{self, Exchange, NoSharedMemory, Segment},
    wait::{self, Patience},
};
use crate::group::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Collectives, Engine, Payload},
    heap::HeapBuffer,
    host::{control::Control, operation},
    ops::{Call, Identity},
};
use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Sizes and places, equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Where segments are made.
    pub(crate) directory: PathBuf,
    /// Bytes of a piece of a large operation.
    pub(crate) piece: usize,
    /// Up to how many bytes every rank reduces everything itself, in one round.
    pub(crate) one_shot: usize,
}

impl Options {
    /// The measured best for `world_size` ranks. All areas together stay small against the last cache and
    /// against a container's 64 MiB of shared memory.
    pub(crate) fn new(world_size: usize) -> Self {
        Self {
            directory: segment::directory(),
            piece: (8 * MIB / world_size.max(1)).clamp(64 * KIB, 512 * KIB),
            one_shot: (64 * KIB / world_size.max(1)).max(4 * KIB),
        }
    }

    /// Pieces so small that most sizes of a test take many.
    #[cfg(test)]
    pub(crate) fn small(world_size: usize) -> Self {
        Self {
            piece: 4 * KIB,
            one_shot: 64,
            ..Self::new(world_size)
        }
    }

    /// A piece is a whole number of lines for every rank, and holds a small operation.
    fn payload(&self, ranks: usize) -> usize {
        let piece = self.piece.max(self.one_shot).max(4 * KIB);
        payload_size(piece.next_multiple_of(64 * ranks), ranks)
    }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Exchanges for group `g` run under this tag plus `g`.
const TAG: u64 = 1 << 32;

/// The ranks of one machine, through shared memory.
#[derive(Clone, Debug)]
pub(crate) struct ShmGroup(Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    control: Arc<dyn Control>,
    id: Identity,
    options: Options,
    spin: Duration,
    /// Locked during an operation, so that the threads of one rank take turns.
    state: Mutex<State>,
    /// Whether this rank has said that it makes buffers on the heap; for this group and all that were made from it.
    warned: Arc<AtomicBool>,
}

#[derive(Debug)]
struct State {
    rounds: Rounds,
    sequence: u64,
    buffers: u32,
    /// Set by the first error, after which the rounds must not be touched.
    failed: Option<GroupError>,
    /// Set while an operation runs: a panic in it leaves the rounds as an error does.
    broken: bool,
}

impl ShmGroup {
    /// Makes group `group` of the job's ranks. Collective, through the control connections.
    ///
    /// The outer error is the job's failure. The inner one is agreed by all ranks, who can go on without
    /// shared memory.
    pub(crate) fn create(
        control: Arc<dyn Control>,
        group: u32,
        options: Options,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let gather = control.clone();
        let mut exchange = |data: &[u8]| gather.exchange(TAG + u64::from(group), data);
        Self::assemble(control, group, options, Arc::default(), &mut exchange)
    }

    /// For a rank that needs no group: its part in the exchanges of other machines' [`create`](Self::create).
    pub(in crate::group::host) fn stand_by(control: &dyn Control, group: u32) -> Result<()> {
        for _ in 0..Segment::EXCHANGES {
            control.exchange(TAG + u64::from(group), &[])?;
        }
        Ok(())
    }

    fn assemble(
        control: Arc<dyn Control>,
        group: u32,
        options: Options,
        warned: Arc<AtomicBool>,
        exchange: &mut Exchange<'_>,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let id = Identity {
            rank: control.rank(),
            world_size: control.world_size(),
            job: control.job(),
            generation: control.generation(),
            group,
        };
        let layout = Layout::new(id.world_size, options.payload(id.world_size));
        let made = Segment::create(
            id.rank,
            id.job,
            &options.directory,
            layout.bytes(),
            exchange,
        )?;
        Ok(made.map(|segment| {
            let rounds = Rounds::new(segment, layout, id.rank);
            Self(Arc::new(Inner {
                control,
                id,
                options,
                spin: wait::spin_time(id.world_size),
                state: Mutex::new(State {
                    rounds,
                    sequence: 0,
                    buffers: 0,
                    failed: None,
                    broken: false,
                }),
                warned,
            }))
        }))
    }

    /// [`ProcessGroup::new_group`] for a caller who can go on without shared memory: the number of
    /// the new group, and the group or why there is none. Collective.
    pub(crate) fn child(&self) -> Result<(u32, Result<Self, NoSharedMemory>)> {
        let Inner {
            control,
            options,
            warned,
            ..
        } = &*self.0;
        self.0.run(Call::new_group(), &mut self.0.lock(), |op| {
            op.advance()?;
            // Rank 0 numbers the groups, since two threads may make groups from two parents, in
            // another order on every rank.
            let number = match op.id.rank {
                0 => control.next_group(),
                _ => 0,
            };
            let numbers = op.exchange(&number.to_le_bytes())?;
            let number = numbers[0]
                .first_chunk()
                .map_or(0, |bytes| u32::from_le_bytes(*bytes));
            let (control, options, warned) = (control.clone(), options.clone(), warned.clone());
            let mut exchange = |data: &[u8]| op.exchange(data);
            let child = Self::assemble(control, number, options, warned, &mut exchange)?;
            Ok((number, child))
        })
    }
}

impl ShmGroup {
    /// Runs `body` as the group's next operation.
    pub(in crate::group::host) fn operate(
        &self,
        call: Call,
        body: impl FnOnce(&mut Operation<'_>) -> Result<()>,
    ) -> Result<()> {
        self.0.collective(call, body)
    }
}

impl Inner {
    /// A panic under the lock poisons nothing more than `broken` says.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `body` as the next operation; tells the peers if it fails.
    fn run<T>(
        &self,
        call: Call,
        state: &mut State,
        body: impl FnOnce(&mut Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let descriptor = self.id.describe(call, state.sequence);
        self.control.check(&Vec::new, &|| descriptor.to_string())?;
        if state.broken {
            return Err(operation::half_way(&*self.control, &descriptor));
        }
        state.broken = true;
        state.rounds.announce(&descriptor);
        let patience = Patience::new(&*self.control, self.spin, call, &descriptor);
        let mut operation = Operation {
            id: self.id,
            rounds: &mut state.rounds,
            descriptor,
            patience,
            one_shot: self.options.one_shot,
            compared: false,
        };
        let result = operation::run(&*self.control, &descriptor, || body(&mut operation));
        state.broken = false;
        match result {
            Ok(result) => {
                state.sequence += 1;
                Ok(result)
            }
            Err(error) => Err(state.failed.insert(error).clone()),
        }
    }

    pub(super) fn collective<T>(
        &self,
        call: Call,
        body: impl FnOnce(&mut Operation<'_>) -> Result<T>,
    ) -> Result<T> {
        self.run(call, &mut self.lock(), body)
    }

    pub(super) fn id(&self) -> &Identity {
        &self.id
    }

    fn warn_once(&self, bytes: usize, refused: &NoSharedMemory) {
        if self.id.rank == 0 && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "a buffer of {bytes} bytes goes to the heap, which costs a copy per operation: {refused}"
            );
        }
    }
}

impl Engine for ShmGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "shm"
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        self.0
            .collective(call, |operation| operation.perform(payload))
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let inner = &self.0;
        let mut state = inner.lock();
        let number = state.buffers + 1;
        let small = bytes <= inner.options.one_shot;
        let made = inner.run(Call::buffer(number, bytes), &mut state, |op| {
            op.advance()?;
            // Small buffers are reduced in one round by the other path.
            if small {
                return Ok(None);
            }
            ShmBuffer::reserve(inner.clone(), op, number, bytes, &inner.options.directory).map(Some)
        })?;
        state.buffers = number;
        match made {
            Some(Ok(buffer)) => return Ok(Box::new(buffer)),
            Some(Err(refused)) => inner.warn_once(bytes, &refused),
            None => {}
        }
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        match self.child()? {
            (_, Ok(child)) => Ok(Arc::new(child)),
            (_, Err(refused)) => Err(refused.of_new_group(&*self.0.control)),
        }
    }

    fn fail(&self, error: GroupError) {
        self.0.control.fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.0.control.check(&Vec::new, &String::new).err()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{super::mock::MockControl, *};
    use crate::group::{DType, ReduceOp};

    fn create(
        world_size: usize,
        timeout: Duration,
        options: &Options,
    ) -> Vec<Result<ShmGroup, NoSharedMemory>> {
        std::thread::scope(|scope| {
            let create = |c: Arc<dyn Control>| {
                let number = c.next_group();
                ShmGroup::create(c, number, options.clone()).unwrap()
            };
            let controls = MockControl::all(world_size, timeout);
            let ranks: Vec<_> = controls
                .into_iter()
                .map(|c| scope.spawn(move || create(c)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn with(world_size: usize, timeout: Duration, options: &Options) -> Vec<Arc<dyn ProcessGroup>> {
        let groups = create(world_size, timeout, options);
        groups
            .into_iter()
            .map(|g| Arc::new(g.unwrap()) as Arc<dyn ProcessGroup>)
            .collect()
    }

    mod small_pieces {
        use super::*;

        crate::group::conformance::suite!(|n, timeout| with(n, timeout, &Options::small(n)));
    }

    mod default_pieces {
        use super::*;

        crate::group::conformance::suite!(|n, timeout| with(n, timeout, &Options::new(n)));
    }

    #[test]
    fn a_panic_inside_an_operation_ends_the_group() {
        let groups = create(1, Duration::from_secs(60), &Options::small(1));
        let group = groups.into_iter().next().unwrap().unwrap();
        group.barrier().unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            group.0.collective(Call::barrier(), |_| -> Result<()> {
                std::panic::resume_unwind(Box::new(()))
            })
        }));
        assert!(panicked.is_err());
        let error = group.barrier().unwrap_err().to_string();
        assert!(error.contains("ended half-way"), "{error}");
    }

    #[test]
    fn ddp_35_no_directory_is_agreed() {
        let options = Options {
            directory: "/nonexistent/burn-ddp".into(),
            ..Options::new(2)
        };
        let refused: Vec<_> = create(3, Duration::from_secs(60), &options)
            .into_iter()
            .map(Result::unwrap_err)
            .collect();
        assert_eq!(refused[0].rank, 0);
        assert!(
            refused[0].cause.contains("/nonexistent/burn-ddp"),
            "{}",
            refused[0]
        );
        assert!(refused.iter().all(|r| *r == refused[0]));
    }

    #[test]
    fn ddp_35_a_buffer_that_does_not_fit_goes_to_the_heap() {
        let groups = with(2, Duration::from_secs(60), &Options::small(2));
        std::thread::scope(|scope| {
            for g in &groups {
                scope.spawn(move || {
                    // More than any machine has: the reservation fails, before a byte is touched.
                    assert!(g.buffer(usize::MAX / 4).is_err());
                });
            }
        });
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            directory: directory.path().into(),
            ..Options::small(2)
        };
        let groups = with(2, Duration::from_secs(60), &options);
        // Nothing is left of the base segment's name, and no new one can be made.
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        directory.close().unwrap();
        std::thread::scope(|scope| {
            for g in &groups {
                scope.spawn(move || {
                    let mut buffer = g.buffer(40_000).unwrap();
                    buffer.input().fill(g.rank() as u8 + 1);
                    buffer.all_reduce(40_000, DType::U8, ReduceOp::Sum).unwrap();
                    assert!(buffer.output().iter().all(|x| *x == 3));
                });
            }
        });
    }
}
