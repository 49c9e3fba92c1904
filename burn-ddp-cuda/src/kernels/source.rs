//! A tensor to pack: where its values are.

use super::{DType, KernelError};
use cubecl::{client::Client, server::Handle};

/// A tensor on the device: memory, and how to walk through it. The fields are those of a tensor of burn-cubecl.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The memory, beginning at the tensor's first element.
    pub handle: &'a Handle,
    /// The tensor's shape.
    pub shape: &'a [usize],
    /// Distance between neighbours along each dimension, in elements. 0 repeats.
    pub strides: &'a [usize],
    /// The type of the elements.
    pub dtype: DType,
}

/// A [`Source`] that was found to lie within its memory, as the kernels take it.
pub(super) struct Read {
    /// Begins at or before the tensor, where the device can bind a buffer.
    pub(super) handle: Handle,
    /// Where the tensor begins in `handle`, in elements.
    pub(super) shift: usize,
    /// Elements from the beginning of `handle` to the end of the memory.
    pub(super) available: usize,
    /// Elements of the tensor.
    pub(super) len: usize,
    /// Neither dimensions of size 1, nor neighbours that could be one dimension.
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

impl Source<'_> {
    /// Number of elements, `None` where it is beyond what a `usize` counts.
    pub(super) fn len(&self) -> Option<usize> {
        self.shape
            .iter()
            .try_fold(1_usize, |len, &n| len.checked_mul(n))
    }

    pub(super) fn read(&self, client: &Client) -> Result<Read, KernelError> {
        if self.handle.service != client.service_id() {
            return Err(KernelError::OtherDevice { what: "tensor" });
        }
        let alignment = client.properties().memory.alignment.max(1);
        self.within(alignment)
            .ok_or_else(|| KernelError::OutOfBounds {
                shape: self.shape.to_vec(),
                strides: self.strides.to_vec(),
                bytes: self.bytes(),
            })
    }

    /// Size of the memory from the tensor's first element on.
    fn bytes(&self) -> u64 {
        let begin = self.handle.offset_start.unwrap_or(0);
        let behind = self.handle.offset_end.unwrap_or(0);
        self.handle
            .size()
            .saturating_sub(begin)
            .saturating_sub(behind)
    }

    fn within(&self, alignment: u64) -> Option<Read> {
        if self.shape.len() != self.strides.len() {
            return None;
        }
        let size = self.dtype.size();
        let begin = self.handle.offset_start.unwrap_or(0);
        // A device binds buffers at multiples of its alignment only. The kernel steps over what is before the tensor.
        let before = begin % alignment;
        let start = begin - before;
        let end = self
            .handle
            .size()
            .checked_sub(self.handle.offset_end.unwrap_or(0))?;
        let available = usize::try_from(end.checked_sub(start)?).ok()? / size;
        let shift = usize::try_from(before).ok()?;
        if !shift.is_multiple_of(size) {
            return None;
        }
        let shift = shift / size;

        let len = self.len()?;
        if len > 0 {
            let last = self
                .shape
                .iter()
                .zip(self.strides)
                .try_fold(shift, |at, (&n, &stride)| {
                    at.checked_add((n - 1).checked_mul(stride)?)
                })?;
            if last >= available {
                return None;
            }
        }
        let mut handle = self.handle.clone();
        handle.offset_start = Some(start);
        let (shape, strides) = joined(self.shape, self.strides);
        Some(Read {
            handle,
            shift,
            available,
            len,
            shape,
            strides,
        })
    }
}

impl Read {
    /// Whether the values are one behind the other.
    pub(super) fn contiguous(&self) -> bool {
        self.shape.len() == 1 && self.strides[0] == 1
    }

    /// The widest vectors in which the values can be read, of those that `sizes` offers.
    pub(super) fn vector(&self, sizes: impl Iterator<Item = usize>) -> usize {
        let (Some(&n), Some((&stride, outer))) = (self.shape.last(), self.strides.split_last())
        else {
            return 1;
        };
        if stride != 1 {
            return 1;
        }
        sizes
            .filter(|&v| {
                let mut all = outer.iter().chain([&n, &self.shift]);
                all.all(|x| x.is_multiple_of(v))
            })
            .max()
            .unwrap_or(1)
    }
}

/// Fewer dimensions with the same elements in the same order. At least one is left.
fn joined(shape: &[usize], strides: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut dims: Vec<(usize, usize)> = Vec::with_capacity(shape.len());
    for (&n, &stride) in shape.iter().zip(strides) {
        if n == 1 {
            continue;
        }
        match dims.last_mut() {
            Some(last) if Some(last.1) == stride.checked_mul(n) => *last = (last.0 * n, stride),
            _ => dims.push((n, stride)),
        }
    }
    if dims.is_empty() {
        dims.push((1, 1));
    }
    dims.into_iter().unzip()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_are_joined_where_their_elements_follow_each_other() {
        let cases: [[&[usize]; 4]; 8] = [
            [&[], &[], &[1], &[1]],
            [&[1, 1], &[7, 3], &[1], &[1]],
            [&[64, 3, 7, 7], &[147, 49, 7, 1], &[9408], &[1]],
            [&[4, 6], &[8, 1], &[4, 6], &[8, 1]], // padded rows
            [&[6, 4], &[1, 6], &[6, 4], &[1, 6]], // transposed
            [&[5, 2, 3], &[0, 3, 1], &[5, 6], &[0, 1]], // repeated rows
            [&[2, 3, 5], &[0, 0, 1], &[6, 5], &[0, 1]], // repeated twice
            [&[2, 1, 3], &[12, 99, 4], &[6], &[4]], // every fourth
        ];
        for [shape, strides, joined_shape, joined_strides] in cases {
            assert_eq!(
                joined(shape, strides),
                (joined_shape.to_vec(), joined_strides.to_vec()),
                "{shape:?} {strides:?}"
            );
        }
    }
}
