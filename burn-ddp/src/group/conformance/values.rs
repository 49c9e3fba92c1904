//! What comes out.

use super::{
    super::{DType, ReduceOp},
    Group, LONG, Make, SIZES, bytes, ranks,
};
use half::{bf16, f16};

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
