//! Strided values to contiguous ones, scaled and cast.

use super::{
    DType,
    launch::{Launch, buffer},
    source::Read,
};
use cubecl::{prelude::*, server::Handle, std::FastDivmod};

/// Copies `read` to the beginning of `output`, and zeros to its rest. `output` is a buffer and its length.
pub(super) fn launch_copy(
    client: &Client,
    read: &Read,
    from: DType,
    (output, len): (Handle, usize),
    to: DType,
    scale: f64,
) {
    if len == 0 {
        return;
    }
    let sizes = client.io_optimized_vector_sizes(from.size().max(to.size()));
    let vector = read.vector(sizes.filter(|&v| len.is_multiple_of(v)));
    let launch = Launch::new(client, len, vector);
    let address = AddressType::from_len(len.max(read.available));
    let input = buffer(read.handle.clone(), read.available / vector);
    let output = buffer(output, len / vector);
    let (mut shape, mut strides) = (SequenceArg::new(), SequenceArg::new());
    if !read.contiguous() {
        for (&n, &stride) in read.shape.iter().zip(&read.strides) {
            shape.push(n);
            strides.push(stride);
        }
    }
    let values = read.len / vector;
    if from == DType::F64 {
        copy_f64::launch(
            client,
            launch.count,
            launch.dim,
            address,
            vector,
            input,
            output,
            shape,
            strides,
            read.shift,
            values,
            scale,
        );
    } else {
        copy::launch(
            client,
            launch.count,
            launch.dim,
            address,
            vector,
            input,
            output,
            shape,
            strides,
            read.shift,
            values,
            scale as f32,
            [from.elem(), to.elem()],
        );
    }
}

/// Where the vector `pos` of a strided tensor is, in vectors. Without dimensions the tensor is contiguous.
#[cube]
fn vector_at<N: Size>(
    pos: usize,
    shape: &Sequence<FastDivmod<usize>>,
    strides: &Sequence<usize>,
    shift: usize,
) -> usize {
    let rank = comptime!(shape.len());
    let width = N::value();
    let mut rest = pos * width;
    let mut at = shift;
    #[unroll]
    for i in 0..rank {
        let dim = comptime!(rank - i - 1);
        if comptime!(dim == 0) {
            at += rest * strides[dim];
        } else {
            let (quotient, coordinate) = shape[dim].div_mod(rest);
            at += coordinate * strides[dim];
            rest = quotient;
        }
    }
    if comptime!(rank == 0) {
        at += rest;
    }
    at / width
}

#[cube(launch, address_type = "dynamic")]
fn copy<I: Numeric, O: Numeric, N: Size>(
    input: &[Vector<I, N>],
    output: &mut [Vector<O, N>],
    shape: Sequence<FastDivmod<usize>>,
    strides: Sequence<usize>,
    shift: usize,
    values: usize,
    scale: f32,
    #[define(I, O)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < output.len() {
        let mut x = Vector::<f32, N>::new(0.0);
        if ABSOLUTE_POS < values {
            let at = vector_at::<N>(ABSOLUTE_POS, &shape, &strides, shift);
            x = Vector::<f32, N>::cast_from(input[at]) * Vector::new(scale);
        }
        output[ABSOLUTE_POS] = Vector::<O, N>::cast_from(x);
    }
}

#[cube(launch, address_type = "dynamic")]
fn copy_f64<N: Size>(
    input: &[Vector<f64, N>],
    output: &mut [Vector<f64, N>],
    shape: Sequence<FastDivmod<usize>>,
    strides: Sequence<usize>,
    shift: usize,
    values: usize,
    scale: f64,
) {
    if ABSOLUTE_POS < output.len() {
        let mut x = Vector::<f64, N>::new(0.0);
        if ABSOLUTE_POS < values {
            let at = vector_at::<N>(ABSOLUTE_POS, &shape, &strides, shift);
            x = input[at] * Vector::new(scale);
        }
        output[ABSOLUTE_POS] = x;
    }
}
