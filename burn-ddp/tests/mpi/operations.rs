//! Collectives of ranks under mpirun: many at once, and mismatches.

use crate::{SOON, errors, ranks, succeed};
use burn::{optim::GradientsParams, prelude::*};
use burn_ddp::{
    ReduceOp,
    group::{DType, ProcessGroup, Result, WorkQueue},
};
use burn_ddp_tests::{models::Scalar, oracle::device};
use std::{thread, time::Instant};

const SIZES: [usize; 4] = [1, 7, 1024, 3];

/// `value` in `size` elements, summed over ranks.
fn sum(group: &dyn ProcessGroup, size: usize, value: f32) -> Result<Vec<f32>> {
    let mut data = vec![value; size];
    let bytes = bytemuck::cast_slice_mut(&mut data);
    group.all_reduce(bytes, DType::F32, ReduceOp::Sum)?;
    Ok(data)
}

#[test]
fn ddp_23_a_thousand_one_after_another() {
    succeed(
        3,
        "operations::ddp_23_a_thousand_one_after_another",
        |ddp| {
            for step in 0..1000 {
                let (size, value) = (SIZES[step % 4], step as f32);
                let sum = sum(&**ddp.group(), size, value)?;
                assert_eq!(sum, vec![3.0 * value; size]);
            }
            Ok(())
        },
    );
}

/// Two groups, in an order of its own on each rank, each with fifty operations waiting.
#[test]
fn ddp_23_fifty_in_flight_in_two_groups() {
    succeed(
        3,
        "operations::ddp_23_fifty_in_flight_in_two_groups",
        |ddp| {
            let groups = [ddp.group().new_group()?, ddp.group().new_group()?];
            let queues = [(); 2].map(|()| WorkQueue::new("test-queue").unwrap());
            let mut works = Vec::new();
            for step in 0..50 {
                for turn in 0..2 {
                    let which = (turn + ddp.rank()) % 2;
                    let (group, size) = (groups[which].clone(), SIZES[step % 4]);
                    let value = (1000 * which + step) as f32;
                    let work = queues[which].submit(move || sum(&*group, size, value));
                    works.push((vec![3.0 * value; size], work));
                }
            }
            for (expected, work) in works {
                assert_eq!(work.wait().unwrap()?, expected);
            }
            Ok(())
        },
    );
}

type Call = fn(&dyn ProcessGroup) -> Result<()>;

/// Ranks 0 and 1 meet in these two operations: both fail at once, and both see both.
fn mismatch(test: &str, calls: [Call; 2], sides: [&str; 2]) {
    let start = Instant::now();
    let run = ranks(2, test, "differ", &[], |ddp, _| {
        Ok(calls[ddp.rank()](&**ddp.group())?)
    });
    let Some(run) = run else { return };
    assert!(!run.success && start.elapsed() < SOON, "{}", run.text);
    let errors = errors(&run);
    assert_eq!(errors.len(), 2, "{}", run.text);
    for error in errors {
        assert!(error.contains("collectives do not match"), "{error}");
        assert!(sides.iter().all(|side| error.contains(side)), "{error}");
    }
}

#[test]
fn ddp_25_a_sizes_differ() {
    mismatch(
        "operations::ddp_25_a_sizes_differ",
        [
            |group| group.all_reduce(&mut [0; 32], DType::F32, ReduceOp::Sum),
            |group| group.all_reduce(&mut [0; 64], DType::F32, ReduceOp::Sum),
        ],
        ["all_reduce(sum) of 8 x f32", "all_reduce(sum) of 16 x f32"],
    );
}

#[test]
fn ddp_25_b_types_differ() {
    mismatch(
        "operations::ddp_25_b_types_differ",
        [
            |group| group.all_reduce(&mut [0; 32], DType::F32, ReduceOp::Sum),
            |group| group.all_reduce(&mut [0; 32], DType::BF16, ReduceOp::Sum),
        ],
        ["all_reduce(sum) of 8 x f32", "all_reduce(sum) of 16 x bf16"],
    );
}

#[test]
fn ddp_25_c_operations_differ() {
    mismatch(
        "operations::ddp_25_c_operations_differ",
        [
            |group| group.all_reduce(&mut [0; 32], DType::F32, ReduceOp::Sum),
            |group| group.broadcast(&mut [0; 32], DType::F32, 0),
        ],
        ["all_reduce(sum) of 8 x f32", "broadcast"],
    );
}

#[test]
fn ddp_25_d_a_metric_between_forward_and_backward() {
    let test = "operations::ddp_25_d_a_metric_between_forward_and_backward";
    succeed(2, test, |ddp| {
        let model = ddp.wrap(Scalar::new(1.0, &device()))?;
        let x = [1.0, 4.0][ddp.rank()];
        let metric = || ddp.mean([10.0, 20.0][ddp.rank()]);
        for _ in 0..3 {
            let loss = model.loss(x);
            let backward = |loss: Tensor<1>| GradientsParams::from_grads(loss.backward(), &model);
            let (grads, mean) = if ddp.is_main() {
                // A rank that blocks here would wait for rank 1, which waits for its gradient.
                thread::scope(|scope| {
                    let mean = scope.spawn(metric);
                    (backward(loss), mean.join().unwrap())
                })
            } else {
                (backward(loss), metric())
            };
            assert_eq!(model.gradient(&grads), Some(2.5));
            assert_eq!(mean?, 15.0);
        }
        Ok(())
    });
}
