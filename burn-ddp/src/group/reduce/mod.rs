//! The reductions, element by element and strictly in rank order.
//!
//! One element is `finish(((x0 + x1) + x2) + …)`, whatever the number of ranks and wherever it
//! lies, so that every rank that computes it gets the same bits. Inputs may have any alignment:
//! vector loads do not care, and callers hand in plain bytes.
//!
//! The output is written once, in one pass over memory. Up to four inputs of a native type are
//! combined in registers; more inputs, and the 16-bit floats, go through an accumulator block that
//! stays in the first-level cache.
//!
//! | file | holds |
//! |---|---|
//! | `mod` | all inputs in one place |
//! | `in_place` | one more input into what is there |
//! | `stretches` | inputs that come one after another |
//! | `element` | the element types, and what they are accumulated in |

mod element;
mod in_place;
#[cfg(any(feature = "mpi", test))]
mod stretches;

pub(crate) use in_place::accumulate;
#[cfg(any(feature = "mpi", test))]
pub(crate) use stretches::{accumulator_size, fold_into};

use super::{DType, ReduceOp};
use element::{BLOCK, Element, Number};
use half::{bf16, f16};

/// Calls a function for the element type that `dtype` stands for.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32, 4>($($argument),*),
            DType::F64 => $function::<f64, 8>($($argument),*),
            DType::F16 => $function::<f16, 2>($($argument),*),
            DType::BF16 => $function::<bf16, 2>($($argument),*),
            DType::U8 => $function::<u8, 1>($($argument),*),
            DType::I32 => $function::<i32, 4>($($argument),*),
            DType::I64 => $function::<i64, 8>($($argument),*),
            DType::U64 => $function::<u64, 8>($($argument),*),
        }
    };
}
use by_dtype;

/// Writes the reduction of `inputs`, in their order, to `out`.
///
/// All slices have the same length, a multiple of the element size; `op` is defined for `dtype`
/// (see [`ops`](super::ops), which refuses a mean of integers).
pub(crate) fn reduce_into(out: &mut [u8], inputs: &[&[u8]], dtype: DType, op: ReduceOp) {
    reduce_scaled(out, inputs, dtype, op, inputs.len());
}

/// [`reduce_into`] where a mean divides by `divisor`: some of the ranks, reduced for a mean over all.
pub(crate) fn reduce_scaled(
    out: &mut [u8],
    inputs: &[&[u8]],
    dtype: DType,
    op: ReduceOp,
    divisor: usize,
) {
    debug_assert!(inputs.iter().all(|x| x.len() == out.len()));
    debug_assert!(out.len().is_multiple_of(dtype.size()));
    by_dtype!(dtype, by_op(out, inputs, op, divisor));
}

fn by_op<E: Element<N>, const N: usize>(
    out: &mut [u8],
    inputs: &[&[u8]],
    op: ReduceOp,
    divisor: usize,
) {
    match op {
        ReduceOp::Sum => kernel::<E, N>(out, inputs, E::Acc::add, |x| x),
        ReduceOp::Mean => kernel::<E, N>(out, inputs, E::Acc::add, |x| x.divide(divisor)),
        ReduceOp::Min => kernel::<E, N>(out, inputs, E::Acc::min, |x| x),
        ReduceOp::Max => kernel::<E, N>(out, inputs, E::Acc::max, |x| x),
        ReduceOp::Product => kernel::<E, N>(out, inputs, E::Acc::mul, |x| x),
    }
}

#[inline(always)]
fn kernel<E: Element<N>, const N: usize>(
    out: &mut [u8],
    inputs: &[&[u8]],
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc,
    finish: impl Fn(E::Acc) -> E::Acc,
) {
    if E::IN_REGISTERS {
        let out = out.as_chunks_mut::<N>().0;
        let elements = |k: usize| inputs[k].as_chunks::<N>().0;
        match inputs.len() {
            2 => {
                for ((o, a), b) in out.iter_mut().zip(elements(0)).zip(elements(1)) {
                    *o = E::store(finish(combine(E::load(a), E::load(b))));
                }
                return;
            }
            3 => {
                let inputs = elements(0).iter().zip(elements(1)).zip(elements(2));
                for (o, ((a, b), c)) in out.iter_mut().zip(inputs) {
                    let ab = combine(E::load(a), E::load(b));
                    *o = E::store(finish(combine(ab, E::load(c))));
                }
                return;
            }
            4 => {
                let first = elements(0).iter().zip(elements(1));
                let second = elements(2).iter().zip(elements(3));
                for (o, ((a, b), (c, d))) in out.iter_mut().zip(first.zip(second)) {
                    let abc = combine(combine(E::load(a), E::load(b)), E::load(c));
                    *o = E::store(finish(combine(abc, E::load(d))));
                }
                return;
            }
            _ => {}
        }
    }
    let Some((first, rest)) = inputs.split_first() else {
        return;
    };
    let mut acc = [E::Acc::default(); BLOCK];
    let mut next = [E::Acc::default(); BLOCK];
    for (k, out) in out.chunks_mut(BLOCK * N).enumerate() {
        let range = k * BLOCK * N..k * BLOCK * N + out.len();
        let len = out.len() / N;
        let (acc, next) = (&mut acc[..len], &mut next[..len]);
        E::load_block(&first[range.clone()], acc);
        for input in rest {
            E::load_block(&input[range.clone()], next);
            for (acc, next) in acc.iter_mut().zip(&*next) {
                *acc = combine(*acc, *next);
            }
        }
        for acc in &mut *acc {
            *acc = finish(*acc);
        }
        E::store_block(acc, out);
    }
}

#[cfg(test)]
mod tests;
