//! Norms, and values that are not finite.

use crate::{
    device::{dtypes, on_each},
    host::*,
};
use burn_ddp_cuda::kernels::{DType, Norm};
use cubecl::client::Client;

fn norm(client: &Client, dtype: DType, tensors: &[Tensor]) -> Norm {
    packed(client, dtype, tensors, 1.0).norm().unwrap()
}

/// Small whole numbers have exact sums in any order, and the NaN that were in the padding do not count.
#[test]
fn whole_numbers_are_exact() {
    on_each(|client| {
        for dtype in dtypes(client) {
            let tensors = [1_usize, 3, 130, 0, 1029].map(|len| Tensor {
                shape: vec![len],
                ..Tensor::contiguous(
                    dtype,
                    (0..len.max(1)).map(|k| (k % 7) as f64 - 3.0).collect(),
                )
            });
            let values = tensors.iter().flat_map(Tensor::values);
            let expected = Norm {
                finite: true,
                sum_of_squares: values.map(|x| x * x).sum(),
            };
            assert_eq!(norm(client, dtype, &tensors), expected, "{dtype}");
        }
    });
}

/// Each unit adds few squares, so that the error of f32 sums stays small: 1e-5 of the sum is stated, and 1e-12 for f64.
#[test]
fn sums_of_many_squares() {
    on_each(|client| {
        for dtype in dtypes(client) {
            for len in [1, 1001, 65_536, 1_000_003] {
                let tensor = Tensor::contiguous(dtype, Random(9).ordinary(dtype, len));
                let sum: f64 = tensor.memory.iter().map(|x| x * x).sum();
                let found = norm(client, dtype, &[tensor]);
                let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
                let error = (found.sum_of_squares / sum - 1.0).abs();
                assert!(
                    found.finite && error < tolerance,
                    "{dtype}: {found:?}, expected {sum}"
                );
            }
        }
    });
}

#[test]
fn one_value_that_is_not_finite_is_found_wherever_it_is() {
    on_each(|client| {
        for dtype in dtypes(client) {
            let lens = [5, 2000, 64];
            for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                for (slot, at) in [
                    (0, 0),
                    (0, 4),
                    (1, 0),
                    (1, 1003),
                    (1, 1999),
                    (2, 1),
                    (2, 63),
                ] {
                    let mut tensors = lens.map(|len| Tensor::contiguous(dtype, vec![1.0; len]));
                    tensors[slot].memory[at] = special;
                    let found = norm(client, dtype, &tensors);
                    assert!(!found.finite, "{dtype}: {special} at {at} of slot {slot}");
                    assert!(!found.sum_of_squares.is_finite());
                }
            }
            let ones = lens.map(|len| Tensor::contiguous(dtype, vec![1.0; len]));
            let expected = Norm {
                finite: true,
                sum_of_squares: 2069.0,
            };
            assert_eq!(norm(client, dtype, &ones), expected);
        }
    });
}

/// The largest values are finite, also where their squares are not.
#[test]
fn large_values_are_finite() {
    on_each(|client| {
        for dtype in dtypes(client) {
            let largest = match dtype {
                DType::F32 => f64::from(f32::MAX),
                DType::F64 => f64::MAX,
                DType::F16 => half::f16::MAX.to_f64(),
                DType::BF16 => half::bf16::MAX.to_f64(),
            };
            let tensor = Tensor::contiguous(dtype, vec![largest, -largest, 1.0]);
            let found = norm(client, dtype, &[tensor]);
            assert!(found.finite, "{dtype}");
            if dtype == DType::F16 {
                let sum = 2.0 * 65_504.0 * 65_504.0 + 1.0;
                assert!((found.sum_of_squares / sum - 1.0).abs() < 1e-6);
            } else {
                assert_eq!(found.sum_of_squares, f64::INFINITY, "{dtype}");
            }
        }
    });
}

#[test]
fn nothing_has_norm_zero() {
    on_each(|client| {
        let nothing = Tensor {
            shape: vec![0],
            ..Tensor::contiguous(DType::F32, vec![1.0])
        };
        let expected = Norm {
            finite: true,
            sum_of_squares: 0.0,
        };
        assert_eq!(norm(client, DType::F32, &[nothing]), expected);
    });
}
