//! The reductions, element by element and strictly in rank order.
//!
//! One element is `finish(((x0 + x1) + x2) + …)`, whatever the number of ranks and wherever it
//! lies, so that every rank that computes it gets the same bits. Inputs may have any alignment:
//! vector loads do not care, and callers hand in plain bytes.
//!
//! The output is written once, in one pass over memory. Up to four inputs of a native type are
//! combined in registers; more inputs, and the 16-bit floats, go through an accumulator block that
//! stays in the first-level cache.

use super::{DType, ReduceOp};
use half::{bf16, f16, slice::HalfFloatSliceExt};

/// Elements of the accumulator block: 4 to 8 KiB, and as much again for the conversion of 16-bit floats.
const BLOCK: usize = 1024;

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

/// Size in bytes of what an element is accumulated in.
#[cfg(any(feature = "mpi", test))]
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
/// bits are those of [`reduce_into`] over all inputs.
#[cfg(any(feature = "mpi", test))]
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
#[cfg(any(feature = "mpi", test))]
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
#[cfg(any(feature = "mpi", test))]
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

/// What elements are accumulated in.
trait Number: Copy + Default {
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn min(self, other: Self) -> Self;
    fn max(self, other: Self) -> Self;
    /// A true division, not a multiplication by the rounded reciprocal.
    fn divide(self, ranks: usize) -> Self;
}

macro_rules! float {
    ($($t:ty)*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self + other }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self * other }
            // `f32::min` would drop a NaN. If `other` is NaN the comparison is false and it is taken.
            #[inline(always)]
            fn min(self, other: Self) -> Self { if self < other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn max(self, other: Self) -> Self { if self > other || self.is_nan() { self } else { other } }
            #[inline(always)]
            fn divide(self, ranks: usize) -> Self { self / ranks as $t }
        }
    )*};
}
float!(f32 f64);

macro_rules! integer {
    ($($t:ty)*) => {$(
        impl Number for $t {
            #[inline(always)]
            fn add(self, other: Self) -> Self { self.wrapping_add(other) }
            #[inline(always)]
            fn mul(self, other: Self) -> Self { self.wrapping_mul(other) }
            #[inline(always)]
            fn min(self, other: Self) -> Self { Ord::min(self, other) }
            #[inline(always)]
            fn max(self, other: Self) -> Self { Ord::max(self, other) }
            // Never reached: `ops` refuses a mean of integers.
            #[inline(always)]
            fn divide(self, _: usize) -> Self { self }
        }
    )*};
}
integer!(u8 i32 i64 u64);

/// An element of `N` bytes.
trait Element<const N: usize> {
    type Acc: Number;
    /// Whether loading is free, so that a block of accumulators would only cost.
    const IN_REGISTERS: bool;

    fn load(bytes: &[u8; N]) -> Self::Acc;
    fn store(value: Self::Acc) -> [u8; N];

    fn load_block(bytes: &[u8], values: &mut [Self::Acc]) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = Self::load(bytes);
        }
    }

    fn store_block(values: &[Self::Acc], bytes: &mut [u8]) {
        for (value, bytes) in values.iter().zip(bytes.as_chunks_mut().0) {
            *bytes = Self::store(*value);
        }
    }
}

macro_rules! native {
    ($($t:ty, $n:literal;)*) => {$(
        impl Element<$n> for $t {
            type Acc = $t;
            const IN_REGISTERS: bool = true;
            #[inline(always)]
            fn load(bytes: &[u8; $n]) -> $t { <$t>::from_ne_bytes(*bytes) }
            #[inline(always)]
            fn store(value: $t) -> [u8; $n] { value.to_ne_bytes() }
        }
    )*};
}
native!(f32, 4; f64, 8; u8, 1; i32, 4; i64, 8; u64, 8;);

impl Element<2> for bf16 {
    type Acc = f32;
    const IN_REGISTERS: bool = true;

    #[inline(always)]
    fn load(bytes: &[u8; 2]) -> f32 {
        f32::from_bits(u32::from(u16::from_ne_bytes(*bytes)) << 16)
    }

    // `bf16::from_f32` without its branch, so that the loop is vectorised. Adding 0x7fff plus the
    // last bit kept rounds to nearest even; a NaN stays one because its quiet bit is set.
    #[inline(always)]
    fn store(value: f32) -> [u8; 2] {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = bits >> 16 | 0x40;
        let bits = if value.is_nan() { nan } else { rounded };
        (bits as u16).to_ne_bytes()
    }
}

impl Element<2> for f16 {
    type Acc = f32;
    // The conversion in software is a tree of branches; whole slices go through F16C or its like.
    const IN_REGISTERS: bool = false;

    fn load(bytes: &[u8; 2]) -> f32 {
        f16::from_ne_bytes(*bytes).to_f32()
    }

    fn store(value: f32) -> [u8; 2] {
        f16::from_f32(value).to_ne_bytes()
    }

    fn load_block(bytes: &[u8], values: &mut [f32]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..values.len()];
        bytemuck::cast_slice_mut::<f16, u8>(halves).copy_from_slice(bytes);
        halves.convert_to_f32_slice(values);
    }

    fn store_block(values: &[f32], bytes: &mut [u8]) {
        let mut halves = [f16::ZERO; BLOCK];
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        bytes.copy_from_slice(bytemuck::cast_slice(halves));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn accumulating_gives_what_reducing_two_gives() {
        fn check<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(a: &[T], b: &[T], dtype: DType) {
            for op in [
                ReduceOp::Sum,
                ReduceOp::Min,
                ReduceOp::Max,
                ReduceOp::Product,
            ] {
                let mut sums = a.to_vec();
                let more = bytemuck::cast_slice(b);
                accumulate(bytemuck::cast_slice_mut(&mut sums), more, dtype, op, None);
                assert_eq!(sums, reduce(&[a, b], dtype, op), "{dtype} {op:?}");
            }
        }
        let a: Vec<f32> = (0..3000).map(|i| i as f32 - 7.5).collect();
        let b: Vec<f32> = (0..3000).map(|i| (i % 11) as f32).collect();
        let half = |x: &[f32]| x.iter().map(|x| f16::from_f32(*x)).collect::<Vec<_>>();
        check(&a, &b, DType::F32);
        check(&half(&a), &half(&b), DType::F16);
        check(&[250u8, 1], &[10, 2], DType::U8);
        // (3 + 5) / 4, and a mean that is left to others to divide.
        let mean = |divisor| {
            let (mut sum, more) = ([3f32], [5f32]);
            let bytes = bytemuck::cast_slice_mut(&mut sum);
            accumulate(
                bytes,
                bytemuck::cast_slice(&more),
                DType::F32,
                ReduceOp::Mean,
                divisor,
            );
            sum[0]
        };
        assert_eq!((mean(Some(4)), mean(None)), (2.0, 8.0));
    }

    fn reduce<T: bytemuck::Pod>(inputs: &[&[T]], dtype: DType, op: ReduceOp) -> Vec<T> {
        let bytes: Vec<&[u8]> = inputs.iter().map(|x| bytemuck::cast_slice(x)).collect();
        let mut out = inputs[0].to_vec();
        reduce_into(bytemuck::cast_slice_mut(&mut out), &bytes, dtype, op);
        out
    }

    #[test]
    fn rank_order_decides_the_bits() {
        // (1e8 + 1) loses the 1, so that ((1e8 + 1) - 1e8) is 0 and ((1e8 - 1e8) + 1) is 1.
        let sum = |x: [f32; 3]| reduce(&[&[x[0]], &[x[1]], &[x[2]]], DType::F32, ReduceOp::Sum)[0];
        assert_eq!(sum([1e8, 1.0, -1e8]), 0.0);
        assert_eq!(sum([1e8, -1e8, 1.0]), 1.0);
    }

    #[test]
    fn every_operation_on_floats() {
        let (a, b, c) = ([6.0f32, -1.0], [3.0, 4.0], [-9.0, 0.5]);
        let run = |op| reduce(&[&a, &b, &c], DType::F32, op);
        assert_eq!(run(ReduceOp::Sum), [0.0, 3.5]);
        assert_eq!(run(ReduceOp::Mean), [0.0, 3.5 / 3.0]);
        assert_eq!(run(ReduceOp::Min), [-9.0, -1.0]);
        assert_eq!(run(ReduceOp::Max), [6.0, 4.0]);
        assert_eq!(run(ReduceOp::Product), [-162.0, -2.0]);
    }

    #[test]
    fn integers_wrap() {
        assert_eq!(reduce(&[&[200u8], &[100]], DType::U8, ReduceOp::Sum), [44]);
        assert_eq!(
            reduce(&[&[i32::MAX], &[1]], DType::I32, ReduceOp::Sum),
            [i32::MIN]
        );
        assert_eq!(
            reduce(&[&[i64::MIN], &[-1]], DType::I64, ReduceOp::Product),
            [i64::MIN]
        );
        assert_eq!(
            reduce(&[&[u64::MAX], &[2], &[0]], DType::U64, ReduceOp::Sum),
            [1]
        );
    }

    #[test]
    fn half_accumulates_in_f32_and_rounds_once() {
        let h = |x: f32| [f16::from_f32(x)];
        // In f16 2048 + 1 is 2048, twice over; in f32 the sum is 2050, which f16 has.
        let sum = reduce(&[&h(2048.0), &h(1.0), &h(1.0)], DType::F16, ReduceOp::Sum);
        assert_eq!(sum, h(2050.0));
        // The sum overflows f16, the mean does not.
        let mean = reduce(&[&h(60000.0), &h(60000.0)], DType::F16, ReduceOp::Mean);
        assert_eq!(mean, h(60000.0));
        let b = |x: f32| [bf16::from_f32(x)];
        // bf16 has 8 bits: 256 + 1 is 256.
        let sum = reduce(&[&b(256.0), &b(1.0), &b(1.0)], DType::BF16, ReduceOp::Sum);
        assert_eq!(sum, b(258.0));
        // 385 / 3: rounded to bf16 first it would be 384 / 3 = 128.
        let mean = reduce(
            &[&b(256.0), &b(128.0), &b(1.0)],
            DType::BF16,
            ReduceOp::Mean,
        );
        assert_eq!(mean, b(128.0));
    }

    #[test]
    fn nan_survives_min_and_max() {
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for at in 0..5 {
                let mut x = [[1.0f32]; 5];
                x[at] = [f32::NAN];
                let inputs: Vec<&[f32]> = x.iter().map(|x| &x[..]).collect();
                assert!(
                    reduce(&inputs, DType::F32, op)[0].is_nan(),
                    "{op} of 5, NaN at {at}"
                );
                assert!(reduce(&[&x[at], &[1.0]], DType::F32, op)[0].is_nan());
                assert!(reduce(&[&[1.0], &x[at]], DType::F32, op)[0].is_nan());
            }
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        // Every upper half, with the lower halves around each rounding boundary.
        let step = if cfg!(miri) { 997 } else { 1 };
        for high in (0..=0xffffu32).step_by(step) {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(high << 16 | low);
                let ours = u16::from_ne_bytes(<bf16 as Element<2>>::store(x));
                assert_eq!(ours, bf16::from_f32(x).to_bits(), "{:08x}", x.to_bits());
            }
        }
    }

    #[test]
    fn any_alignment() {
        let bytes: Vec<u8> = (0..41).collect();
        for shift in 0..4 {
            let x = &bytes[shift..shift + 36];
            let mut out = [0u8; 37];
            reduce_into(&mut out[1..], &[x, x], DType::I32, ReduceOp::Sum);
            for k in 0..9 {
                let word = |b: &[u8]| i32::from_ne_bytes(b[4 * k..4 * k + 4].try_into().unwrap());
                assert_eq!(word(&out[1..]), word(x).wrapping_mul(2));
            }
        }
    }

    /// The definition, one element at a time.
    fn naive(values: &[f32], op: ReduceOp) -> f32 {
        let n = values.len() as f32;
        let folded = values.iter().copied().reduce(|a, b| match op {
            ReduceOp::Sum | ReduceOp::Mean => a + b,
            ReduceOp::Min if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
            ReduceOp::Min => {
                if a < b {
                    a
                } else {
                    b
                }
            }
            ReduceOp::Max => {
                if a > b {
                    a
                } else {
                    b
                }
            }
            ReduceOp::Product => a * b,
        });
        if op == ReduceOp::Mean {
            folded.unwrap() / n
        } else {
            folded.unwrap()
        }
    }

    fn same<T: PartialEq>(a: T, b: T, nan: bool) -> bool {
        a == b || nan
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 64 }))]

        #[test]
        fn agrees_with_the_definition(
            ranks in 1usize..=9,
            len in prop_oneof![0usize..40, 1020usize..1030, Just(3000)],
            seed: u32,
            op in prop_oneof![
                Just(ReduceOp::Sum), Just(ReduceOp::Mean), Just(ReduceOp::Min),
                Just(ReduceOp::Max), Just(ReduceOp::Product)
            ],
        ) {
            // Bits of all kinds: NaN, infinities, subnormals among them.
            let mut state = seed | 1;
            let mut draw = || { state ^= state << 13; state ^= state >> 17; state ^= state << 5; state };
            let bits: Vec<Vec<u32>> = (0..ranks).map(|_| (0..len).map(|_| draw()).collect()).collect();

            let full: Vec<Vec<f32>> = bits.iter().map(|r| r.iter().map(|x| f32::from_bits(*x)).collect()).collect();
            let inputs: Vec<&[f32]> = full.iter().map(|x| &x[..]).collect();
            for (k, x) in reduce(&inputs, DType::F32, op).into_iter().enumerate() {
                let column: Vec<f32> = full.iter().map(|r| r[k]).collect();
                let expected = naive(&column, op);
                prop_assert!(same(x, expected, x.is_nan() && expected.is_nan()), "{x} {expected}");
            }

            // In two stretches, of which the first has at least one input; with the highest bit of every exponent
            // clear, since which of two NaNs a sum keeps is open.
            let tame: Vec<Vec<u32>> = bits.iter().map(|r| r.iter().map(|x| x & 0xbfff_bfff).collect()).collect();
            let first = 1 + seed as usize % ranks;
            let folded = |inputs: &[&[u8]], dtype: DType| {
                let elements = inputs[0].len() / dtype.size();
                let mut carry = vec![0; elements * accumulator_size(dtype)];
                let mut out = inputs[0].to_vec();
                let (before, after) = inputs.split_at(first);
                fold_into(&mut carry, None, before, dtype, op, None);
                fold_into(&mut out, Some(&carry), after, dtype, op, Some(ranks));
                let mut whole = inputs[0].to_vec();
                reduce_into(&mut whole, inputs, dtype, op);
                (out, whole)
            };
            for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                let inputs: Vec<&[u8]> = tame
                    .iter()
                    .map(|r| &bytemuck::cast_slice(r)[..r.len() / 2 * 8])
                    .collect();
                let (out, whole) = folded(&inputs, dtype);
                prop_assert!(out == whole, "{dtype} in stretches of {first} and {}", ranks - first);
            }

            let halves: Vec<Vec<f16>> = bits.iter().map(|r| r.iter().map(|x| f16::from_bits(*x as u16)).collect()).collect();
            let inputs: Vec<&[f16]> = halves.iter().map(|x| &x[..]).collect();
            for (k, x) in reduce(&inputs, DType::F16, op).into_iter().enumerate() {
                let column: Vec<f32> = halves.iter().map(|r| r[k].to_f32()).collect();
                let expected = f16::from_f32(naive(&column, op));
                prop_assert!(same(x, expected, x.is_nan() && expected.is_nan()), "{x} {expected}");
            }

            let brains: Vec<Vec<bf16>> = bits.iter().map(|r| r.iter().map(|x| bf16::from_bits(*x as u16)).collect()).collect();
            let inputs: Vec<&[bf16]> = brains.iter().map(|x| &x[..]).collect();
            for (k, x) in reduce(&inputs, DType::BF16, op).into_iter().enumerate() {
                let column: Vec<f32> = brains.iter().map(|r| r[k].to_f32()).collect();
                let expected = bf16::from_f32(naive(&column, op));
                prop_assert!(same(x, expected, x.is_nan() && expected.is_nan()), "{x} {expected}");
            }

            if op != ReduceOp::Mean {
                let fold = |a: u32, b: u32| match op {
                    ReduceOp::Min => Ord::min(a as i32, b as i32) as u32,
                    ReduceOp::Max => Ord::max(a as i32, b as i32) as u32,
                    ReduceOp::Product => a.wrapping_mul(b),
                    _ => a.wrapping_add(b),
                };
                let inputs: Vec<&[u32]> = bits.iter().map(|x| &x[..]).collect();
                for (k, x) in reduce(&inputs, DType::I32, op).into_iter().enumerate() {
                    prop_assert_eq!(x, bits.iter().map(|r| r[k]).reduce(fold).unwrap());
                }
            }
        }
    }
}
