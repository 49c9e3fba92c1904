//! Several small tensors in one launch.

use super::{Bucket, DType, launch::buffer, layout::Slot, source::Read};
use cubecl::prelude::*;

/// Tensors per launch. The number is part of the kernel, so it is always the same.
pub(super) const TOGETHER: usize = 8;
/// Cubes per tensor.
const CUBES: usize = 64;

/// Copies up to [`TOGETHER`] contiguous tensors of one type into their slots.
pub(super) fn launch_pack_many(
    bucket: &Bucket,
    several: &[&(Slot, Read)],
    dtype: DType,
    scale: f64,
) {
    let size = dtype.size().max(bucket.dtype().size());
    let vector = several
        .iter()
        .map(|(_, read)| read.vector(bucket.client.io_optimized_vector_sizes(size)))
        .min()
        .unwrap_or(1);
    let (mut offsets, mut ends) = (SequenceArg::new(), SequenceArg::new());
    let mut longest = 0;
    for i in 0..TOGETHER {
        let (place, _) = several[i.min(several.len() - 1)];
        let padded = if i < several.len() { place.padded } else { 0 };
        offsets.push(place.offset / vector);
        ends.push((place.offset + padded) / vector);
        longest = longest.max(padded / vector);
    }
    let dim = CubeDim::new(&bucket.client, longest);
    let cubes = longest.div_ceil(dim.num_elems() as usize).clamp(1, CUBES);
    let count = CubeCount::Static(cubes as u32, TOGETHER as u32, 1);
    let len = bucket.layout().len();
    let address = AddressType::from_len(len);
    let all = buffer(bucket.whole(), len / vector);
    if dtype == DType::F64 {
        pack_many_f64::launch(
            &bucket.client,
            count,
            dim,
            address,
            vector,
            inputs(several, vector),
            all,
            offsets,
            ends,
            scale,
        );
    } else {
        pack_many::launch(
            &bucket.client,
            count,
            dim,
            address,
            vector,
            inputs(several, vector),
            all,
            offsets,
            ends,
            scale as f32,
            [dtype.elem(), bucket.dtype().elem()],
        );
    }
}

/// The tensors. Where there are fewer than the kernel takes, the last is named again, with nothing to do.
fn inputs<T: LaunchArg<RuntimeArg = BufferArg>>(
    several: &[&(Slot, Read)],
    vector: usize,
) -> SequenceArg<T> {
    let mut inputs = SequenceArg::new();
    for i in 0..TOGETHER {
        let (_, read) = several[i.min(several.len() - 1)];
        inputs.push(buffer(read.handle.clone(), read.len / vector));
    }
    inputs
}

/// Each row of the grid copies one tensor.
#[cube(launch, address_type = "dynamic")]
fn pack_many<I: Numeric, O: Numeric, N: Size>(
    inputs: Sequence<Box<[Vector<I, N>]>>,
    bucket: &mut [Vector<O, N>],
    offsets: Sequence<usize>,
    ends: Sequence<usize>,
    scale: f32,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    let count = comptime!(inputs.len());
    let row = CUBE_POS_Y as usize;
    let step = CUBE_COUNT_X as usize * CUBE_DIM as usize;
    let first = CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize;
    #[unroll]
    for i in 0..count {
        if row == i {
            let values = inputs[i].len();
            let offset = offsets[i];
            let len = ends[i] - offset;
            let mut pos = first;
            while pos < len {
                let mut x = Vector::<f32, N>::new(0.0);
                if pos < values {
                    x = Vector::<f32, N>::cast_from(inputs[i][pos]) * Vector::new(scale);
                }
                bucket[offset + pos] = Vector::<O, N>::cast_from(x);
                pos += step;
            }
        }
    }
}

#[cube(launch, address_type = "dynamic")]
fn pack_many_f64<N: Size>(
    inputs: Sequence<Box<[Vector<f64, N>]>>,
    bucket: &mut [Vector<f64, N>],
    offsets: Sequence<usize>,
    ends: Sequence<usize>,
    scale: f64,
) {
    let count = comptime!(inputs.len());
    let row = CUBE_POS_Y as usize;
    let step = CUBE_COUNT_X as usize * CUBE_DIM as usize;
    let first = CUBE_POS_X as usize * CUBE_DIM as usize + UNIT_POS as usize;
    #[unroll]
    for i in 0..count {
        if row == i {
            let values = inputs[i].len();
            let offset = offsets[i];
            let len = ends[i] - offset;
            let mut pos = first;
            while pos < len {
                let mut x = Vector::<f64, N>::new(0.0);
                if pos < values {
                    x = inputs[i][pos] * Vector::new(scale);
                }
                bucket[offset + pos] = x;
                pos += step;
            }
        }
    }
}
