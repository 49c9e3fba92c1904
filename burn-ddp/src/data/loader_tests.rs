#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::{super::MarkedBatch, *};
use crate::group::thread::ThreadGroup;
use burn::data::dataset::{DatasetError, InMemDataset};
use std::{collections::BTreeSet, thread};

/// The items themselves as a batch.
#[derive(Clone)]
struct Items;

impl Batcher<usize, Vec<usize>> for Items {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        items
    }
}

struct PanicsAt(usize);

impl Batcher<usize, Vec<usize>> for PanicsAt {
    fn batch(&self, items: Vec<usize>, _: &Device) -> Vec<usize> {
        assert!(!items.contains(&self.0), "cannot batch item {}", self.0);
        items
    }
}

/// Item 5 cannot be read.
struct Broken;

impl Dataset<usize> for Broken {
    fn get(&self, index: usize) -> Result<usize, DatasetError> {
        if index == 5 {
            return Err(DatasetError::new(std::io::Error::other("bad sector")));
        }
        Ok(index)
    }

    fn len(&self) -> usize {
        9
    }
}

fn numbers(len: usize) -> InMemDataset<usize> {
    InMemDataset::new((0..len).collect())
}

fn single(len: usize) -> LoaderBuilder<usize, Vec<usize>> {
    LoaderBuilder::new(None, numbers(len), Items)
}

/// Builds on every rank of a group of threads.
fn ranks<T: Send>(world: usize, build: impl Fn(Arc<dyn ProcessGroup>) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let groups = ThreadGroup::new(world).into_iter();
        let threads: Vec<_> = groups
            .map(|group| scope.spawn(|| build(Arc::new(group))))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

fn loaders(
    world: usize,
    len: usize,
    batch: usize,
    tail: Tail,
    workers: usize,
) -> Vec<DistributedLoader<Vec<usize>>> {
    ranks(world, |group| {
        LoaderBuilder::new(Some(group), numbers(len), Items)
            .batch_size(batch)
            .shuffle(42)
            .tail(tail)
            .num_workers(workers)
            .build()
            .unwrap()
    })
}

fn pass(loader: &DistributedLoader<Vec<usize>>) -> Vec<Vec<usize>> {
    loader.iter().map(Result::unwrap).collect()
}

#[test]
fn ddp_18_each_epoch_has_its_own_order_without_a_call() {
    for workers in [0, 3] {
        let loaders = loaders(2, 16, 2, Tail::Pad, workers);
        let epochs: Vec<Vec<Vec<Vec<usize>>>> =
            (0..3).map(|_| loaders.iter().map(pass).collect()).collect();
        for epoch in &epochs {
            let mut union: Vec<usize> = epoch.concat().concat();
            union.sort_unstable();
            assert_eq!(union, (0..16).collect::<Vec<_>>());
        }
        assert_ne!(epochs[0], epochs[1]);
        assert_ne!(epochs[0], epochs[2]);
        assert_ne!(epochs[1], epochs[2]);
        for loader in &loaders {
            loader.set_epoch(1);
        }
        let again: Vec<_> = loaders.iter().map(pass).collect();
        assert_eq!(again, epochs[1]);
        // And it goes on from there.
        let again: Vec<_> = loaders.iter().map(pass).collect();
        assert_eq!(again, epochs[2]);
    }
}

#[test]
fn ddp_18_ranks_that_build_differently_all_get_the_same_error() {
    let build = |group: Arc<dyn ProcessGroup>| {
        let rank = group.rank();
        let len = if rank == 2 { 15 } else { 16 };
        let seed = if rank == 1 { 7 } else { 42 };
        let loader = LoaderBuilder::new(Some(group), numbers(len), Items)
            .shuffle(seed)
            .build();
        (rank, loader.err().unwrap())
    };
    for (rank, error) in ranks(3, build) {
        let expected = DataError::Disagreement {
            rank,
            what: "the shuffling seed",
            peer: 1,
            theirs: "7".to_owned(),
            reference: "42".to_owned(),
        };
        assert_eq!(error, expected);
    }
    let build = |group: Arc<dyn ProcessGroup>| {
        let len = group.rank();
        LoaderBuilder::new(Some(group), numbers(len), Items)
            .build()
            .err()
            .unwrap()
            .to_string()
    };
    for text in ranks(2, build) {
        assert!(
            text.contains("the number of items in the data set is 1 on rank 1 but 0 on rank 0"),
            "{text}"
        );
    }
}

#[test]
fn an_empty_data_set_and_an_empty_batch_are_errors() {
    assert_eq!(
        single(0).build().err(),
        Some(DataError::EmptyDataset { rank: 0 })
    );
    assert_eq!(
        single(1).batch_size(0).build().err(),
        Some(DataError::ZeroBatchSize { rank: 0 })
    );
    let build = |group| {
        LoaderBuilder::new(Some(group), numbers(0), Items)
            .build()
            .err()
    };
    let expected = |rank| Some(DataError::EmptyDataset { rank });
    assert_eq!(ranks(2, build), [expected(0), expected(1)]);
}

#[test]
fn ddp_01_seven_items_on_three_ranks_give_equal_numbers_of_batches() {
    for loader in loaders(3, 7, 2, Tail::Pad, 0) {
        assert_eq!(loader.num_batches(), 2);
        assert_eq!(DataLoader::num_items(&loader), 3);
        assert_eq!(
            pass(&loader).iter().map(Vec::len).collect::<Vec<_>>(),
            [2, 1]
        );
    }
}

#[test]
fn ddp_16_two_ranks_with_two_workers_read_every_item_once() {
    let mut union = loaders(2, 20, 3, Tail::Pad, 2)
        .iter()
        .map(pass)
        .collect::<Vec<_>>()
        .concat()
        .concat();
    union.sort_unstable();
    assert_eq!(union, (0..20).collect::<Vec<_>>());
    let odd = loaders(2, 21, 3, Tail::Pad, 2);
    let passes: Vec<_> = odd.iter().map(pass).collect();
    assert_eq!(passes[0].len(), passes[1].len());
    let union = passes.concat().concat();
    assert_eq!(union.len(), 22, "one item repeated");
    assert_eq!(union.into_iter().collect::<BTreeSet<_>>().len(), 21);
}

#[test]
fn the_order_is_the_same_with_any_number_of_workers() {
    let expected = pass(&single(50).batch_size(3).shuffle(1).build().unwrap());
    for workers in [1, 2, 5, 40] {
        let loader = single(50)
            .batch_size(3)
            .shuffle(1)
            .num_workers(workers)
            .build()
            .unwrap();
        assert_eq!(pass(&loader), expected);
    }
}

#[test]
fn ddp_19_padding_is_marked() {
    // Without shuffling: rank 0 has items 0 and 1 and the tail 4, rank 1 has 2 and 3 and item 0 again.
    let marked = ranks(2, |group| {
        let loader = LoaderBuilder::new(Some(group), numbers(5), Items)
            .batch_size(2)
            .build()
            .unwrap();
        loader.iter_marked().map(Result::unwrap).collect::<Vec<_>>()
    });
    let batch = |items: &[usize], valid| MarkedBatch {
        batch: items.to_vec(),
        len: items.len(),
        valid,
    };
    assert_eq!(marked[0], [batch(&[0, 1], 2), batch(&[4], 1)]);
    assert_eq!(marked[1], [batch(&[2, 3], 2), batch(&[0], 0)]);
}

#[test]
fn a_restored_loader_continues_with_the_next_batch() {
    for workers in [0, 2] {
        let build = || {
            single(23)
                .batch_size(4)
                .shuffle(3)
                .num_workers(workers)
                .build()
                .unwrap()
        };
        let loader = build();
        let whole = [pass(&loader), pass(&loader)];
        let loader = build();
        let _ = pass(&loader);
        let mut second = loader.iter();
        assert_eq!(second.next().unwrap().unwrap(), whole[1][0]);
        assert_eq!(second.next().unwrap().unwrap(), whole[1][1]);
        let state = loader.state();
        assert_eq!(
            state,
            LoaderState {
                seed: Some(3),
                epoch: 1,
                cursor: 8
            }
        );
        let resumed = build();
        resumed.restore(&state).unwrap();
        assert_eq!(pass(&resumed), whole[1][2..]);
        assert_eq!(
            resumed.state(),
            LoaderState {
                seed: Some(3),
                epoch: 2,
                cursor: 0
            }
        );
        // After the last batch the epoch is over, also if nobody has asked for the end.
        assert_eq!(second.by_ref().take(4).count(), 4);
        assert_eq!(
            loader.state(),
            LoaderState {
                seed: Some(3),
                epoch: 2,
                cursor: 0
            }
        );
    }
}

#[test]
fn a_state_is_restored_on_another_number_of_ranks() {
    let three = loaders(3, 30, 2, Tail::Pad, 0);
    let mut seen: Vec<usize> = Vec::new();
    for loader in &three {
        seen.extend(
            loader
                .iter()
                .take(3)
                .map(Result::unwrap)
                .collect::<Vec<_>>()
                .concat(),
        );
    }
    let state = three[0].state();
    assert_eq!(state.cursor, 18);
    assert!(three.iter().all(|loader| loader.state() == state));
    for loader in loaders(2, 30, 2, Tail::Pad, 0) {
        loader.restore(&state).unwrap();
        seen.extend(pass(&loader).concat());
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..30).collect::<Vec<_>>());
}

#[test]
fn a_foreign_state_is_refused() {
    let loader = single(8).shuffle(1).build().unwrap();
    let state = LoaderState {
        seed: Some(2),
        epoch: 0,
        cursor: 0,
    };
    assert!(matches!(
        loader.restore(&state),
        Err(DataError::State {
            what: "the shuffling seed",
            ..
        })
    ));
    let state = LoaderState {
        seed: Some(1),
        epoch: 0,
        cursor: 9,
    };
    let text = loader.restore(&state).unwrap_err().to_string();
    assert!(text.contains("is 9 in the state and at most 8"), "{text}");
}

#[test]
fn an_older_pass_does_not_move_the_position() {
    let loader = single(4).build().unwrap();
    let mut old = loader.iter();
    let mut new = loader.iter();
    assert!(new.next().is_some());
    assert_eq!(old.by_ref().count(), 4);
    assert_eq!(
        loader.state(),
        LoaderState {
            seed: None,
            epoch: 1,
            cursor: 1
        }
    );
}

#[test]
fn failures_reach_the_loop_and_end_it() {
    for workers in [1, 2, 3] {
        let loader = LoaderBuilder::new(None, numbers(9), PanicsAt(5))
            .num_workers(workers)
            .build()
            .unwrap();
        let results: Vec<_> = loader.iter().collect();
        assert_eq!(results.len(), 6, "five batches and the error");
        let text = results[5].as_ref().unwrap_err().to_string();
        assert!(
            text.contains("at batch 5") && text.contains("cannot batch item 5"),
            "{text}"
        );
        // The workers are still there; the failed pass has not counted the bad batch.
        assert_eq!(loader.state().cursor, 5);
        assert_eq!(loader.iter().take(5).filter(Result::is_ok).count(), 5);
    }
    for workers in [0, 2] {
        let loader = LoaderBuilder::new(None, Broken, Items)
            .batch_size(2)
            .num_workers(workers)
            .build()
            .unwrap();
        let results: Vec<_> = loader.iter().collect();
        assert_eq!(results.len(), 3);
        assert_eq!(results[2].as_ref().unwrap_err().to_string(), "bad sector");
    }
}

#[test]
fn it_is_a_burn_data_loader() {
    let loader: Arc<dyn DataLoader<Vec<usize>>> =
        Arc::new(single(10).batch_size(2).shuffle(5).build().unwrap());
    let whole: Vec<_> = loader.iter().map(Result::unwrap).collect();
    assert_eq!(loader.num_items(), 10);
    // A slice counts epochs for itself, from where the loader is: epoch 1.
    let rest: Vec<_> = loader.slice(3, 20).iter().map(Result::unwrap).collect();
    let second: Vec<_> = loader.iter().map(Result::unwrap).collect();
    assert_ne!(whole, second);
    assert_eq!(rest.concat(), second.concat()[3..]);
    assert_eq!(loader.slice(3, 20).slice(1, 3).num_items(), 2);
    let mut iter = loader.iter();
    iter.next();
    let progress = iter.progress();
    assert_eq!((progress.items_processed, progress.items_total), (2, 10));
}
