#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use proptest::prelude::*;

fn sampler(len: usize, batch: usize, rank: usize, world: usize, tail: Tail) -> ShardedSampler {
    ShardedSampler::new(len, batch, rank, world, None, tail).unwrap()
}

/// Per rank, its (index, padding) pairs in an unshuffled epoch.
fn shards(len: usize, batch: usize, world: usize, tail: Tail) -> Vec<Vec<(usize, bool)>> {
    (0..world)
        .map(|rank| {
            let shard = sampler(len, batch, rank, world, tail).shard(0, 0);
            shard.iter().map(|s| (s.index, s.padding)).collect()
        })
        .collect()
}

const R: bool = false;
const P: bool = true;

#[test]
fn permutation_never_changes() {
    // From an independent implementation of the documented algorithm (ChaCha8 of RFC 8439's layout
    // with a 64-bit counter, written in Python).
    assert_eq!(permutation(42, 0, 10), [5, 8, 9, 1, 0, 6, 3, 4, 7, 2]);
    assert_eq!(permutation(42, 1, 10), [6, 1, 5, 7, 4, 3, 2, 8, 9, 0]);
    assert_eq!(
        permutation(7, 0, 20),
        [
            11, 5, 6, 13, 8, 3, 10, 9, 1, 12, 18, 17, 15, 2, 7, 4, 16, 19, 0, 14
        ]
    );
}

#[test]
fn ranks_take_blocks_of_each_global_batch() {
    // 8 items, batches of 2 on 2 ranks: global batches 0..4 and 4..8, as one process with batches of 4 has.
    let expected = [
        vec![(0, R), (1, R), (4, R), (5, R)],
        vec![(2, R), (3, R), (6, R), (7, R)],
    ];
    for tail in [Tail::Pad, Tail::Drop, Tail::Exact] {
        assert_eq!(shards(8, 2, 2, tail), expected);
    }
}

#[test]
fn ddp_01_seven_items_on_three_ranks_have_equal_lengths() {
    for (batch, batches) in [(1, 3), (2, 2), (3, 1), (8, 1)] {
        for rank in 0..3 {
            let pad = sampler(7, batch, rank, 3, Tail::Pad);
            assert_eq!(pad.num_batches(0), batches, "batch size {batch}");
            assert_eq!(pad.shard(0, 0).num_batches(), batches);
            assert_eq!(pad.shard(0, 0).len(), 3);
            assert_eq!(sampler(7, batch, rank, 3, Tail::Drop).shard(0, 0).len(), 2);
        }
    }
    // Six items in order of global batches of 3, then one real item and two marked repeats.
    assert_eq!(
        shards(7, 1, 3, Tail::Pad),
        [
            vec![(0, R), (3, R), (6, R)],
            vec![(1, R), (4, R), (0, P)],
            vec![(2, R), (5, R), (1, P)],
        ]
    );
}

#[test]
fn ddp_19_exact_mode_gives_the_accuracy_of_one_process() {
    // Item 0 is wrong, items 1 to 4 are right: 4 / 5. A padded set without marks would say 4 / 6.
    let count = |tail: Tail, with_padding: bool| {
        let all = shards(5, 2, 2, tail).concat();
        let seen: Vec<_> = all
            .iter()
            .filter(|(_, padding)| with_padding || !padding)
            .collect();
        (
            seen.iter().filter(|(index, _)| *index != 0).count(),
            seen.len(),
        )
    };
    assert_eq!(count(Tail::Exact, true), (4, 5));
    assert_eq!(count(Tail::Pad, true), (4, 6));
    assert_eq!(count(Tail::Pad, false), (4, 5));
    assert_eq!(
        shards(5, 2, 2, Tail::Exact),
        [vec![(0, R), (1, R), (4, R)], vec![(2, R), (3, R)]]
    );
}

#[test]
fn ddp_19_fewer_items_than_ranks() {
    assert_eq!(
        shards(1, 2, 4, Tail::Pad),
        [vec![(0, R)], vec![(0, P)], vec![(0, P)], vec![(0, P)]]
    );
    assert_eq!(
        shards(2, 2, 4, Tail::Pad),
        [vec![(0, R)], vec![(1, R)], vec![(0, P)], vec![(1, P)]]
    );
    assert_eq!(
        shards(3, 2, 4, Tail::Pad),
        [vec![(0, R)], vec![(1, R)], vec![(2, R)], vec![(0, P)]]
    );
    for len in 1..=3 {
        assert!(shards(len, 2, 4, Tail::Drop).iter().all(Vec::is_empty));
        assert!(sampler(len, 2, 0, 4, Tail::Drop).is_finished(0));
        let exact = shards(len, 2, 4, Tail::Exact);
        for (rank, shard) in exact.iter().enumerate() {
            let expected = if rank < len { vec![(rank, R)] } else { vec![] };
            assert_eq!(*shard, expected);
        }
    }
}

#[test]
fn wrong_arguments_are_typed_errors() {
    let new =
        |len, batch, rank, world| ShardedSampler::new(len, batch, rank, world, None, Tail::Pad);
    assert_eq!(new(0, 1, 1, 2), Err(DataError::EmptyDataset { rank: 1 }));
    assert_eq!(new(4, 0, 0, 2), Err(DataError::ZeroBatchSize { rank: 0 }));
    assert_eq!(
        new(4, 1, 2, 2),
        Err(DataError::RankOutOfRange {
            rank: 2,
            world_size: 2
        })
    );
    assert!(matches!(
        new(4, usize::MAX, 0, 2),
        Err(DataError::BatchTooLarge { .. })
    ));
}

#[test]
fn an_epoch_can_be_finished_by_other_numbers_of_ranks() {
    // 31 items: 3 ranks take 2 global batches of 6, then 2 ranks take 2 of 4, then 4 ranks the other 11.
    let mut seen = Vec::new();
    let mut cursor = 0;
    for (world, batches) in [(3, 2), (2, 2), (4, usize::MAX)] {
        let mut next = cursor;
        for rank in 0..world {
            let sampler = ShardedSampler::new(31, 2, rank, world, Some(9), Tail::Pad).unwrap();
            let shard = sampler.shard(5, cursor);
            let batches = batches.min(shard.num_batches());
            seen.extend(
                shard
                    .samples(0..batches * 2)
                    .filter(|s| !s.padding)
                    .map(|s| s.index),
            );
            next = shard.cursor_after(batches);
        }
        cursor = next;
        assert_eq!(
            cursor,
            [12, 20, 31][[3, 2, 4].iter().position(|w| *w == world).unwrap()]
        );
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..31).collect::<Vec<_>>());
}

proptest! {
    #[test]
    fn every_mode_keeps_its_promise(
        len in 1usize..200, batch in 1usize..9, world in 1usize..9, seed in any::<Option<u64>>(),
        epoch in any::<u64>(), start in 0usize..200,
    ) {
        let start = start.min(len);
        for tail in [Tail::Pad, Tail::Drop, Tail::Exact] {
            let shards: Vec<Shard> = (0..world)
                .map(|rank| ShardedSampler::new(len, batch, rank, world, seed, tail).unwrap().shard(epoch, start))
                .collect();
            let mut real: Vec<usize> =
                shards.iter().flat_map(|s| s.iter().filter(|s| !s.padding).map(|s| s.index)).collect();
            real.sort_unstable();
            let unique = { let mut u = real.clone(); u.dedup(); u };
            prop_assert_eq!(&unique, &real, "an item twice");
            let left = len - start;
            let lens: Vec<usize> = shards.iter().map(Shard::len).collect();
            match tail {
                Tail::Pad => {
                    prop_assert_eq!(real.len(), left);
                    prop_assert!(lens.iter().all(|l| *l == left.div_ceil(world)));
                    // At most one repeat, and only as a rank's last item.
                    for shard in &shards {
                        let marks: Vec<usize> = shard.iter().enumerate()
                            .filter(|(_, s)| s.padding).map(|(i, _)| i).collect();
                        prop_assert!(marks.is_empty() || marks == [shard.len() - 1]);
                    }
                }
                Tail::Drop => {
                    prop_assert_eq!(real.len(), left / world * world);
                    prop_assert!(lens.iter().all(|l| *l == left / world));
                }
                Tail::Exact => {
                    prop_assert_eq!(real.len(), left);
                    prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 1);
                }
            }
            // What is not the tail equals one process with batches of `batch * world`.
            let one = ShardedSampler::new(len, batch * world, 0, 1, seed, Tail::Exact).unwrap().shard(epoch, start);
            for g in 0..left / (batch * world) {
                let ours: Vec<Sample> =
                    shards.iter().flat_map(|s| s.samples(g * batch..(g + 1) * batch)).collect();
                let theirs: Vec<Sample> = one.samples(g * batch * world..(g + 1) * batch * world).collect();
                prop_assert_eq!(ours, theirs);
            }
        }
    }
}
