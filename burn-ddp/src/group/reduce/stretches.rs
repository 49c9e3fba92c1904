//! Reductions whose inputs come one after another.

use super::{
    super::{DType, ReduceOp},
    element::{BLOCK, Element, Number},
};
use half::{bf16, f16};

/// Size in bytes of what an element is accumulated in.
pub(crate) fn accumulator_size(dtype: DType) -> usize {
    match dtype {
        DType::F16 | DType::BF16 => 4,
        other => other.size(),
    }
}

/// One stretch of a reduction whose inputs are not all in one place: `carry`, the accumulators of the inputs before (`None` at the first),
/// and then `inputs`.
///
/// `out` gets accumulators again, or after the last stretch, which knows the number of all inputs (`finish`), elements. The
/// bits are those of [`reduce_into`](super::reduce_into) over all inputs.
pub(crate) fn fold_into(
    out: &mut [u8],
    carry: Option<&[u8]>,
    inputs: &[&[u8]],
    dtype: DType,
    op: ReduceOp,
    finish: Option<usize>,
) {
    match dtype {
        DType::F32 => fold::<f32, 4, 4>(out, carry, inputs, op, finish),
        DType::F64 => fold::<f64, 8, 8>(out, carry, inputs, op, finish),
        DType::F16 => fold::<f16, 2, 4>(out, carry, inputs, op, finish),
        DType::BF16 => fold::<bf16, 2, 4>(out, carry, inputs, op, finish),
        DType::U8 => fold::<u8, 1, 1>(out, carry, inputs, op, finish),
        DType::I32 => fold::<i32, 4, 4>(out, carry, inputs, op, finish),
        DType::I64 => fold::<i64, 8, 8>(out, carry, inputs, op, finish),
        DType::U64 => fold::<u64, 8, 8>(out, carry, inputs, op, finish),
    }
}

/// `N` bytes an element, `A` bytes an accumulator.
fn fold<E: Element<N>, const N: usize, const A: usize>(
    out: &mut [u8],
    carry: Option<&[u8]>,
    inputs: &[&[u8]],
    op: ReduceOp,
    finish: Option<usize>,
) where
    E::Acc: Element<A, Acc = E::Acc>,
{
    let mean = (op == ReduceOp::Mean).then_some(finish).flatten();
    let last = finish.is_some();
    match op {
        ReduceOp::Sum => stretch::<E, N, A>(out, carry, inputs, last, E::Acc::add, |x| x),
        ReduceOp::Mean => stretch::<E, N, A>(out, carry, inputs, last, E::Acc::add, |x| {
            mean.map_or(x, |ranks| x.divide(ranks))
        }),
        ReduceOp::Min => stretch::<E, N, A>(out, carry, inputs, last, E::Acc::min, |x| x),
        ReduceOp::Max => stretch::<E, N, A>(out, carry, inputs, last, E::Acc::max, |x| x),
        ReduceOp::Product => stretch::<E, N, A>(out, carry, inputs, last, E::Acc::mul, |x| x),
    }
}

#[inline(always)]
fn stretch<E: Element<N>, const N: usize, const A: usize>(
    out: &mut [u8],
    carry: Option<&[u8]>,
    inputs: &[&[u8]],
    last: bool,
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc,
    finish: impl Fn(E::Acc) -> E::Acc,
) where
    E::Acc: Element<A, Acc = E::Acc>,
{
    let size = if last { N } else { A };
    let mut acc = [E::Acc::default(); BLOCK];
    let mut next = [E::Acc::default(); BLOCK];
    for (k, out) in out.chunks_mut(BLOCK * size).enumerate() {
        let (start, len) = (k * BLOCK, out.len() / size);
        let (acc, next) = (&mut acc[..len], &mut next[..len]);
        let here = start * N..(start + len) * N;
        let mut inputs = inputs.iter();
        if let Some(carry) = carry {
            E::Acc::load_block(&carry[start * A..(start + len) * A], acc);
        } else if let Some(first) = inputs.next() {
            E::load_block(&first[here.clone()], acc);
        }
        for input in inputs {
            E::load_block(&input[here.clone()], next);
            for (acc, next) in acc.iter_mut().zip(&*next) {
                *acc = combine(*acc, *next);
            }
        }
        if last {
            acc.iter_mut().for_each(|acc| *acc = finish(*acc));
            E::store_block(acc, out);
        } else {
            E::Acc::store_block(acc, out);
        }
    }
}
