//! The group of one rank.

use super::{
    DType, GroupBuffer, GroupError, ProcessGroup, ReduceOp, Result,
    heap::{HeapBuffer, ReduceBuffer},
    ops::{Call, Identity},
};
use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU32, Ordering},
};

/// A group whose collectives are copies: every reduction over one rank is the identity.
#[derive(Clone, Debug)]
pub(crate) struct LocalGroup(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: Identity,
    failure: Arc<OnceLock<GroupError>>,
    buffers: AtomicU32,
}

impl LocalGroup {
    pub(crate) fn new(generation: u32) -> Self {
        Self::with_failure(generation, Arc::default())
    }

    fn with_failure(generation: u32, failure: Arc<OnceLock<GroupError>>) -> Self {
        let id = Identity {
            rank: 0,
            world_size: 1,
            job: 0,
            generation,
            group: 0,
        };
        Self(Arc::new(Inner {
            id,
            failure,
            buffers: AtomicU32::new(0),
        }))
    }
}

impl Inner {
    /// What remains of a collective: its arguments have been checked, and the job may have been aborted.
    fn run(&self, _checked: Call) -> Result<()> {
        self.failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl ReduceBuffer for Inner {
    fn rank(&self) -> usize {
        0
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
        self.run(call.within(&self.id, bytes, memory.len())?)
    }
}

impl ProcessGroup for LocalGroup {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn transport(&self) -> &'static str {
        "local"
    }

    fn all_reduce(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        self.0
            .run(Call::all_reduce(&self.0.id, 0, data.len(), dtype, op)?)
    }

    fn broadcast(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        self.0
            .run(Call::broadcast(&self.0.id, data.len(), dtype, root)?)
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        self.0
            .run(Call::all_gather(&self.0.id, send.len(), recv.len(), dtype)?)?;
        recv.copy_from_slice(send);
        Ok(())
    }

    fn reduce_scatter(
        &self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.0.run(Call::reduce_scatter(
            &self.0.id,
            send.len(),
            recv.len(),
            dtype,
            op,
        )?)?;
        recv.copy_from_slice(send);
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        self.0.run(Call::barrier())
    }

    fn buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        let number = self.0.buffers.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.run(Call::buffer(number, bytes))?;
        Ok(Box::new(HeapBuffer::new(self.0.clone(), number, bytes)?))
    }

    fn new_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        self.0.run(Call::new_group())?;
        Ok(Arc::new(Self::with_failure(
            self.0.id.generation,
            self.0.failure.clone(),
        )))
    }

    fn abort(&self, reason: &str) {
        // The first reason stays.
        let _ = self.0.failure.set(GroupError::Aborted {
            rank: 0,
            origin: 0,
            reason: reason.into(),
        });
    }

    fn failure(&self) -> Option<GroupError> {
        self.0.failure.get().cloned()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_collective_is_a_copy() {
        let group = LocalGroup::new(0);
        let mut data = *b"abcd";
        group
            .all_reduce(&mut data, DType::F32, ReduceOp::Mean)
            .unwrap();
        group.broadcast(&mut data, DType::U8, 0).unwrap();
        assert_eq!(data, *b"abcd");
        let mut copy = [0; 4];
        group.all_gather(&data, &mut copy, DType::F32).unwrap();
        assert_eq!(copy, data);
        copy = [0; 4];
        group
            .reduce_scatter(&data, &mut copy, DType::F32, ReduceOp::Product)
            .unwrap();
        assert_eq!(copy, data);
        let mut buffer = group.buffer(8).unwrap();
        buffer.input()[..4].copy_from_slice(&data);
        buffer.all_reduce(4, DType::F32, ReduceOp::Sum).unwrap();
        assert_eq!(buffer.output()[..4], data);
        assert!(buffer.all_reduce(12, DType::F32, ReduceOp::Sum).is_err());
    }

    #[test]
    fn arguments_are_checked_and_an_abort_reaches_all_groups() {
        let group = LocalGroup::new(0);
        assert!(matches!(
            group.broadcast(&mut [0], DType::U8, 1),
            Err(GroupError::InvalidArgument { .. })
        ));
        assert!(matches!(
            group.all_gather(&[0], &mut [0; 2], DType::U8),
            Err(GroupError::InvalidArgument { .. })
        ));
        assert_eq!(group.failure(), None);
        let other = group.new_group().unwrap();
        other.abort("enough");
        assert!(
            matches!(group.barrier(), Err(GroupError::Aborted { reason, .. }) if reason == "enough")
        );
        assert_eq!(group.failure(), other.failure());
    }
}
