//! Where the slots of a bucket are.

use super::DType;

/// Slots begin at multiples of so many bytes. It is a multiple of what any runtime demands of the start of a buffer (512 bytes
/// on CUDA, 256 on WebGPU), and a constant, so that ranks whose devices differ agree on the offsets.
pub const SLOT_ALIGNMENT: usize = 512;

/// Where the slots of a bucket are: a function of the element type and of the slots' lengths, and so the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketLayout {
    dtype: DType,
    slots: Vec<Slot>,
    len: usize,
}

/// One slot, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) offset: usize,
    pub(super) len: usize,
    /// Up to the next slot. What is behind `len` is zeros.
    pub(super) padded: usize,
}

impl BucketLayout {
    /// Slots for tensors of so many elements each, one behind the other. A slot may be empty.
    pub fn new(dtype: DType, lens: &[usize]) -> Self {
        let step = SLOT_ALIGNMENT / dtype.size();
        let mut offset = 0_usize;
        let slots = lens
            .iter()
            .map(|&len| {
                // Too long for any device, but not for this arithmetic.
                let padded = len.checked_next_multiple_of(step).unwrap_or(usize::MAX);
                let slot = Slot {
                    offset,
                    len,
                    padded,
                };
                offset = offset.saturating_add(padded);
                slot
            })
            .collect();
        Self {
            dtype,
            slots,
            len: offset,
        }
    }

    /// The bucket's element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Where the values of a slot are, in elements from the bucket's start.
    pub fn range(&self, slot: usize) -> Option<std::ops::Range<usize>> {
        let slot = self.slots.get(slot)?;
        Some(slot.offset..slot.offset.saturating_add(slot.len))
    }

    /// Elements of the whole bucket, with the padding between the slots.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no slot holds anything.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size of the whole bucket in bytes, with the padding between the slots.
    pub fn bytes(&self) -> u64 {
        (self.len as u64).saturating_mul(self.dtype.size() as u64)
    }

    pub(super) fn slot(&self, slot: usize) -> Option<Slot> {
        self.slots.get(slot).copied()
    }
}
