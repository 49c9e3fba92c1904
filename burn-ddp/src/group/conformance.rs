//! What every process group must do, as tests over a function that makes one.
//!
//! `suite!(make)` makes the tests of one transport, where
//! `make(world_size, timeout) -> Vec<Arc<dyn ProcessGroup>>` gives the handles of all ranks, or of those that this
//! process has: the others then run the same test in processes of their own. Each rank runs on a thread of its own. Expected values are worked out by hand from the rank numbers; sizes in
//! elements cover nothing, one, fewer than ranks, odd, and (with the transports' small test pieces)
//! many pieces.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::{DType, GroupBuffer, GroupError, OpKind, ProcessGroup, ReduceOp, Result};
use half::{bf16, f16};
use std::{sync::Arc, time::Duration};

pub(crate) type Group = Arc<dyn ProcessGroup>;
pub(crate) type Make<'a> = &'a dyn Fn(usize, Duration) -> Vec<Group>;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);
const SIZES: [usize; 9] = [0, 1, 2, 3, 17, 1000, 1023, 5000, 40_001];

macro_rules! suite {
    ($make:expr) => {
        $crate::group::conformance::cases!([$crate::group::conformance::suite] $make; timeout_names_all_missing);
    };
    // For groups whose ranks do not all hear from one another.
    (partial view: $make:expr) => {
        $crate::group::conformance::cases!([$crate::group::conformance::suite] $make; timeout_names_missing);
    };
    ($make:expr; $($name:ident),*) => {$(
        #[test]
        fn $name() {
            $crate::group::conformance::$name(&$make);
        }
    )*};
}
pub(crate) use suite;

/// `cases!([callback] argument; case)` is `callback!(argument; the name of every case)`; `case` is what a time-out must name.
macro_rules! cases {
    ([$($callback:tt)*] $argument:expr; $timeout:ident) => {
        $($callback)*! { $argument;
            all_reduce_of_every_type, all_reduce_of_every_operation, all_reduce_mean_of_halves,
            broadcast_from_every_root, all_gather_in_rank_order, reduce_scatter_own_block,
            barrier_waits_for_all, group_buffer, group_buffers_of_one_group,
            ddp_23_back_to_back, ddp_23_two_groups_interleaved, ddp_23_many_groups,
            ddp_25_sizes_differ, ddp_25_types_differ, ddp_25_kinds_differ, ddp_25_roots_differ,
            ddp_25_buffers_differ, $timeout, a_monitored_barrier_outlasts_the_limit, abort_ends_every_wait,
            invalid_arguments_leave_the_group_usable, one_rank_is_a_group, threads_of_a_rank_take_turns
        }
    };
}
pub(crate) use cases;

/// Runs `body` as every rank at once and returns what each returned, in rank order.
fn ranks<T: Send>(groups: &[Group], body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = groups
            .iter()
            .map(|g| scope.spawn(move || body(g)))
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("a rank panicked"))
            .collect()
    })
}

fn bytes<T: bytemuck::Pod>(x: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(x)
}

fn check_sum<T: bytemuck::Pod + PartialEq + std::fmt::Debug>(
    g: &Group,
    dtype: DType,
    of: impl Fn(u8) -> T,
) {
    let n = g.world_size() as u8;
    for len in SIZES {
        // Rank r holds r + 1 + k % 5: over n ranks n (n + 1) / 2 + n (k % 5), 30 at most.
        let mut x: Vec<T> = (0..len)
            .map(|k| of(g.rank() as u8 + 1 + (k % 5) as u8))
            .collect();
        g.all_reduce(bytes(&mut x), dtype, ReduceOp::Sum).unwrap();
        for (k, x) in x.into_iter().enumerate() {
            let expected = of(n * (n + 1) / 2 + n * (k % 5) as u8);
            assert_eq!(
                x,
                expected,
                "{dtype}, {len} elements, element {k}, rank {}",
                g.rank()
            );
        }
    }
}

pub(crate) fn all_reduce_of_every_type(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            check_sum(g, DType::F32, f32::from);
            check_sum(g, DType::F64, f64::from);
            check_sum(g, DType::F16, f16::from);
            check_sum(g, DType::BF16, bf16::from);
            check_sum(g, DType::U8, |x| x);
            check_sum(g, DType::I32, i32::from);
            check_sum(g, DType::I64, i64::from);
            check_sum(g, DType::U64, u64::from);
        });
    }
}

pub(crate) fn all_reduce_of_every_operation(make: Make<'_>) {
    ranks(&make(3, LONG), |g| {
        for len in SIZES {
            // Ranks hold 2, 4, 6 times the sign of the position.
            let sign = |k: usize| if k.is_multiple_of(2) { 1.0f32 } else { -1.0 };
            for (op, even, odd) in [
                (ReduceOp::Sum, 12.0, -12.0),
                (ReduceOp::Mean, 4.0, -4.0),
                (ReduceOp::Min, 2.0, -6.0),
                (ReduceOp::Max, 6.0, -2.0),
                (ReduceOp::Product, 48.0, -48.0),
            ] {
                let mut x: Vec<f32> = (0..len)
                    .map(|k| sign(k) * 2.0 * (g.rank() + 1) as f32)
                    .collect();
                g.all_reduce(bytes(&mut x), DType::F32, op).unwrap();
                for (k, x) in x.into_iter().enumerate() {
                    let expected = if k.is_multiple_of(2) { even } else { odd };
                    assert_eq!(x, expected, "{op}, {len} elements, element {k}");
                }
            }
        }
    });
}

pub(crate) fn all_reduce_mean_of_halves(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        // The sum, 120,000, is more than f16 can hold.
        let mut x = vec![f16::from_f32(if g.rank() == 0 { 59_968.0 } else { 60_032.0 }); 3000];
        g.all_reduce(bytes(&mut x), DType::F16, ReduceOp::Mean)
            .unwrap();
        assert_eq!(x, vec![f16::from_f32(60_000.0); 3000]);
    });
}

pub(crate) fn broadcast_from_every_root(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            for root in 0..world_size {
                for len in SIZES {
                    let value = |rank: usize, k: usize| (1000 * rank + k) as i64;
                    let mut x: Vec<i64> = (0..len).map(|k| value(g.rank(), k)).collect();
                    g.broadcast(bytes(&mut x), DType::I64, root).unwrap();
                    let expected: Vec<i64> = (0..len).map(|k| value(root, k)).collect();
                    assert!(
                        x == expected,
                        "root {root}, {len} elements, rank {}",
                        g.rank()
                    );
                }
            }
        });
    }
}

pub(crate) fn all_gather_in_rank_order(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            for len in SIZES {
                let value = |rank: usize, k: usize| (100_000 * rank + k) as f32;
                let send: Vec<f32> = (0..len).map(|k| value(g.rank(), k)).collect();
                let mut recv = vec![-1.0f32; len * world_size];
                g.all_gather(bytemuck::cast_slice(&send), bytes(&mut recv), DType::F32)
                    .unwrap();
                let all = (0..world_size).flat_map(|r| (0..len).map(move |k| value(r, k)));
                assert!(all.eq(recv), "{len} elements, rank {}", g.rank());
            }
        });
    }
}

pub(crate) fn reduce_scatter_own_block(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            let n = world_size as i32;
            for len in SIZES {
                let send: Vec<i32> = (0..len * world_size)
                    .map(|k| (g.rank() + 1) as i32 * k as i32)
                    .collect();
                let mut recv = vec![-1i32; len];
                let (send, out) = (bytemuck::cast_slice(&send), bytes(&mut recv));
                g.reduce_scatter(send, out, DType::I32, ReduceOp::Sum)
                    .unwrap();
                for (k, x) in recv.into_iter().enumerate() {
                    let at = (g.rank() * len + k) as i32;
                    assert_eq!(x, n * (n + 1) / 2 * at, "{len} elements, element {k}");
                }
                let mut recv = vec![-1i32; len];
                g.reduce_scatter(send, bytes(&mut recv), DType::I32, ReduceOp::Max)
                    .unwrap();
                let block = g.rank() * len..(g.rank() + 1) * len;
                assert!(
                    block.map(|at| n * at as i32).eq(recv),
                    "{len} elements, rank {}",
                    g.rank()
                );
            }
        });
    }
}

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

fn fill(buffer: &mut dyn GroupBuffer, len: usize, value: impl Fn(usize) -> f32) {
    let input = &mut buffer.input()[..len * 4];
    for (k, x) in input.as_chunks_mut().0.iter_mut().enumerate() {
        *x = value(k).to_ne_bytes();
    }
}

fn check(buffer: &dyn GroupBuffer, len: usize, value: impl Fn(usize) -> f32) {
    let output = &buffer.output()[..len * 4];
    for (k, x) in output.as_chunks().0.iter().enumerate() {
        assert_eq!(
            f32::from_ne_bytes(*x),
            value(k),
            "{len} elements, element {k}"
        );
    }
}

pub(crate) fn group_buffer(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            let ramp = (world_size * (world_size + 1) / 2) as f32;
            for capacity in [0, 4, 4000, 160_004] {
                let mut buffer = g.buffer(capacity).unwrap();
                assert_eq!(buffer.bytes(), capacity);
                assert_eq!(buffer.input().len(), capacity);
                assert_eq!(buffer.input().as_ptr().align_offset(64), 0);
                assert_eq!(buffer.output().as_ptr().align_offset(64), 0);
                for step in 0..20 {
                    let len = capacity / 4 / (1 + step % 3);
                    let rank = (g.rank() + 1) as f32;
                    fill(&mut *buffer, len, |k| rank * (k % 7) as f32 + step as f32);
                    buffer
                        .all_reduce(len * 4, DType::F32, ReduceOp::Sum)
                        .unwrap();
                    check(&*buffer, len, |k| {
                        ramp * (k % 7) as f32 + (world_size * step) as f32
                    });
                }
                // The result stays while the group goes on.
                let before = buffer.output().to_vec();
                let mut other = vec![1.0f32; 10_000];
                g.all_reduce(bytes(&mut other), DType::F32, ReduceOp::Sum)
                    .unwrap();
                g.barrier().unwrap();
                assert!(before == buffer.output());
            }
        });
    }
}

pub(crate) fn group_buffers_of_one_group(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        let mut a = g.buffer(400).unwrap();
        let mut b = g.buffer(80_000).unwrap();
        for step in 0..50 {
            let step = step as f32;
            fill(&mut *a, 100, |_| step);
            fill(&mut *b, 20_000, |_| 1000.0 + step);
            a.all_reduce(400, DType::F32, ReduceOp::Sum).unwrap();
            let mut c = [-step];
            g.all_reduce(bytes(&mut c), DType::F32, ReduceOp::Sum)
                .unwrap();
            b.all_reduce(80_000, DType::F32, ReduceOp::Sum).unwrap();
            check(&*a, 100, |_| 2.0 * step);
            check(&*b, 20_000, |_| 2000.0 + 2.0 * step);
            assert_eq!(c, [-2.0 * step]);
        }
    });
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

/// Every rank must get `Mismatch` with both sides, and nothing but errors after it.
fn mismatch(
    make: Make<'_>,
    world_size: usize,
    body: impl Fn(&Group) -> Result<()> + Sync,
) -> Vec<GroupError> {
    let groups = make(world_size, LONG);
    let errors = ranks(&groups, |g| body(g).unwrap_err());
    for (g, error) in groups.iter().zip(&errors) {
        let rank = g.rank();
        let GroupError::Mismatch {
            rank: reporter,
            peer,
            ours,
            theirs,
        } = error
        else {
            panic!("rank {rank}: {error}");
        };
        assert_eq!(*reporter, rank);
        assert_ne!(*peer, rank);
        assert_ne!(ours, theirs);
        let text = error.to_string();
        assert!(
            text.contains(&ours.to_string()) && text.contains(&theirs.to_string()),
            "{text}"
        );
    }
    for g in &groups {
        g.barrier().unwrap_err();
        assert!(g.failure().is_some());
    }
    errors
}

pub(crate) fn ddp_25_sizes_differ(make: Make<'_>) {
    for (few, many) in [(8, 16), (0, 1), (20_000, 40_000)] {
        let errors = mismatch(make, 3, |g| {
            let mut x = vec![1.0f32; if g.rank() == 1 { many } else { few }];
            g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
        });
        for error in errors {
            match error {
                GroupError::Mismatch {
                    rank: 0,
                    peer,
                    ours,
                    theirs,
                } => assert_eq!(
                    (peer, ours.count, theirs.count),
                    (1, few as u64, many as u64)
                ),
                _ => continue,
            }
        }
    }
}

pub(crate) fn ddp_25_types_differ(make: Make<'_>) {
    mismatch(make, 2, |g| {
        let dtype = if g.rank() == 0 {
            DType::F32
        } else {
            DType::BF16
        };
        g.all_reduce(&mut [0; 64], dtype, ReduceOp::Sum)
    });
}

pub(crate) fn ddp_25_kinds_differ(make: Make<'_>) {
    let errors = mismatch(make, 2, |g| match g.rank() {
        0 => g.all_reduce(&mut [0; 64], DType::F32, ReduceOp::Sum),
        _ => g.broadcast(&mut [0; 64], DType::F32, 0),
    });
    for error in errors {
        if let GroupError::Mismatch {
            rank: 1,
            ours,
            theirs,
            ..
        } = error
        {
            assert_eq!(ours.kind, OpKind::Broadcast { root: 0 });
            assert_eq!(theirs.kind, OpKind::AllReduce(ReduceOp::Sum));
        }
    }
    mismatch(make, 2, |g| match g.rank() {
        0 => g.all_reduce(&mut [0; 64], DType::F32, ReduceOp::Sum),
        _ => g.all_reduce(&mut [0; 64], DType::F32, ReduceOp::Mean),
    });
    mismatch(make, 2, |g| match g.rank() {
        0 => g.buffer(1 << 20).map(|_| ()),
        _ => g.barrier(),
    });
    mismatch(make, 2, |g| match g.rank() {
        0 => g.new_group().map(|_| ()),
        _ => g.all_gather(&[1; 4000], &mut [0; 8000], DType::U8),
    });
}

pub(crate) fn ddp_25_roots_differ(make: Make<'_>) {
    mismatch(make, 3, |g| {
        g.broadcast(&mut [0; 64], DType::F32, g.rank() % 2)
    });
}

pub(crate) fn ddp_25_buffers_differ(make: Make<'_>) {
    mismatch(make, 2, |g| g.buffer(64 * (1 + g.rank())).map(|_| ()));
    // Equal in size, reduced in different orders.
    mismatch(make, 2, |g| {
        let mut buffers = [g.buffer(64)?, g.buffer(64)?];
        buffers[g.rank()].all_reduce(64, DType::F32, ReduceOp::Sum)
    });
    // A group buffer on one rank, any memory on the other.
    mismatch(make, 2, |g| {
        let mut buffer = g.buffer(64)?;
        match g.rank() {
            0 => buffer.all_reduce(64, DType::F32, ReduceOp::Sum),
            _ => g.all_reduce(&mut [0; 64], DType::F32, ReduceOp::Sum),
        }
    });
}

pub(crate) fn timeout_names_all_missing(make: Make<'_>) {
    for missing in missing_of_timeouts(make) {
        assert_eq!(missing, [1, 3]);
    }
}

pub(crate) fn timeout_names_missing(make: Make<'_>) {
    for missing in missing_of_timeouts(make) {
        assert!(!missing.is_empty() && missing.iter().all(|rank| [1, 3].contains(rank)));
    }
}

/// Ranks 0 and 2 of four come to an operation. Whom they miss, of those that are here and give up first.
fn missing_of_timeouts(make: Make<'_>) -> Vec<Vec<usize>> {
    let groups = make(4, SHORT);
    let everyone = groups.len() == 4;
    let (early, late): (Vec<Group>, Vec<Group>) =
        groups.into_iter().partition(|g| g.rank().is_multiple_of(2));
    let errors = ranks(&early, |g| {
        g.all_reduce(&mut [0; 8], DType::F32, ReduceOp::Sum)
            .unwrap_err()
    });
    let mut first = Vec::new();
    for error in errors {
        match error {
            GroupError::Timeout {
                elapsed,
                missing,
                operation,
                ..
            } => {
                first.push(missing);
                assert!(elapsed >= SHORT);
                assert!(
                    operation.starts_with("all_reduce(sum) of 2 x f32"),
                    "{operation}"
                );
            }
            GroupError::Aborted { .. } => assert!(error.to_string().contains("timed out")),
            other => panic!("{other}"),
        }
    }
    assert!(
        !first.is_empty() || !everyone,
        "one rank is the first to give up"
    );
    // Who comes late learns it at once.
    if early.is_empty() {
        std::thread::sleep(4 * SHORT);
    }
    for g in late {
        let rank = g.rank();
        let error = g
            .all_reduce(&mut [0; 8], DType::F32, ReduceOp::Sum)
            .unwrap_err();
        assert!(
            matches!(error, GroupError::Aborted { rank: reporter, .. } if reporter == rank),
            "{error}"
        );
        assert!(error.to_string().contains("timed out"), "{error}");
    }
    first
}

pub(crate) fn a_monitored_barrier_outlasts_the_limit(make: Make<'_>) {
    let groups = make(3, SHORT);
    ranks(&groups, |g| {
        if g.rank() == 0 {
            std::thread::sleep(SHORT * 3);
        }
        g.monitored_barrier().unwrap();
        // And ends with the job. Not at once: the others may not be out of the first yet.
        if g.rank() == 1 {
            std::thread::sleep(SHORT);
            g.abort("enough");
        }
        let error = g.monitored_barrier().unwrap_err();
        assert!(
            matches!(&error, GroupError::Aborted { origin: 1, reason, .. } if reason == "enough"),
            "{error}"
        );
    });
}

pub(crate) fn abort_ends_every_wait(make: Make<'_>) {
    let groups = make(3, LONG);
    let errors = ranks(&groups, |g| {
        if g.rank() == 1 {
            std::thread::sleep(Duration::from_millis(20));
            g.abort("the disk is full");
            g.abort("not this one");
        }
        g.barrier().unwrap_err()
    });
    for (g, error) in groups.iter().zip(&errors) {
        let GroupError::Aborted {
            rank: reporter,
            origin: 1,
            reason,
            ..
        } = error
        else {
            panic!("{error}")
        };
        assert_eq!((*reporter, reason.as_str()), (g.rank(), "the disk is full"));
    }
    for g in &groups {
        assert!(g.failure().is_some());
        g.all_gather(&[0], &mut [0; 3], DType::U8).unwrap_err();
        g.buffer(64).unwrap_err();
        g.new_group().unwrap_err();
    }
}

pub(crate) fn invalid_arguments_leave_the_group_usable(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        let mut buffer = g.buffer(64).unwrap();
        for refused in [
            g.all_reduce(&mut [0; 6], DType::F32, ReduceOp::Sum),
            g.all_reduce(&mut [0; 8], DType::I32, ReduceOp::Mean),
            g.broadcast(&mut [0; 8], DType::I32, 2),
            g.all_gather(&[0; 4], &mut [0; 4], DType::F32),
            g.reduce_scatter(&[0; 8], &mut [0; 8], DType::F32, ReduceOp::Sum),
            g.reduce_scatter(&[0; 4], &mut [0; 2], DType::F32, ReduceOp::Sum),
            buffer.all_reduce(68, DType::F32, ReduceOp::Sum),
            buffer.all_reduce(usize::MAX - 3, DType::F32, ReduceOp::Sum),
        ] {
            let error = refused.unwrap_err();
            assert!(
                matches!(error, GroupError::InvalidArgument { .. }),
                "{error}"
            );
        }
        assert_eq!(g.failure(), None);
        let mut x = [1.5f32];
        g.all_reduce(bytes(&mut x), DType::F32, ReduceOp::Sum)
            .unwrap();
        assert_eq!(x, [3.0]);
    });
}

pub(crate) fn one_rank_is_a_group(make: Make<'_>) {
    ranks(&make(1, LONG), |group| {
        let mut x = [2.0f32, -3.0];
        for op in [
            ReduceOp::Sum,
            ReduceOp::Mean,
            ReduceOp::Min,
            ReduceOp::Max,
            ReduceOp::Product,
        ] {
            group.all_reduce(bytes(&mut x), DType::F32, op).unwrap();
            assert_eq!(x, [2.0, -3.0], "{op}");
        }
        group.barrier().unwrap();
        assert_eq!((group.rank(), group.world_size()), (0, 1));
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
