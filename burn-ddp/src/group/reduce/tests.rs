#![allow(clippy::unwrap_used)]

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
