//! Group buffers on the heap, for groups that have no memory of their own.

use super::{
    DType, GroupBuffer, GroupError, ReduceOp, Result,
    engine::{Engine, Payload},
    ops::Call,
};
use std::sync::Arc;

const ALIGN: usize = 64;

/// Zeroed bytes that start on a cache line.
#[derive(Debug, Default)]
pub(crate) struct HeapBytes {
    memory: Vec<u8>,
    start: usize,
}

impl HeapBytes {
    /// `None` if the allocator refuses.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let length = bytes.checked_add(ALIGN)?;
        let mut memory = Vec::new();
        memory.try_reserve_exact(length).ok()?;
        memory.resize(length, 0u8);
        let start = memory.as_ptr().align_offset(ALIGN);
        // `align_offset` may decline (it does under Miri's symbolic alignment); the promise of
        // alignment is about speed, the length is not.
        let start = if start > ALIGN { 0 } else { start };
        memory.truncate(start + bytes);
        Some(Self { memory, start })
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.memory[self.start..]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..]
    }
}

/// A [`GroupBuffer`] whose input and output are the same memory on the heap.
#[derive(Debug)]
pub(crate) struct HeapBuffer {
    group: Arc<dyn Engine>,
    number: u32,
    memory: HeapBytes,
}

impl HeapBuffer {
    /// Buffer number `number` of `group`. An error fails the job: the peers have agreed on the buffer and would wait
    /// for this rank in its first operation.
    pub(crate) fn reserve<E: Engine + Clone + 'static>(
        group: &E,
        number: u32,
        bytes: usize,
    ) -> Result<Box<dyn GroupBuffer>> {
        let memory = HeapBytes::new(bytes).ok_or_else(|| GroupError::Transport {
            rank: group.identity().rank,
            operation: format!("reserving a buffer of {bytes} bytes"),
            cause: "out of memory".into(),
        });
        let memory = memory.inspect_err(|error| group.fail(error.clone()))?;
        Ok(Box::new(Self {
            group: Arc::new(group.clone()),
            number,
            memory,
        }))
    }
}

impl GroupBuffer for HeapBuffer {
    fn bytes(&self) -> usize {
        self.memory.as_slice().len()
    }

    fn input(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    fn all_reduce(&mut self, bytes: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        let id = self.group.identity();
        let memory = self.memory.as_mut_slice();
        let call = Call::all_reduce(id, self.number, bytes, dtype, op)?;
        let call = call.within(id, bytes, memory.len())?;
        let data = &mut memory[..bytes];
        self.group.run(call, Payload::AllReduce { data, dtype, op })
    }

    fn output(&self) -> &[u8] {
        self.memory.as_slice()
    }
}
