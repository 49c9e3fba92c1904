//! What the launches of all kernels share.

use cubecl::{calculate_cube_count_elemwise, prelude::*, server::Handle};

/// How many units to launch for an element-wise kernel.
pub(super) struct Launch {
    pub(super) count: CubeCount,
    pub(super) dim: CubeDim,
    pub(super) address: AddressType,
}

impl Launch {
    pub(super) fn new(client: &Client, len: usize, vector: usize) -> Self {
        let units = len / vector;
        let dim = CubeDim::new(client, units);
        Self {
            count: calculate_cube_count_elemwise(client, units, dim),
            dim,
            address: AddressType::from_len(len),
        }
    }
}

/// An argument of a kernel, of so many vectors.
pub(super) fn buffer(handle: Handle, len: usize) -> BufferArg {
    // SAFETY: the callers pass lengths that were checked against the memory: `Source::read` for tensors, the layout for buckets.
    unsafe { BufferArg::from_raw_parts(handle, len) }
}

/// The widest vectors for so many elements one behind the other.
pub(super) fn vectors(client: &Client, size: usize, len: usize) -> usize {
    client
        .io_optimized_vector_sizes(size)
        .filter(|&v| len.is_multiple_of(v))
        .max()
        .unwrap_or(1)
}
