//! A bucket has one stream, whatever thread uses it.

use crate::{device::on_each, host::*};
use burn_ddp_cuda::kernels::{Bucket, BucketLayout, DType};
use cubecl_environment::stream::StreamId;
use std::thread;

#[test]
fn other_threads_use_the_stream_of_the_bucket() {
    on_each(|client| {
        let values =
            [1, 500].map(|len| Tensor::contiguous(DType::F32, Random(3).values(DType::F32, len)));
        let uploaded = values.each_ref().map(|t| t.upload(client));
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[1, 500])).unwrap();
        let here = StreamId::current();
        assert_eq!(bucket.stream(), here);
        let views = thread::scope(|s| {
            let fill = || {
                assert_ne!(StreamId::current(), here);
                for (slot, tensor) in uploaded.iter().enumerate() {
                    bucket.pack(slot, &tensor.source(), 0.5).unwrap();
                }
                bucket.wait().unwrap();
                let half = bucket.unpack(0, DType::F32, 2.0).unwrap();
                let views = [0, 1].map(|slot| bucket.unpack(slot, DType::F32, 1.0).unwrap());
                assert_eq!(half.stream, here, "fresh memory too");
                views
            };
            s.spawn(fill).join().unwrap()
        });
        for (view, tensor) in views.into_iter().zip(&values) {
            assert_eq!(view.stream, here);
            let halves: Vec<_> = tensor
                .memory
                .iter()
                .map(|x| f64::from(*x as f32 * 0.5))
                .collect();
            assert_same(
                &decode(DType::F32, &client.read_one(view).unwrap()),
                &halves,
                "view",
            );
        }
    });
}

/// Tensors, and a bucket, of a thread that has its own stream.
#[test]
fn tensors_of_another_stream_are_waited_for() {
    on_each(|client| {
        let values = Tensor::contiguous(DType::F32, Random(4).values(DType::F32, 100_000));
        let (uploaded, other) = thread::scope(|s| {
            let make = || {
                let tensors = std::slice::from_ref(&values);
                (
                    values.upload(client),
                    packed(client, DType::F32, tensors, 2.0),
                )
            };
            s.spawn(make).join().unwrap()
        });
        let mut bucket = Bucket::new(client, BucketLayout::new(DType::F32, &[100_000])).unwrap();
        assert_ne!(uploaded.source().handle.stream, bucket.stream());
        assert_ne!(other.stream(), bucket.stream());
        bucket.pack(0, &uploaded.source(), 1.0).unwrap();
        bucket.add(&other).unwrap();
        let expected: Vec<_> = values
            .memory
            .iter()
            .map(|x| f64::from(*x as f32 + *x as f32 * 2.0))
            .collect();
        assert_same(&slot(client, &bucket, 0), &expected, "three times");
    });
}
