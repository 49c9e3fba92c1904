//! Reducing one more input into what is there.

use super::{
    super::{DType, ReduceOp},
    by_dtype,
    element::{BLOCK, Element, Number},
};
use half::{bf16, f16};

/// Reduces `more` into `sums`, in this order; a mean divides by `divisor` if there is one, and is a sum if not.
pub(crate) fn accumulate(
    sums: &mut [u8],
    more: &[u8],
    dtype: DType,
    op: ReduceOp,
    divisor: Option<usize>,
) {
    debug_assert!(sums.len() == more.len() && sums.len().is_multiple_of(dtype.size()));
    by_dtype!(dtype, accumulate_by_op(sums, more, op, divisor));
}

fn accumulate_by_op<E: Element<N>, const N: usize>(
    sums: &mut [u8],
    more: &[u8],
    op: ReduceOp,
    divisor: Option<usize>,
) {
    match (op, divisor) {
        (ReduceOp::Sum | ReduceOp::Mean, None) | (ReduceOp::Sum, Some(_)) => {
            in_place::<E, N>(sums, more, E::Acc::add)
        }
        (ReduceOp::Mean, Some(n)) => in_place::<E, N>(sums, more, |x, y| x.add(y).divide(n)),
        (ReduceOp::Min, _) => in_place::<E, N>(sums, more, E::Acc::min),
        (ReduceOp::Max, _) => in_place::<E, N>(sums, more, E::Acc::max),
        (ReduceOp::Product, _) => in_place::<E, N>(sums, more, E::Acc::mul),
    }
}

#[inline(always)]
fn in_place<E: Element<N>, const N: usize>(
    sums: &mut [u8],
    more: &[u8],
    combine: impl Fn(E::Acc, E::Acc) -> E::Acc,
) {
    if E::IN_REGISTERS {
        let sums = sums.as_chunks_mut::<N>().0;
        for (sum, more) in sums.iter_mut().zip(more.as_chunks::<N>().0) {
            *sum = E::store(combine(E::load(sum), E::load(more)));
        }
        return;
    }
    let mut acc = [E::Acc::default(); BLOCK];
    let mut next = [E::Acc::default(); BLOCK];
    for (sums, more) in sums.chunks_mut(BLOCK * N).zip(more.chunks(BLOCK * N)) {
        let (acc, next) = (&mut acc[..more.len() / N], &mut next[..more.len() / N]);
        E::load_block(sums, acc);
        E::load_block(more, next);
        for (acc, next) in acc.iter_mut().zip(&*next) {
            *acc = combine(*acc, *next);
        }
        E::store_block(acc, sums);
    }
}
