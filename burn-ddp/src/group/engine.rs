//! What a group has of its own. The rest of [`ProcessGroup`] is alike for all groups.

use super::{
    DType, GroupBuffer, GroupError, ProcessGroup, ReduceOp, Result,
    ops::{Call, Identity},
};
use std::{fmt::Debug, sync::Arc};

/// The memory of a collective and what to do with it. Sizes, roots and operations have been checked.
#[derive(Debug)]
pub(crate) enum Payload<'a> {
    AllReduce {
        data: &'a mut [u8],
        dtype: DType,
        op: ReduceOp,
    },
    Broadcast {
        data: &'a mut [u8],
        root: usize,
    },
    AllGather {
        send: &'a [u8],
        recv: &'a mut [u8],
    },
    ReduceScatter {
        send: &'a [u8],
        recv: &'a mut [u8],
        dtype: DType,
        op: ReduceOp,
    },
    Barrier,
}

/// The collectives of one operation under way, for groups that differ in nothing else between them.
pub(crate) trait Collectives {
    fn all_reduce(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()>;
    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<()>;
    fn all_gather(&mut self, send: &[u8], recv: &mut [u8]) -> Result<()>;
    fn reduce_scatter(
        &mut self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()>;
    fn barrier(&mut self) -> Result<()>;

    /// Does what `payload` asks for.
    fn perform(&mut self, payload: Payload<'_>) -> Result<()> {
        match payload {
            Payload::AllReduce { data, dtype, op } => self.all_reduce(data, dtype, op),
            Payload::Broadcast { data, root } => self.broadcast(data, root),
            Payload::AllGather { send, recv } => self.all_gather(send, recv),
            Payload::ReduceScatter {
                send,
                recv,
                dtype,
                op,
            } => self.reduce_scatter(send, recv, dtype, op),
            Payload::Barrier => self.barrier(),
        }
    }
}

/// How one kind of group does its collectives. [`ProcessGroup`] follows from it.
pub(crate) trait Engine: Send + Sync + Debug {
    fn identity(&self) -> &Identity;

    /// See [`ProcessGroup::transport`].
    fn label(&self) -> &'static str;

    /// Runs `payload` as the group's next operation, which all ranks must describe by the same `call`, within the operation
    /// time-out unless the call lifts it.
    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()>;

    /// See [`ProcessGroup::buffer`].
    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>>;

    /// See [`ProcessGroup::new_group`].
    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>>;

    /// Records the job's failure (the first one wins) and tells the peers, without waiting for them.
    fn fail(&self, error: GroupError);

    /// See [`ProcessGroup::failure`].
    fn first_failure(&self) -> Option<GroupError>;
}

impl<E: Engine> ProcessGroup for E {
    fn rank(&self) -> usize {
        self.identity().rank
    }

    fn world_size(&self) -> usize {
        self.identity().world_size
    }

    fn transport(&self) -> &'static str {
        self.label()
    }

    fn all_reduce(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let call = Call::all_reduce(self.identity(), 0, data.len(), dtype, op)?;
        self.run(call, Payload::AllReduce { data, dtype, op })
    }

    fn broadcast(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        let call = Call::broadcast(self.identity(), data.len(), dtype, root)?;
        self.run(call, Payload::Broadcast { data, root })
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        let call = Call::all_gather(self.identity(), send.len(), recv.len(), dtype)?;
        self.run(call, Payload::AllGather { send, recv })
    }

    fn reduce_scatter(
        &self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let call = Call::reduce_scatter(self.identity(), send.len(), recv.len(), dtype, op)?;
        let payload = Payload::ReduceScatter {
            send,
            recv,
            dtype,
            op,
        };
        self.run(call, payload)
    }

    fn barrier(&self) -> Result<()> {
        self.run(Call::barrier(), Payload::Barrier)
    }

    fn monitored_barrier(&self) -> Result<()> {
        self.run(Call::monitored_barrier(), Payload::Barrier)
    }

    fn buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        self.make_buffer(bytes)
    }

    fn new_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        self.make_group()
    }

    fn abort(&self, reason: &str) {
        let rank = self.identity().rank;
        self.fail(GroupError::aborted(rank, rank, reason));
    }

    fn failure(&self) -> Option<GroupError> {
        self.first_failure()
    }
}
