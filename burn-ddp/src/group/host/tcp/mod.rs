//! A group over TCP: a full mesh of connections among its ranks.
//!
//! The fallback where shared memory is not to be had. See [`collectives`] for the algorithms,
//! [`exchange`] for how bytes move and how differences and failures are noticed, [`mesh`] and [`call`] for the connections.

mod call;
mod collectives;
mod exchange;
pub(super) mod mesh;

use super::{control::Control, operation, secret::Secret};
use crate::group::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Collectives, Engine, Payload},
    heap::HeapBuffer,
    ops::{Call, Identity},
};
use collectives::{Collective, Scratch, Tuning};
use exchange::Exchange;
pub(super) use mesh::MOST_SOCKETS;
use mesh::Mesh;
use std::{
    net::IpAddr,
    num::NonZeroUsize,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Tags of control exchanges, apart from those of other users of the control plane: the set-up of a group
/// without a parent carries its caller's number in the low half, that of a child its parent's.
const ROOT: u64 = 0x7463_7072 << 32;
const CHILD: u64 = 0x7463_7063 << 32;

/// What all TCP groups of a job have in common.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) control: Arc<dyn Control>,
    secret: Secret,
    local: IpAddr,
    tuning: Tuning,
    pub(super) sockets: NonZeroUsize,
}

/// A [`ProcessGroup`] over TCP.
#[derive(Clone, Debug)]
pub(super) struct TcpGroup(Arc<Member>);

#[derive(Debug)]
struct Member {
    context: Arc<Context>,
    id: Identity,
    /// Held during an operation, so that the threads of one rank take turns.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    mesh: Mesh,
    sequence: u64,
    buffers: u32,
    scratch: Scratch,
    /// An operation failed half-way, so the streams stand anywhere.
    broken: bool,
}

impl Context {
    /// Every rank must be reachable for the others at its `local` address.
    pub(super) fn new(control: Arc<dyn Control>, secret: Secret, local: IpAddr) -> Self {
        Self::with_tuning(control, secret, local, Tuning::default())
    }

    fn with_tuning(
        control: Arc<dyn Control>,
        secret: Secret,
        local: IpAddr,
        tuning: Tuning,
    ) -> Self {
        Self {
            control,
            secret,
            local,
            tuning,
            sockets: NonZeroUsize::MIN,
        }
    }

    /// With so many connections between two neighbours on a ring.
    pub(super) fn sockets(mut self, sockets: NonZeroUsize) -> Self {
        self.sockets = sockets;
        self
    }
}

impl TcpGroup {
    /// Connects all ranks of the job. Collective; the ranks are in the same call when they give the same `number`.
    pub(super) fn create(context: &Arc<Context>, number: u32) -> Result<Self> {
        Ok(Self(Member::connect(
            context.clone(),
            ROOT | u64::from(number),
        )?))
    }

    /// [`ProcessGroup::new_group`], as this type.
    pub(super) fn child(&self) -> Result<Self> {
        let member = &self.0;
        let mut state = member.state();
        member.run_in(&mut state, Call::new_group(), Payload::Barrier)?;
        // The state is still held: the set-ups from one parent come in one order on all ranks.
        Ok(Self(Member::connect(
            member.context.clone(),
            CHILD | u64::from(member.id.group),
        )?))
    }
}

impl Member {
    fn connect(context: Arc<Context>, tag: u64) -> Result<Arc<Self>> {
        let all: Vec<usize> = (0..context.control.world_size()).collect();
        let mesh = mesh::connect(&context, tag, &all, NonZeroUsize::MIN)
            .inspect_err(|error| context.control.fail(error.clone()))?;
        let id = mesh::identity(&context, mesh.group);
        let state = State {
            mesh,
            sequence: 0,
            buffers: 0,
            scratch: Scratch::default(),
            broken: false,
        };
        Ok(Arc::new(Self {
            context,
            id,
            state: Mutex::new(state),
        }))
    }

    /// A panic between two steps leaves the streams as an error does, and `broken` says so either way.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_in(&self, state: &mut State, call: Call, payload: Payload<'_>) -> Result<()> {
        let control = &*self.context.control;
        let ours = self.id.describe(call, state.sequence);
        if state.broken {
            control.check(&Vec::new, &|| ours.to_string())?;
            return Err(operation::half_way(control, &ours));
        }
        state.broken = true;
        state.sequence += 1;
        let mut collective = Collective {
            exchange: Exchange::new(control, &state.mesh.streams, call, ours),
            rank: self.id.rank,
            ranks: self.id.world_size,
            tuning: self.context.tuning,
            scratch: &mut state.scratch,
        };
        operation::run(control, &ours, || collective.perform(payload))?;
        state.broken = false;
        Ok(())
    }
}

impl Engine for TcpGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "tcp"
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        self.0.run_in(&mut self.0.state(), call, payload)
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let member = &self.0;
        let mut state = member.state();
        let number = state.buffers + 1;
        member.run_in(&mut state, Call::buffer(number, bytes), Payload::Barrier)?;
        state.buffers = number;
        drop(state);
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(self.child()?))
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
