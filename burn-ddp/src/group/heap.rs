//! Group buffers on the heap, for groups that have no memory of their own.

use super::{DType, GroupBuffer, GroupError, ReduceOp, Result};
use std::{fmt::Debug, sync::Arc};

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

/// What a group gives to its heap buffers: [`ProcessGroup::all_reduce`](super::ProcessGroup::all_reduce)
/// that carries the number of the buffer in its descriptor.
pub(crate) trait ReduceBuffer: Send + Sync + Debug {
    fn rank(&self) -> usize;

    /// Reduces the first `bytes` of buffer number `buffer`, whose whole memory is `memory`.
    fn all_reduce_buffer(
        &self,
        buffer: u32,
        memory: &mut [u8],
        bytes: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()>;
}

/// A [`GroupBuffer`] whose input and output are the same memory on the heap.
#[derive(Debug)]
pub(crate) struct HeapBuffer {
    group: Arc<dyn ReduceBuffer>,
    number: u32,
    memory: HeapBytes,
}

impl HeapBuffer {
    pub(crate) fn new(group: Arc<dyn ReduceBuffer>, number: u32, bytes: usize) -> Result<Self> {
        let memory = HeapBytes::new(bytes).ok_or_else(|| GroupError::Transport {
            rank: group.rank(),
            operation: format!("reserving a buffer of {bytes} bytes"),
            cause: "out of memory".into(),
        })?;
        Ok(Self {
            group,
            number,
            memory,
        })
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
        self.group
            .all_reduce_buffer(self.number, self.memory.as_mut_slice(), bytes, dtype, op)
    }

    fn output(&self) -> &[u8] {
        self.memory.as_slice()
    }
}
