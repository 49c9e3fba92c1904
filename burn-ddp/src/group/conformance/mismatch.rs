//! Ranks in different operations: an error on all of them, with both sides.

use super::{
    super::{DType, GroupError, OpKind, ReduceOp, Result},
    Group, LONG, Make, bytes, ranks,
};

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
