//! Where a bucket's bytes lie.

use crate::group::{
    DType, GroupBuffer, GroupError, ProcessGroup, ReduceOp, Result, heap::HeapBytes,
};
use burn::tensor::{AllocationProperty, Bytes};
use std::{ops::Range, sync::Arc};

/// A bucket's bytes, reduced in place or into an output beside them.
#[derive(Debug)]
pub(super) enum Memory {
    /// The group's own, which suits it best; what is reduced is copied out of it.
    Group(Box<dyn GroupBuffer>),
    /// The process's own, into which the reduced gradients point.
    Views(Views),
}

impl Memory {
    /// Collective, in the group's memory.
    pub(super) fn new(group: &Arc<dyn ProcessGroup>, bytes: usize, views: bool) -> Result<Self> {
        match views {
            true => Views::new(group.clone(), bytes).map(Self::Views),
            false => group.buffer(bytes).map(Self::Group),
        }
    }

    /// Before the first byte of a round is written.
    pub(super) fn begin(&mut self) -> Result<()> {
        match self {
            Self::Group(_) => Ok(()),
            Self::Views(views) => views.begin(),
        }
    }

    /// This rank's bytes.
    pub(super) fn input(&mut self) -> &mut [u8] {
        match self {
            Self::Group(buffer) => buffer.input(),
            Self::Views(views) => views.memory.as_mut_slice(),
        }
    }

    /// The result of the last [`all_reduce`](Self::all_reduce).
    pub(super) fn output(&self) -> &[u8] {
        match self {
            Self::Group(buffer) => buffer.output(),
            Self::Views(views) => views.memory.as_slice(),
        }
    }

    /// Reduces the first `bytes` bytes over all ranks.
    pub(super) fn all_reduce(&mut self, bytes: usize, dtype: DType, op: ReduceOp) -> Result<()> {
        match self {
            Self::Group(buffer) => buffer.all_reduce(bytes, dtype, op),
            Self::Views(Views { group, memory, .. }) => {
                group.all_reduce(&mut memory.as_mut_slice()[..bytes], dtype, op)
            }
        }
    }
}

/// Memory that is filled and reduced by one owner and then lent to many readers.
///
/// It is filled again when the last of them is gone; where one stays (a gradient that the user keeps) the next round gets other memory.
#[derive(Debug)]
pub(super) struct Views {
    group: Arc<dyn ProcessGroup>,
    bytes: usize,
    /// Empty while lent.
    memory: HeapBytes,
    lent: Option<Arc<HeapBytes>>,
}

impl Views {
    fn new(group: Arc<dyn ProcessGroup>, bytes: usize) -> Result<Self> {
        let mut views = Self {
            group,
            bytes,
            memory: HeapBytes::default(),
            lent: None,
        };
        views.begin()?;
        Ok(views)
    }

    fn begin(&mut self) -> Result<()> {
        if let Some(memory) = self.lent.take().and_then(Arc::into_inner) {
            self.memory = memory;
        }
        if self.memory.as_slice().len() != self.bytes {
            let memory = HeapBytes::new(self.bytes);
            self.memory = memory.ok_or_else(|| GroupError::Transport {
                rank: self.group.rank(),
                operation: format!("reserving a bucket of {} bytes", self.bytes),
                cause: "out of memory".into(),
            })?;
        }
        Ok(())
    }

    /// What has been reduced.
    pub(super) fn memory(&mut self) -> &mut [u8] {
        self.memory.as_mut_slice()
    }

    /// Ends the writing; what is returned gives tensors that point into the memory.
    pub(super) fn lend(&mut self) -> Lent {
        let memory = Arc::new(std::mem::take(&mut self.memory));
        self.lent = Some(memory.clone());
        Lent(bytes::Bytes::from_owner(Reader(memory)))
    }
}

/// Memory that nobody writes to.
pub(super) struct Lent(bytes::Bytes);

impl Lent {
    /// Bytes that are copied when somebody writes to them.
    pub(super) fn view(&self, range: Range<usize>) -> Bytes {
        Bytes::from_shared(self.0.slice(range), AllocationProperty::Native)
    }
}

struct Reader(Arc<HeapBytes>);

impl AsRef<[u8]> for Reader {
    fn as_ref(&self) -> &[u8] {
        self.0.as_slice()
    }
}
