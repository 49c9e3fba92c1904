//! The group of one rank.

use super::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Engine, Payload},
    heap::HeapBuffer,
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

impl LocalGroup {
    /// All that can be wrong with a collective whose arguments have been checked.
    fn check(&self) -> Result<()> {
        self.0
            .failure
            .get()
            .map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl Engine for LocalGroup {
    fn identity(&self) -> &Identity {
        &self.0.id
    }

    fn label(&self) -> &'static str {
        "local"
    }

    fn run(&self, _: Call, payload: Payload<'_>) -> Result<()> {
        self.check()?;
        if let Payload::AllGather { send, recv } | Payload::ReduceScatter { send, recv, .. } =
            payload
        {
            recv.copy_from_slice(send);
        }
        Ok(())
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        self.check()?;
        let number = self.0.buffers.fetch_add(1, Ordering::Relaxed) + 1;
        HeapBuffer::reserve(self, number, bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        self.check()?;
        Ok(Arc::new(Self::with_failure(
            self.0.id.generation,
            self.0.failure.clone(),
        )))
    }

    fn fail(&self, error: GroupError) {
        // The first reason stays.
        let _ = self.0.failure.set(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.0.failure.get().cloned()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::group::{DType, ReduceOp};

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
