//! Tensors into slots.

use crate::{
    device::{casts, on_each},
    host::*,
};
use burn_ddp_cuda::kernels::{Bucket, BucketLayout, DType, SLOT_ALIGNMENT, supports};
use cubecl::{CubeDim, client::Client};
use proptest::{prelude::*, test_runner::TestRunner};

/// What should be in a bucket: each tensor's values behind each other, and zeros up to the next slot.
fn expected(dtype: DType, tensors: &[Tensor], scale: f64) -> Vec<f64> {
    let step = SLOT_ALIGNMENT / dtype.size();
    let mut all = Vec::new();
    for tensor in tensors {
        let value = |x: &f64| scaled(tensor.dtype, dtype, *x, scale);
        all.extend(tensor.values().iter().map(value));
        all.resize(all.len().next_multiple_of(step), 0.0);
    }
    all
}

fn check(client: &Client, dtype: DType, tensors: &[Tensor], scale: f64) {
    let bucket = packed(client, dtype, tensors, scale);
    let what = format!("{} -> {dtype} on {}", tensors[0].dtype, client.name());
    let found = contents(client, &bucket);
    assert_same(&found, &expected(dtype, tensors, scale), &what);
}

/// Sizes of dimensions, how far rows are padded, in which order dimensions lie in memory, which repeat, where the tensor
/// begins, and a seed for the values.
type Shape = (Vec<(usize, usize, u8)>, u64, usize, u64);

fn shapes() -> impl Strategy<Value = Shape> {
    // Half of all dimensions suit vectors.
    let size = prop_oneof![1..9_usize, (1..5_usize).prop_map(|n| 4 * n)];
    let dim = (size, 0..4_usize, 0..8_u8);
    let offset = prop_oneof![Just(0_usize), 1..40_usize];
    (
        prop::collection::vec(dim, 0..5),
        any::<u64>(),
        offset,
        any::<u64>(),
    )
}

fn tensor(dtype: DType, (dims, order, offset, seed): &Shape) -> Tensor {
    let mut lying: Vec<_> = (0..dims.len()).collect();
    let mut random = Random(*order);
    if order % 3 != 0 {
        lying.sort_by_key(|_| random.next()); // otherwise row-major
    }
    let mut strides = vec![0; dims.len()];
    let mut distance = 1;
    for &dim in lying.iter().rev() {
        let (n, padding, kind) = dims[dim];
        if kind > 0 {
            strides[dim] = distance;
            distance *= if kind < 4 { n } else { n + padding };
        } // otherwise it repeats
    }
    Tensor {
        memory: Random(*seed).values(dtype, offset + distance.max(1)),
        offset: *offset,
        shape: dims.iter().map(|d| d.0).collect(),
        strides,
        dtype,
    }
}

/// Permuted, sliced, repeating and padded tensors of every type, two to a bucket.
#[test]
fn any_strides_are_read_in_logical_order() {
    on_each(|client| {
        for (from, to) in casts(client) {
            let config = ProptestConfig {
                cases: 24,
                failure_persistence: None,
                ..Default::default()
            };
            TestRunner::new(config)
                .run(&(shapes(), shapes(), any::<bool>()), |(a, b, one)| {
                    let scale = if one { 1.0 } else { 1.0 / 3.0 };
                    check(client, to, &[tensor(from, &a), tensor(from, &b)], scale);
                    Ok(())
                })
                .unwrap();
        }
    });
}

#[test]
fn known_layouts() {
    on_each(|client| {
        let of = |shape: &[usize], strides: &[usize], offset| Tensor {
            memory: Random(7).values(DType::F32, 4000),
            offset,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            dtype: DType::F32,
        };
        let tensors = [
            of(&[6, 4, 8], &[32, 8, 1], 0),
            of(&[8, 4, 6], &[1, 8, 32], 0),  // reversed
            of(&[4, 8], &[24, 1], 48),       // some rows and columns of another
            of(&[5, 12], &[16, 1], 0),       // padded rows
            of(&[5, 12], &[0, 1], 4),        // one row, again and again
            of(&[5, 12], &[1, 0], 0),        // one column
            of(&[3, 7], &[0, 0], 9),         // one value
            of(&[], &[], 3),                 // a scalar
            of(&[1, 1, 5], &[900, 7, 2], 1), // every other value
        ];
        check(client, DType::F32, &tensors, 0.5);
    });
}

#[test]
fn empty_and_single_elements() {
    on_each(|client| {
        for (from, to) in casts(client) {
            let tensors = [0, 1, 0, 2, 127, 128, 129, 0].map(|len| {
                let values = Random(len as u64).values(from, len.max(1));
                Tensor {
                    shape: vec![len],
                    ..Tensor::contiguous(from, values)
                }
            });
            check(client, to, &tensors, 0.25);
            check(client, to, &tensors[1..2], 1.0);
        }
        // A bucket of nothing.
        let nothing = Tensor {
            shape: vec![4, 0],
            strides: vec![0, 1],
            ..Tensor::contiguous(DType::F32, vec![0.0])
        };
        let bucket = packed(client, DType::F32, &[nothing.clone(), nothing], 1.0);
        assert!(bucket.layout().is_empty());
        assert!(slot(client, &bucket, 1).is_empty());
        bucket.wait().unwrap();
    });
}

#[test]
fn infinities_and_nan_arrive() {
    on_each(|client| {
        for (from, to) in casts(client) {
            let special = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 1.0];
            let tensor = Tensor::contiguous(from, special.to_vec());
            let bucket = packed(client, to, std::slice::from_ref(&tensor), 0.5);
            let halves = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 0.5];
            assert_same(
                &slot(client, &bucket, 0),
                &halves,
                &format!("{from} -> {to}"),
            );
        }
    });
}

/// 65504 is the largest f16. What is less than half a step beyond is rounded to it, what is not becomes infinite.
#[test]
fn what_is_too_large_for_f16_becomes_infinite() {
    on_each(|client| {
        if !supports(client, DType::F16) {
            return eprintln!("skipped: no f16");
        }
        let large = [
            65_504.0, 65_519.0, 65_520.0, 1e6, -65_519.0, -65_520.0, 3e38,
        ];
        let tensor = Tensor::contiguous(DType::F32, large.to_vec());
        let bucket = packed(client, DType::F16, &[tensor], 1.0);
        let inf = f64::INFINITY;
        let halves = [65_504.0, 65_504.0, inf, inf, -65_504.0, -inf, inf];
        assert_same(&slot(client, &bucket, 0), &halves, "f32 -> f16");
        assert!(!bucket.norm().unwrap().finite);
    });
}

/// A scale that makes an f16 out of what is none.
#[test]
fn values_are_scaled_before_they_are_cast() {
    on_each(|client| {
        if !supports(client, DType::F16) {
            return eprintln!("skipped: no f16");
        }
        let tensor = Tensor::contiguous(DType::F32, vec![131_072.0, 3.0]);
        let bucket = packed(client, DType::F16, &[tensor], 1.0 / 8.0);
        assert_same(&slot(client, &bucket, 0), &[16_384.0, 0.375], "f32 -> f16");
    });
}

/// 1/3 has other digits in f64 than any f32.
#[test]
fn f64_never_goes_through_f32() {
    on_each(|client| {
        if !supports(client, DType::F64) {
            return eprintln!("skipped: no f64");
        }
        let values = vec![1.0 / 3.0, 1e300, -1e-300, 0.1];
        let tensor = Tensor::contiguous(DType::F64, values.clone());
        let bucket = packed(client, DType::F64, &[tensor], 1.0 / 3.0);
        let thirds: Vec<_> = values.iter().map(|x| x * (1.0 / 3.0)).collect();
        assert_same(&slot(client, &bucket, 0), &thirds, "f64");
    });
}

/// Small tensors share launches, and large and strided ones among them do not: with the same result.
#[test]
fn many_tensors_at_once() {
    on_each(|client| {
        for (from, to) in casts(client) {
            let mut tensors: Vec<_> = [
                3, 64, 0, 1, 256, 70_000, 5, 12, 130, 64, 64, 9, 1, 2, 3, 4, 1000, 36,
            ]
            .iter()
            .map(|&len| Tensor {
                shape: vec![len],
                ..Tensor::contiguous(from, Random(len as u64).values(from, len.max(1)))
            })
            .collect();
            tensors.insert(
                4,
                Tensor {
                    memory: Random(1).values(from, 60),
                    offset: 3,
                    shape: vec![4, 5],
                    strides: vec![1, 9],
                    dtype: from,
                },
            );
            for count in [1, 7, 8, 9, tensors.len()] {
                let tensors = &tensors[..count];
                let mut bucket = empty(client, to, tensors);
                let uploaded: Vec<_> = tensors.iter().map(|t| t.upload(client)).collect();
                let sources: Vec<_> = uploaded.iter().map(|t| t.source()).enumerate().collect();
                bucket.pack_all(&sources, 0.2).unwrap();
                let what = format!("{count} of {from} -> {to}");
                let found = contents(client, &bucket);
                assert_same(&found, &expected(to, tensors, 0.2), &what);
            }
        }
    });
}

/// More elements than one dimension of the grid has units.
#[test]
fn more_than_one_dimension_of_the_grid() {
    on_each(|client| {
        let hardware = &client.properties().hardware;
        let cube = CubeDim::new(client, 1 << 30).num_elems() as usize;
        // Odd, so that there are no vectors.
        let len = (hardware.max_cube_count.0 as usize)
            .saturating_mul(cube)
            .saturating_add(4097)
            | 1;
        let most = client.properties().memory.max_page_size as usize;
        if len > (256 << 20) || len * 4 + SLOT_ALIGNMENT > most {
            return eprintln!("skipped: {len} elements are too many for a test");
        }
        // f32 counts to 2^24.
        let values: Vec<f32> = (0..len).map(|k| (k % (1 << 24)) as f32).collect();
        let handle = client.create_from_slice(bytemuck::cast_slice(&values));
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[len])).unwrap();
        let source = burn_ddp_cuda::kernels::Source {
            handle: &handle,
            shape: &[len],
            strides: &[1],
            dtype: DType::F32,
        };
        bucket.pack(0, &source, -2.0).unwrap();
        let found = client
            .read_one(bucket.unpack(0, DType::F32, 1.0).unwrap())
            .unwrap();
        let found: &[f32] = bytemuck::cast_slice(&found);
        let wrong = found.iter().zip(&values).position(|(x, y)| *x != -2.0 * y);
        assert_eq!((found.len(), wrong), (len, None));
        let norm = bucket.norm().unwrap();
        let sum: f64 = values
            .iter()
            .map(|x| 4.0 * f64::from(*x) * f64::from(*x))
            .sum();
        assert!(norm.finite);
        assert!(
            (norm.sum_of_squares / sum - 1.0).abs() < 1e-5,
            "{norm:?} {sum}"
        );
    });
}

#[test]
fn a_slot_that_is_zeroed_is_zeros() {
    on_each(|client| {
        for dtype in crate::device::dtypes(client) {
            let tensors = [1_usize, 300, 64].map(|len| Tensor::contiguous(dtype, vec![3.0; len]));
            let mut bucket = empty(client, dtype, &tensors);
            bucket.zero(0).unwrap();
            bucket
                .pack(1, &tensors[1].upload(client).source(), 1.0)
                .unwrap();
            bucket.zero(2).unwrap();
            let zeros = [1_usize, 300, 64].map(|len| {
                Tensor::contiguous(dtype, vec![if len == 300 { 3.0 } else { 0.0 }; len])
            });
            assert_same(
                &contents(client, &bucket),
                &expected(dtype, &zeros, 1.0),
                "zeroed",
            );
        }
    });
}
