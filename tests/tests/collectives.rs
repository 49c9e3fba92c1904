//! Collectives between processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::{
    Ddp, ReduceOp,
    group::{DType, ProcessGroup, WorkQueue},
};
use burn_ddp_tests::ranks;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// `value` in `size` elements, summed over ranks.
fn sum(group: &dyn ProcessGroup, size: usize, value: f32) -> Vec<f32> {
    let mut data = vec![value; size];
    group
        .all_reduce(
            bytemuck::cast_slice_mut(&mut data),
            DType::F32,
            ReduceOp::Sum,
        )
        .unwrap();
    data
}

const SIZES: [usize; 4] = [1, 7, 1024, 3];

#[test]
fn ddp_23_a_thousand_one_after_another() {
    ranks(3).run("ddp_23_a_thousand_one_after_another", |ddp| {
        for step in 0..1000 {
            let size = SIZES[step % 4];
            assert_eq!(
                sum(&**ddp.group(), size, step as f32),
                vec![3.0 * step as f32; size]
            );
        }
    });
}

#[test]
fn ddp_23_fifty_in_flight() {
    ranks(3).run("ddp_23_fifty_in_flight", |ddp| {
        let queue = WorkQueue::new("test-queue").unwrap();
        let submit = |step: usize| {
            let group = ddp.group().clone();
            queue.submit(move || sum(&*group, SIZES[step % 4], step as f32))
        };
        let works: Vec<_> = (0..50).map(submit).collect();
        for (step, work) in works.into_iter().enumerate() {
            assert_eq!(
                work.wait().unwrap(),
                vec![3.0 * step as f32; SIZES[step % 4]]
            );
        }
    });
}

/// The ranks take turns between the groups in different orders; only the order in each group is common.
#[test]
fn ddp_23_two_groups_interleaved() {
    ranks(3).run("ddp_23_two_groups_interleaved", |ddp| {
        let groups: [Arc<dyn ProcessGroup>; 2] = [
            ddp.group().new_group().unwrap(),
            ddp.group().new_group().unwrap(),
        ];
        let queues = [
            WorkQueue::new("test-queue-0").unwrap(),
            WorkQueue::new("test-queue-1").unwrap(),
        ];
        let mut works = Vec::new();
        for step in 0..50 {
            for turn in 0..2 {
                let which = (turn + ddp.rank()) % 2;
                let (group, size) = (groups[which].clone(), SIZES[step % 4]);
                let value = (1000 * which + step) as f32;
                works.push((
                    vec![3.0 * value; size],
                    queues[which].submit(move || sum(&*group, size, value)),
                ));
            }
        }
        for (expected, work) in works {
            assert_eq!(work.wait().unwrap(), expected);
        }
    });
}

/// Ranks 0 and 1 meet in these two operations: both fail at once, and both see both.
fn mismatch(
    test: &str,
    operations: [fn(&dyn ProcessGroup) -> burn_ddp::group::Result<()>; 2],
    sides: [&str; 2],
) {
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let start = Instant::now();
        let error = operations[ddp.rank()](&**ddp.group()).unwrap_err();
        (error.to_string(), start.elapsed())
    });
    for (rank, (ending, result)) in runs.iter().flat_map(|run| run.iter().enumerate()) {
        let (error, elapsed) = result
            .as_ref()
            .unwrap_or_else(|| panic!("rank {rank}: {ending:?}"));
        assert!(error.contains("collectives do not match"), "{error}");
        assert!(sides.iter().all(|side| error.contains(side)), "{error}");
        assert!(*elapsed < Duration::from_secs(5), "{elapsed:?}");
    }
}

#[test]
fn ddp_25_a_sizes_differ() {
    mismatch(
        "ddp_25_a_sizes_differ",
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
        "ddp_25_b_types_differ",
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
        "ddp_25_c_operations_differ",
        [
            |group| group.all_reduce(&mut [0; 32], DType::F32, ReduceOp::Sum),
            |group| group.broadcast(&mut [0; 32], DType::F32, 0),
        ],
        ["all_reduce(sum) of 8 x f32", "broadcast(root 0) of 8 x f32"],
    );
}

/// Each rank would name the run after itself; all use rank 0's name.
#[test]
fn ddp_20_the_run_directory_is_rank_0s() {
    let runs = ranks(3)
        .over("tcp")
        .run("ddp_20_the_run_directory_is_rank_0s", |ddp| {
            ddp.broadcast(format!("run-of-{}", std::process::id()))
                .unwrap()
        });
    for names in runs {
        assert!(names[0].starts_with("run-of-"));
        assert!(names.iter().all(|name| *name == names[0]), "{names:?}");
    }
}
