//! Operations, groups and threads beside each other.

use super::{
    super::{DType, ReduceOp},
    Group, LONG, Make, bytes, ranks,
};

pub(crate) fn barrier_waits_for_all(make: Make<'_>) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let entered = AtomicUsize::new(0);
    let groups = make(3, LONG);
    let here = groups.len();
    ranks(&groups, |g| {
        for round in 1..=200 {
            entered.fetch_add(1, Ordering::SeqCst);
            g.barrier().unwrap();
            assert!(entered.load(Ordering::SeqCst) >= here * round);
        }
    });
    assert_eq!(entered.into_inner(), here * 200);
}

pub(crate) fn ddp_23_back_to_back(make: Make<'_>) {
    ranks(&make(3, LONG), |g| {
        for step in 0..1000 {
            let len = [1, 7, 1024, 3][step % 4];
            let mut x = vec![step as f32; len];
            g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
                .unwrap();
            assert_eq!(x, vec![3.0 * step as f32; len]);
        }
    });
}

pub(crate) fn ddp_23_two_groups_interleaved(make: Make<'_>) {
    ranks(&make(3, LONG), |g| {
        let other = g.new_group().unwrap();
        assert_eq!(
            (other.rank(), other.world_size()),
            (g.rank(), g.world_size())
        );
        let run = |g: &Group, factor: f32| {
            for step in 0..300 {
                let mut x = vec![factor * step as f32; 1 + step % 5];
                g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
                    .unwrap();
                assert_eq!(x, vec![3.0 * factor * step as f32; 1 + step % 5]);
            }
        };
        // Each rank interleaves them as its scheduler likes.
        std::thread::scope(|scope| {
            scope.spawn(|| run(g, 1.0));
            scope.spawn(|| run(&other, -1.0));
        });
    });
}

pub(crate) fn ddp_23_many_groups(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        // Children of two parents, made at the same time on two threads.
        let parent = g.new_group().unwrap();
        let family = |g: &Group, value: f32| {
            for _ in 0..10 {
                let child = g.new_group().unwrap();
                let mut x = [value; 3];
                child
                    .all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
                    .unwrap();
                assert_eq!(x, [2.0 * value; 3]);
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| family(g, 1.0));
            scope.spawn(|| family(&parent, 10.0));
        });
    });
}

pub(crate) fn threads_of_a_rank_take_turns(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        // Equal on all threads, since their order is not fixed.
                        let mut x = [1.0f32; 300];
                        g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
                            .unwrap();
                        assert_eq!(x, [2.0; 300]);
                    }
                });
            }
        });
    });
}
