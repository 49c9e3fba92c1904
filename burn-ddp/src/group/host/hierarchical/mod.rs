//! A group over several machines: shared memory on each, parallel rings of TCP connections between them.
//!
//! ```text
//!   machine 0            machine 1            machine 2
//!  rank 0 ──────ring 0── rank 2 ──────ring 0── rank 5 ── back to rank 0
//!  rank 1 ──────ring 1── rank 3 ──────ring 1── rank 6 ── back to rank 1
//!                        rank 4 (takes part through shared memory)
//! ```
//!
//! There are as many rings as the machine with the fewest ranks has ranks, each carries an equal share of the data, and every
//! rank has two connections at most: the number of sockets grows with the ranks, not with their square.
//!
//! Where ranks cannot share memory, each of them counts as a machine, and there is one ring through all.
//!
//! | file | holds |
//! |---|---|
//! | `topology` | which ranks run together, who is whose neighbour |
//! | `ring` | one ring: what each rank sends and receives in a collective |
//! | `flow` | the bytes: what has arrived and been added may leave |
//! | `stripes` | one stream over several connections |
//! | `collectives` | the operations, from both |
//! | `local` | the control plane as one machine's ranks see it |

mod collectives;
mod flow;
mod local;
mod ring;
mod stripes;
mod topology;

use super::{
    control::Control,
    deadline::Deadline,
    operation,
    shm::{self, NoSharedMemory, ShmGroup},
    tcp::{Context, mesh},
};
use crate::group::{
    GroupBuffer, GroupError, OpDescriptor, ProcessGroup, Result,
    engine::{Engine, Payload},
    heap::{HeapBuffer, HeapBytes},
    ops::{Call, Identity},
};
use collectives::Collective;
use local::LocalControl;
use ring::{Neighbours, Ring};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use topology::Topology;

/// What a rank reduces at a time: little enough to stay in its cache.
const CHUNK: usize = 256 << 10;

/// Sizes, equal on all ranks.
#[derive(Clone, Debug)]
struct Options {
    shm: shm::Options,
    /// What a ring carries in a stage of an all-reduce, at least.
    stage: usize,
    /// What goes over one of several connections before the next one's turn. The socket buffers hold several stripes, so that
    /// all connections are busy although either end serves one at a time.
    stripe: usize,
}

impl Options {
    /// For so many ranks on this machine.
    fn new(here: usize) -> Self {
        Self {
            shm: shm::Options::new(here),
            stage: 1 << 20,
            stripe: 64 << 10,
        }
    }
}

/// Tags of control exchanges: a group's set-up carries the number of its parent (or of its caller, without one).
const ROOT: u64 = 0x6869_6572 << 32;
const CHILD: u64 = 0x6869_6563 << 32;
/// Set-ups exchange more than once, each kind of exchange under its own tag.
const AGREEMENT: u64 = 0x6869_6561 << 32;

/// A [`ProcessGroup`] over several machines.
#[derive(Clone, Debug)]
pub(super) struct HierarchicalGroup(Arc<Member>);

#[derive(Debug)]
struct Member {
    context: Arc<Context>,
    topology: Topology,
    options: Options,
    id: Identity,
    /// The ranks of this machine, if there are others.
    local: Option<ShmGroup>,
    /// Held during an operation, so that the threads of one rank take turns.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    neighbours: Option<Neighbours>,
    sequence: u64,
    buffers: u32,
    chunk: HeapBytes,
    scratch: HeapBytes,
    /// An operation failed half-way, so the streams stand anywhere.
    broken: bool,
}

impl HierarchicalGroup {
    /// Connects all ranks of the job, of which those with equal `machine_of` share memory. Collective; the ranks are
    /// in the same call when they give the same `number`.
    ///
    /// The outer error is the job's failure. The inner one is agreed by all ranks, who can go on with a
    /// machine for each rank.
    pub(super) fn create<T: PartialEq>(
        context: &Arc<Context>,
        machine_of: &[T],
        number: u32,
    ) -> Result<Result<Self, NoSharedMemory>> {
        Self::create_with(context, machine_of, Options::new, number)
    }

    /// [`create`](Self::create) with options for the number of ranks on this machine.
    fn create_with<T: PartialEq>(
        context: &Arc<Context>,
        machine_of: &[T],
        options: impl Fn(usize) -> Options,
        number: u32,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let topology = Topology::new(machine_of, context.control.rank());
        let options = options(topology.here().len());
        let (_, group) = Self::connect(context, topology, options, ROOT | u64::from(number))?;
        Ok(group)
    }

    /// [`ProcessGroup::new_group`] for a caller who can go on without shared memory: the number of the new group, and the
    /// group or why there is none. Collective.
    pub(super) fn child(&self) -> Result<(u32, Result<Self, NoSharedMemory>)> {
        let member = &self.0;
        let mut state = member.lock();
        member.run(&mut state, Call::new_group(), Payload::Barrier)?;
        // The state is still held: the set-ups from one parent come in one order on all ranks.
        Self::connect(
            &member.context,
            member.topology.clone(),
            member.options.clone(),
            CHILD | u64::from(member.id.group),
        )
    }

    fn connect(
        context: &Arc<Context>,
        topology: Topology,
        options: Options,
        tag: u64,
    ) -> Result<(u32, Result<Self, NoSharedMemory>)> {
        let control = &context.control;
        let neighbours = topology.neighbours();
        let peers: Vec<usize> = neighbours.into_iter().flat_map(|(a, b)| [a, b]).collect();
        let mut links = mesh::connect(context, tag, &peers, context.sockets)
            .inspect_err(|error| control.fail(error.clone()))?;
        let id = mesh::identity(context, links.group);
        let local = Self::share_memory(control, &topology, &options.shm, id.group)?;
        let local = match agree(&**control, id.group, local)? {
            Ok(local) => local,
            Err(refused) => return Ok((id.group, Err(refused))),
        };
        let mut take = |rank: usize| {
            let streams = std::mem::take(&mut links.streams[rank]);
            (!streams.is_empty()).then_some((rank, streams))
        };
        let neighbours = neighbours.and_then(|(next, previous)| {
            Some(Neighbours {
                next: take(next)?,
                previous: take(previous),
            })
        });
        let chunk = HeapBytes::new(CHUNK).ok_or_else(|| {
            let error = GroupError::Transport {
                rank: id.rank,
                operation: format!("reserving {CHUNK} bytes for a group"),
                cause: "out of memory".into(),
            };
            control.fail(error.clone());
            error
        })?;
        let member = Member {
            context: context.clone(),
            topology,
            options,
            id,
            local,
            state: Mutex::new(State {
                neighbours,
                sequence: 0,
                buffers: 0,
                chunk,
                scratch: HeapBytes::default(),
                broken: false,
            }),
        };
        Ok((id.group, Ok(Self(Arc::new(member)))))
    }

    /// The group of this machine's ranks. Every rank of the job takes part in the exchanges.
    fn share_memory(
        control: &Arc<dyn Control>,
        topology: &Topology,
        options: &shm::Options,
        group: u32,
    ) -> Result<Result<Option<ShmGroup>, NoSharedMemory>> {
        if topology.machines() == topology.ranks() {
            return Ok(Ok(None));
        }
        let ranks = topology.here().to_vec();
        if ranks.len() == 1 {
            ShmGroup::stand_by(&**control, group)?;
            return Ok(Ok(None));
        }
        let local = LocalControl::new(control.clone(), ranks, topology.local);
        let made = ShmGroup::create(Arc::new(local), group, options.clone())?;
        Ok(made.map(Some).map_err(|refused| NoSharedMemory {
            rank: topology.here()[refused.rank],
            ..refused
        }))
    }
}

/// What one machine cannot do, none does. Collective.
fn agree<T>(
    control: &dyn Control,
    group: u32,
    outcome: Result<T, NoSharedMemory>,
) -> Result<Result<T, NoSharedMemory>> {
    let refused = outcome.as_ref().err();
    let text = refused.map(|refused| format!("{} {}", refused.rank, refused.cause));
    let text = text.unwrap_or_default();
    let all = control.exchange(AGREEMENT | u64::from(group), text.as_bytes())?;
    let read = |text: &Vec<u8>| {
        let text = String::from_utf8_lossy(text);
        let (rank, cause) = text.split_once(' ')?;
        Some(NoSharedMemory {
            rank: rank.parse().ok()?,
            cause: cause.to_owned(),
        })
    };
    Ok(match all.iter().find_map(read) {
        None => outcome,
        Some(refused) => Err(refused),
    })
}

impl Member {
    /// A panic between two steps leaves the streams as an error does, and `broken` says so either way.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, state: &mut State, call: Call, payload: Payload<'_>) -> Result<()> {
        let control = &*self.context.control;
        let ours = self.id.describe(call, state.sequence);
        let failure = control.check(&Vec::new, &|| ours.to_string());
        failure.map_err(|error| self.own_view(ours, error))?;
        if state.broken {
            return Err(operation::half_way(control, &ours));
        }
        state.broken = true;
        state.sequence += 1;
        let State {
            neighbours,
            chunk,
            scratch,
            ..
        } = state;
        let (topology, stage) = (&self.topology, self.options.stage);
        let ring = neighbours.as_ref().map(|neighbours| Ring {
            control,
            neighbours,
            stripe: self.options.stripe,
            ranks: topology.ring(),
            position: topology.machine,
            ours,
            deadline: Deadline::new(control, call),
            chunk: chunk.as_mut_slice(),
        });
        let done = match &self.local {
            None => operation::run(control, &ours, || {
                Collective {
                    topology,
                    local: None,
                    ring,
                    scratch,
                    stage,
                }
                .run(payload)
            }),
            // Which is an operation of the ranks of this machine under the same name.
            Some(shm) => shm.operate(call, |operation| {
                Collective {
                    topology,
                    local: Some(operation),
                    ring,
                    scratch,
                    stage,
                }
                .run(payload)
            }),
        };
        done.map_err(|error| self.own_view(ours, error))?;
        state.broken = false;
        Ok(())
    }

    /// A difference that another rank found first in this operation, from this rank's side: it may have met neither of the two.
    fn own_view(&self, mine: OpDescriptor, error: GroupError) -> GroupError {
        match error {
            GroupError::Mismatch {
                rank,
                peer,
                ours,
                theirs,
            } if rank != self.id.rank
                && (mine.group, mine.sequence) == (ours.group, ours.sequence) =>
            {
                let (peer, theirs) = if mine == *ours {
                    (peer, theirs)
                } else {
                    (rank, ours)
                };
                GroupError::Mismatch {
                    rank: self.id.rank,
                    peer,
                    ours: Box::new(mine),
                    theirs,
                }
            }
            error => error,
        }
    }
}

impl Engine for HierarchicalGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        match self.0.topology.machines() == self.0.topology.ranks() {
            true => "tcp",
            false => "shm+tcp",
        }
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        self.0.run(&mut self.0.lock(), call, payload)
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let member = &self.0;
        let mut state = member.lock();
        let number = state.buffers + 1;
        member.run(&mut state, Call::buffer(number, bytes), Payload::Barrier)?;
        state.buffers = number;
        drop(state);
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        match self.child()?.1 {
            Ok(child) => Ok(Arc::new(child)),
            Err(refused) => Err(refused.of_new_group(&*self.0.context.control)),
        }
    }

    fn fail(&self, error: GroupError) {
        self.0.context.control.fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        let control = &self.0.context.control;
        control.check(&Vec::new, &String::new).err()
    }
}

#[cfg(test)]
mod tests;
