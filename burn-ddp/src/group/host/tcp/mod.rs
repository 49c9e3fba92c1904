//! A group over TCP: a full mesh of connections among its ranks.
//!
//! The fallback where shared memory is not to be had. See [`collectives`] for the algorithms,
//! [`exchange`] for how bytes move and how differences and failures are noticed, [`mesh`] for the connections.

mod collectives;
mod exchange;
mod mesh;

use super::{control::Control, secret::Secret};
use crate::group::{
    DType, GroupBuffer, GroupError, ProcessGroup, ReduceOp, Result,
    heap::{HeapBuffer, ReduceBuffer},
    ops::{Call, Identity},
};
use collectives::{Collective, Scratch, Tuning};
use exchange::Exchange;
use mesh::Mesh;
use std::{
    net::IpAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// Tags of control exchanges, apart from those of other users of the control plane: the set-up of a group
/// without a parent carries its caller's number in the low half, that of a child its parent's.
const ROOT: u64 = 0x7463_7072 << 32;
const CHILD: u64 = 0x7463_7063 << 32;

/// What all TCP groups of a job have in common.
#[derive(Debug)]
pub(super) struct Plane {
    control: Arc<dyn Control>,
    secret: Secret,
    local: IpAddr,
    tuning: Tuning,
    /// Counts the groups; rank 0's count numbers them.
    groups: AtomicU32,
}

/// A [`ProcessGroup`] over TCP.
#[derive(Clone, Debug)]
pub(super) struct TcpGroup(Arc<Member>);

#[derive(Debug)]
struct Member {
    plane: Arc<Plane>,
    id: Identity,
    /// Held during an operation, so that the threads of one rank take turns.
    lane: Mutex<Lane>,
}

#[derive(Debug)]
struct Lane {
    mesh: Mesh,
    sequence: u64,
    buffers: u32,
    scratch: Scratch,
    /// An operation failed half-way, so the streams stand anywhere.
    broken: bool,
}

impl Plane {
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
            groups: AtomicU32::new(0),
        }
    }
}

impl TcpGroup {
    /// Connects all ranks of the job. Collective; the ranks are in the same call when they give the same `number`.
    pub(super) fn create(plane: &Arc<Plane>, number: u32) -> Result<Self> {
        Ok(Self(Member::connect(
            plane.clone(),
            ROOT | u64::from(number),
        )?))
    }

    /// [`ProcessGroup::new_group`], as this type.
    pub(super) fn child(&self) -> Result<Self> {
        let member = &self.0;
        let mut lane = member.lane();
        member.run_in(&mut lane, Call::new_group(), |collective| collective.meet())?;
        // The lane is still held: the set-ups from one parent come in one order on all ranks.
        Ok(Self(Member::connect(
            member.plane.clone(),
            CHILD | u64::from(member.id.group),
        )?))
    }
}

impl Member {
    fn connect(plane: Arc<Plane>, tag: u64) -> Result<Arc<Self>> {
        let proposed = plane.groups.fetch_add(1, Ordering::Relaxed);
        let mesh = mesh::connect(&plane, tag, proposed)
            .inspect_err(|error| plane.control.fail(error.clone()))?;
        let id = mesh::identity(&plane, mesh.group);
        let lane = Lane {
            mesh,
            sequence: 0,
            buffers: 0,
            scratch: Scratch::default(),
            broken: false,
        };
        Ok(Arc::new(Self {
            plane,
            id,
            lane: Mutex::new(lane),
        }))
    }

    /// A panic between two steps leaves the streams as an error does, and `broken` says so either way.
    fn lane(&self) -> MutexGuard<'_, Lane> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, call: Call, body: impl FnOnce(&mut Collective<'_>) -> Result<()>) -> Result<()> {
        self.run_in(&mut self.lane(), call, body)
    }

    fn run_in(
        &self,
        lane: &mut Lane,
        call: Call,
        body: impl FnOnce(&mut Collective<'_>) -> Result<()>,
    ) -> Result<()> {
        let control = &*self.plane.control;
        let ours = self.id.describe(call, lane.sequence);
        if lane.broken {
            control.check(&Vec::new, &|| ours.to_string())?;
            // Only a panic inside an operation comes here.
            return Err(GroupError::Transport {
                rank: self.id.rank,
                operation: ours.to_string(),
                cause: "an earlier operation of this group ended half-way".into(),
            });
        }
        lane.broken = true;
        lane.sequence += 1;
        let mut collective = Collective {
            exchange: Exchange::new(control, &lane.mesh.streams, ours),
            rank: self.id.rank,
            ranks: self.id.world_size,
            tuning: self.plane.tuning,
            scratch: &mut lane.scratch,
        };
        body(&mut collective).inspect_err(|error| control.fail(error.clone()))?;
        lane.broken = false;
        Ok(())
    }
}

impl ReduceBuffer for Member {
    fn rank(&self) -> usize {
        self.id.rank
    }

    fn all_reduce_buffer(
        &self,
        buffer: u32,
        memory: &mut [u8],
        bytes: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::all_reduce(&self.id, buffer, bytes, dtype, op)?;
        let call = call.within(&self.id, bytes, memory.len())?;
        self.run(call, |collective| {
            collective.all_reduce(&mut memory[..bytes], dtype, op)
        })
    }
}

impl ProcessGroup for TcpGroup {
    fn rank(&self) -> usize {
        self.0.id.rank
    }

    fn world_size(&self) -> usize {
        self.0.id.world_size
    }

    fn transport(&self) -> &'static str {
        "tcp"
    }

    fn all_reduce(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let call = Call::all_reduce(&self.0.id, 0, data.len(), dtype, op)?;
        self.0
            .run(call, |collective| collective.all_reduce(data, dtype, op))
    }

    fn broadcast(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        let call = Call::broadcast(&self.0.id, data.len(), dtype, root)?;
        self.0
            .run(call, |collective| collective.broadcast(data, root))
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        let call = Call::all_gather(&self.0.id, send.len(), recv.len(), dtype)?;
        self.0
            .run(call, |collective| collective.all_gather(send, recv))
    }

    fn reduce_scatter(
        &self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::reduce_scatter(&self.0.id, send.len(), recv.len(), dtype, op)?;
        self.0.run(call, |collective| {
            collective.reduce_scatter(send, recv, dtype, op)
        })
    }

    fn barrier(&self) -> Result<()> {
        self.0.run(Call::barrier(), |collective| collective.meet())
    }

    fn buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let member = &self.0;
        let mut lane = member.lane();
        let number = lane.buffers + 1;
        member.run_in(&mut lane, Call::buffer(number, bytes), |collective| {
            collective.meet()
        })?;
        lane.buffers = number;
        let buffer = HeapBuffer::new(member.clone(), number, bytes);
        // The peers have agreed on it and would wait for this rank in its first operation.
        Ok(Box::new(buffer.inspect_err(|error| {
            member.plane.control.fail(error.clone());
        })?))
    }

    fn new_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(self.child()?))
    }

    fn abort(&self, reason: &str) {
        let rank = self.rank();
        self.0.plane.control.fail(GroupError::Aborted {
            rank,
            origin: rank,
            reason: reason.into(),
        });
    }

    fn failure(&self) -> Option<GroupError> {
        self.0
            .plane
            .control
            .check(&Vec::new, &|| "idle".to_owned())
            .err()
    }
}

#[cfg(test)]
mod tests;
