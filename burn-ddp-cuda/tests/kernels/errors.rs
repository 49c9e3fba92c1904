//! What is refused, and how.

use crate::{
    device::{dtypes, on_each},
    host::*,
};
use burn_ddp_cuda::kernels::{Bucket, BucketLayout, DType, KernelError, Source};

fn said<T: std::fmt::Debug>(result: Result<T, KernelError>, error: &str) {
    let found = result.unwrap_err().to_string();
    assert!(found.contains(error), "{found:?} does not say {error:?}");
}

#[test]
fn types_that_the_device_lacks() {
    on_each(|client| {
        let has = dtypes(client);
        assert!(has.contains(&DType::F32));
        for dtype in DType::ALL.into_iter().filter(|d| !has.contains(d)) {
            let what = format!(
                "{} cannot compute with {dtype} on this device",
                client.name()
            );
            said(Bucket::new(client, BucketLayout::new(dtype, &[4])), &what);
            let bucket = packed(
                client,
                DType::F32,
                &[Tensor::contiguous(DType::F32, vec![1.0])],
                1.0,
            );
            said(bucket.unpack(0, dtype, 1.0), &what);
            let tensor = Tensor::contiguous(dtype, vec![1.0]).upload(client);
            let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[1])).unwrap();
            said(bucket.pack(0, &tensor.source(), 1.0), &what);
        }
        if client.name().starts_with("wgpu<wgsl>") {
            assert!(!has.contains(&DType::BF16), "WGSL has got bf16: test it");
        }
    });
}

#[test]
fn f64_is_not_cast() {
    on_each(|client| {
        if !dtypes(client).contains(&DType::F64) {
            return eprintln!("skipped: no f64");
        }
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[1])).unwrap();
        let tensor = Tensor::contiguous(DType::F64, vec![1.0]).upload(client);
        said(
            bucket.pack(0, &tensor.source(), 1.0),
            "f64 is not cast to f32",
        );
        bucket.zero(0).unwrap();
        said(bucket.unpack(0, DType::F64, 1.0), "f32 is not cast to f64");
    });
}

#[test]
fn buckets_that_are_too_large() {
    on_each(|client| {
        let limit = client.properties().memory.max_page_size as usize;
        for len in [limit, usize::MAX / 4, usize::MAX] {
            let layout = BucketLayout::new(DType::F32, &[1, len]);
            said(
                Bucket::new(client, layout),
                &format!("than the {limit} bytes that this device"),
            );
        }
    });
}

#[test]
fn slots_and_tensors_that_do_not_fit() {
    on_each(|client| {
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[6, 4])).unwrap();
        let tensor = Tensor::contiguous(DType::F32, vec![1.0; 6]).upload(client);
        let with = |shape: &'static [usize], strides: &'static [usize]| Source {
            shape,
            strides,
            ..tensor.source()
        };
        said(
            bucket.pack(2, &tensor.source(), 1.0),
            "no slot 2: the bucket has 2",
        );
        said(bucket.zero(2), "no slot 2");
        said(
            bucket.pack(1, &tensor.source(), 1.0),
            "slot 1 holds 4 elements, and the tensor has 6",
        );
        let outside = "does not lie within its 24 bytes";
        said(bucket.pack(0, &with(&[6], &[2]), 1.0), outside);
        said(bucket.pack(0, &with(&[2, 3], &[1]), 1.0), outside);
        said(
            bucket.pack(0, &with(&[2, usize::MAX], &[0, 1]), 1.0),
            outside,
        );
        said(
            bucket.pack(0, &with(&[2, 3], &[usize::MAX, 1]), 1.0),
            outside,
        );
        let sources = [(0, tensor.source()), (1, tensor.source())];
        said(bucket.pack_all(&sources, 1.0), "slot 1 holds 4");
        said(bucket.norm(), "slot 0 has no values yet");
        bucket.pack(0, &with(&[3, 2], &[1, 3]), 1.0).unwrap();
        said(bucket.norm(), "slot 1 has no values yet");
        said(
            bucket.unpack(1, DType::F32, 1.0),
            "slot 1 has no values yet",
        );
        bucket.pack(1, &with(&[2, 2], &[0, 1]), 1.0).unwrap();
        assert_eq!(bucket.norm().unwrap().sum_of_squares, 10.0);
        bucket.check().unwrap();
    });
}

#[test]
fn different_buckets_are_not_added() {
    on_each(|client| {
        let of = |lens: &[usize]| Bucket::new(client, BucketLayout::new(DType::F32, lens)).unwrap();
        said(of(&[3]).add(&of(&[4])), "different layouts");
        said(of(&[3]).add(&of(&[3])), "slot 0 has no values");
        let mut a = of(&[3]);
        a.zero(0).unwrap();
        said(a.add(&of(&[3])), "slot 0 has no values");
    });
}

/// A runtime that is not the bucket's.
#[test]
fn the_memory_of_another_runtime_is_refused() {
    on_each(|client| {
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[1])).unwrap();
        let tensor = Tensor::contiguous(DType::F32, vec![1.0]).upload(client);
        let mut foreign = tensor.handle.clone();
        foreign.service.device.index_id += 1;
        let source = Source {
            handle: &foreign,
            ..tensor.source()
        };
        said(
            bucket.pack(0, &source, 1.0),
            "the tensor is on another device",
        );
    });
}
