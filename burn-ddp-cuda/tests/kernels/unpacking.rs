//! Slots as tensors.

use crate::{
    device::{casts, dtypes, on_each},
    host::*,
};
use burn_ddp_cuda::kernels::DType;

#[test]
fn slots_come_back_in_any_type() {
    on_each(|client| {
        for (of, to) in casts(client) {
            let tensors = [1, 5, 64, 1000, 4097]
                .map(|len| Tensor::contiguous(of, Random(len as u64).values(of, len)));
            let bucket = packed(client, of, &tensors, 1.0);
            for (slot, tensor) in tensors.iter().enumerate() {
                for scale in [1.0, 1.0 / 7.0] {
                    let handle = bucket.unpack(slot, to, scale).unwrap();
                    assert_eq!(handle.size_in_used() as usize, tensor.len() * to.size());
                    let found = decode(to, &client.read_one(handle).unwrap());
                    let expected: Vec<_> = tensor
                        .values()
                        .iter()
                        .map(|x| scaled(of, to, *x, scale))
                        .collect();
                    assert_same(&found, &expected, &format!("slot {slot}, {of} -> {to}"));
                }
            }
        }
    });
}

/// Its memory is the bucket's: at the slot's place, and alive when the bucket is gone.
#[test]
fn without_cast_and_factor_a_slot_is_a_view() {
    on_each(|client| {
        for dtype in dtypes(client) {
            let tensors =
                [3, 200].map(|len| Tensor::contiguous(dtype, Random(1).values(dtype, len)));
            let bucket = packed(client, dtype, &tensors, 1.0);
            let (first, second) = (
                bucket.unpack(0, dtype, 1.0).unwrap(),
                bucket.unpack(1, dtype, 1.0).unwrap(),
            );
            assert_eq!(
                first.clone().binding().memory.id(),
                second.clone().binding().memory.id()
            );
            assert_eq!(
                (first.offset_start, second.offset_start),
                (Some(0), Some(512))
            );
            assert_eq!(
                bucket.layout().range(1),
                Some(512 / dtype.size()..512 / dtype.size() + 200)
            );
            assert!(
                !second.can_mut(),
                "an operation in place would write to the bucket"
            );
            drop((first, bucket));
            let found = decode(dtype, &client.read_one(second).unwrap());
            assert_same(&found, &tensors[1].values(), "view");
        }
    });
}

/// With a cast or a factor it is memory of its own.
#[test]
fn a_cast_slot_is_no_view() {
    on_each(|client| {
        let tensor = Tensor::contiguous(DType::F32, vec![1.0, 2.0, 3.0]);
        let bucket = packed(client, DType::F32, &[tensor], 1.0);
        let halves = bucket.unpack(0, DType::F32, 0.5).unwrap();
        assert!(halves.can_mut());
        assert_same(
            &decode(DType::F32, &client.read_one(halves).unwrap()),
            &[0.5, 1.0, 1.5],
            "halves",
        );
        assert_same(&slot(client, &bucket, 0), &[1.0, 2.0, 3.0], "the bucket");
    });
}
