//! Sums of two buckets.

use crate::{
    device::{dtypes, on_each},
    host::*,
};
use burn_ddp_cuda::kernels::DType;

/// f16 and bf16 are added in f32 and rounded once.
#[test]
fn the_sum_of_two_buckets() {
    on_each(|client| {
        for dtype in dtypes(client) {
            let tensors = |seed| {
                [1, 77, 2048, 1_000_001].map(|len| {
                    Tensor::contiguous(dtype, Random(seed + len as u64).values(dtype, len))
                })
            };
            let (a, b) = (tensors(1), tensors(2));
            let mut sum = packed(client, dtype, &a, 1.0);
            let term = packed(client, dtype, &b, 1.0);
            sum.add(&term).unwrap();
            for k in 0..a.len() {
                let each = |(x, y): (&f64, &f64)| match dtype {
                    DType::F64 => x + y,
                    _ => rounded(dtype, f64::from(*x as f32 + *y as f32)),
                };
                let expected: Vec<_> = a[k].memory.iter().zip(&b[k].memory).map(each).collect();
                assert_same(
                    &slot(client, &sum, k),
                    &expected,
                    &format!("{dtype}, slot {k}"),
                );
                assert_same(
                    &slot(client, &term, k),
                    &b[k].memory,
                    "the term is as before",
                );
            }
            // The padding is still zeros: ones would have been counted.
            let ones = [1, 77].map(|len| Tensor::contiguous(dtype, vec![1.0; len]));
            let mut sum = packed(client, dtype, &ones, 1.0);
            sum.add(&packed(client, dtype, &ones, 1.0)).unwrap();
            assert_eq!(sum.norm().unwrap().sum_of_squares, 4.0 * 78.0);
        }
    });
}
