//! Buffers in shared memory: reduced where they lie.
//!
//! A buffer has a segment of its own: every rank's input and one result. An all-reduce is two rounds of the
//! group (see `rounds`), *arrive* and *done*; between them each rank reduces its share of all inputs into the
//! result.
//!
//! **Invariant: this rank's input is written by this rank only outside `all_reduce`; any rank reads inputs
//! and writes its share of the result only between the end of arrive and its publication of done; the
//! result is read only outside `all_reduce`.**
//!
//! - An input that is still being reduced is not overwritten: its owner leaves `all_reduce` after all
//!   ranks have published done, and they did that after their last read.
//! - A result that is still being read is not overwritten: ranks write it after all have published the
//!   next arrive on this buffer, and each does so inside `all_reduce`, which borrows the buffer
//!   mutably, so that no slice of its output is left.
//! - Both need that all ranks are in the same operation on the same buffer: arrive compares the
//!   descriptors, which carry the buffer's number.
//!
//! After an error peers may still be at work in the segment, so the buffer turns to private memory.

use super::{
    collectives::{Operation, share},
    group::Inner,
    segment::{NoSharedMemory, Segment},
};
use crate::group::{
    DType, GroupBuffer, ReduceOp, Result, heap::HeapBytes, ops::Call, reduce::reduce_into,
};
use std::{ops::Range, path::Path, sync::Arc};

const PAGE: usize = 4096;

/// A buffer in a segment that all ranks have mapped.
#[derive(Debug)]
pub(super) struct ShmBuffer {
    group: Arc<Inner>,
    number: u32,
    segment: Segment,
    bytes: usize,
    /// In place of the segment, once an operation on this buffer has failed.
    detached: Option<HeapBytes>,
}

impl ShmBuffer {
    /// Collective, within `operation`.
    pub(super) fn reserve(
        group: Arc<Inner>,
        operation: &mut Operation<'_>,
        number: u32,
        bytes: usize,
        directory: &Path,
    ) -> Result<Result<Self, NoSharedMemory>> {
        let id = *group.id();
        let Some(size) = segment_size(bytes, id.world_size) else {
            let cause = format!("{bytes} bytes are more than can be addressed");
            // Every rank comes to this by itself.
            return Ok(Err(NoSharedMemory { rank: 0, cause }));
        };
        let mut exchange = |data: &[u8]| operation.exchange(data);
        let made = Segment::create(id.rank, id.job, directory, size, &mut exchange)?;
        Ok(made.map(|segment| Self {
            group,
            number,
            segment,
            bytes,
            detached: None,
        }))
    }

    /// Where `rank`'s input lies.
    fn slot(&self, rank: usize) -> Range<usize> {
        let start = rank * stride(self.bytes);
        start..start + self.bytes
    }

    /// Where the result lies: behind all inputs.
    fn result(&self) -> Range<usize> {
        self.slot(self.group.id().world_size)
    }

    fn detach(&mut self) {
        // Without memory even for this, the buffer is empty; the job has failed anyway.
        self.detached = Some(HeapBytes::new(self.bytes).unwrap_or_default());
    }
}

fn stride(bytes: usize) -> usize {
    bytes.next_multiple_of(PAGE)
}

fn segment_size(bytes: usize, ranks: usize) -> Option<usize> {
    let size = bytes
        .checked_next_multiple_of(PAGE)?
        .checked_mul(ranks + 1)?;
    (size <= isize::MAX as usize).then_some(size)
}

/// Reduces this rank's share of the first `bytes` bytes. Called between arrive and done.
fn reduce_share(buffer: &ShmBuffer, bytes: usize, dtype: DType, op: ReduceOp) {
    let id = buffer.group.id();
    let share = share(bytes, id.world_size, id.rank);
    let at = |region: Range<usize>| region.start + share.start..region.start + share.end;
    let inputs: Vec<&[u8]> = (0..id.world_size)
        // SAFETY: the invariant: between arrive and done nobody writes an input; this rank's own slice
        // of it ended with the borrow of the buffer.
        .map(|rank| unsafe { buffer.segment.read(at(buffer.slot(rank))) })
        .collect();
    // SAFETY: the invariant: between arrive and done nobody reads the result, and shares do
    // not overlap.
    let out = unsafe { buffer.segment.write(at(buffer.result())) };
    reduce_into(out, &inputs, dtype, op);
}

impl GroupBuffer for ShmBuffer {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn input(&mut self) -> &mut [u8] {
        let slot = self.slot(self.group.id().rank);
        match &mut self.detached {
            Some(memory) => memory.as_mut_slice(),
            // SAFETY: the invariant: outside `all_reduce`, which takes `&mut self` as this does, this
            // rank alone uses its input, and the last `all_reduce` succeeded.
            None => unsafe { self.segment.write(slot) },
        }
    }

    fn all_reduce(&mut self, bytes: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        let id = self.group.id();
        let call = Call::all_reduce(id, self.number, bytes, dtype, op)?;
        let call = call.within(id, bytes, self.bytes)?;
        let result = self.group.collective(call, |operation| {
            operation.advance()?;
            reduce_share(self, bytes, dtype, op);
            operation.advance()
        });
        if result.is_err() {
            self.detach();
        }
        result
    }

    fn output(&self) -> &[u8] {
        match &self.detached {
            Some(memory) => memory.as_slice(),
            // SAFETY: the invariant: no rank writes the result before this one has arrived at
            // its next `all_reduce`, which takes `&mut self`, and the last one succeeded.
            None => unsafe { self.segment.read(self.result()) },
        }
    }
}
