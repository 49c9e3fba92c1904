//! The loader on real ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_ddp::{
    Ddp,
    data::{LoaderBuilder, Tail},
};
use burn_ddp_tests::ranks;

/// The items themselves as a batch.
struct Items;

impl Batcher<u32, Vec<u32>> for Items {
    fn batch(&self, items: Vec<u32>, _: &Device) -> Vec<u32> {
        items
    }
}

/// A loader of the items `0..len`.
fn items(ddp: &Ddp, len: u32) -> LoaderBuilder<u32, Vec<u32>> {
    ddp.loader(InMemDataset::new((0..len).collect()), Items)
}

fn union(shards: &[Vec<u32>]) -> Vec<u32> {
    let mut all = shards.concat();
    all.sort_unstable();
    all
}

#[test]
fn ddp_18_the_epoch_advances_by_itself() {
    let runs = ranks(2).run("ddp_18_the_epoch_advances_by_itself", |ddp| {
        let loader = items(&ddp, 16).batch_size(2).shuffle(7).build().unwrap();
        let pass = || loader.iter().flat_map(Result::unwrap).collect::<Vec<u32>>();
        let epochs = [pass(), pass(), pass()];
        loader.set_epoch(1);
        (epochs, pass())
    });
    for run in runs {
        let (first, second) = (&run[0], &run[1]);
        for epoch in 0..3 {
            assert_eq!(
                union(&[first.0[epoch].clone(), second.0[epoch].clone()]),
                (0..16).collect::<Vec<_>>()
            );
        }
        for (epochs, again) in [first, second] {
            assert!(
                epochs[0] != epochs[1] && epochs[1] != epochs[2] && epochs[0] != epochs[2],
                "{epochs:?}"
            );
            assert_eq!(*again, epochs[1]);
        }
    }
}

#[test]
fn ddp_18_seeds_that_differ() {
    let runs = ranks(2).run("ddp_18_seeds_that_differ", |ddp| {
        let seed = [7, 11][ddp.rank()];
        items(&ddp, 16)
            .shuffle(seed)
            .build()
            .err()
            .unwrap()
            .to_string()
    });
    for error in runs.iter().flatten() {
        assert!(
            error.contains("the shuffling seed is 11 on rank 1 but 7 on rank 0"),
            "{error}"
        );
        assert!(
            error.contains("Every rank must pass the same data set, seed"),
            "{error}"
        );
    }
}

/// Item 0 of 5 is classified wrongly.
#[test]
fn ddp_19_accuracy_does_not_depend_on_padding() {
    let runs = ranks(2).run("ddp_19_accuracy_does_not_depend_on_padding", |ddp| {
        // (right, seen) of this rank: all items, and those that count.
        let score = |tail| {
            let loader = items(&ddp, 5).tail(tail).build().unwrap();
            let (mut all, mut counted) = ([0.0, 0.0], [0.0, 0.0]);
            for batch in loader.iter_marked().map(Result::unwrap) {
                for (i, item) in batch.batch.iter().enumerate() {
                    let right = f64::from(u8::from(*item != 0));
                    all = [all[0] + right, all[1] + 1.0];
                    if i < batch.valid {
                        counted = [counted[0] + right, counted[1] + 1.0];
                    }
                }
            }
            [all, counted].map(|[right, seen]| ddp.sum(right).unwrap() / ddp.sum(seen).unwrap())
        };
        [score(Tail::Exact), score(Tail::Pad)]
    });
    for [exact, pad] in runs.into_iter().flatten() {
        assert_eq!(exact, [0.8, 0.8]);
        // Item 0 is what the padding repeats.
        assert!((pad[0] - 4.0 / 6.0).abs() < 1e-12, "{pad:?}");
        assert_eq!(pad[1], 0.8);
    }
}

/// 1, 2 and 3 items on 4 ranks.
#[test]
fn ddp_19_fewer_items_than_ranks() {
    let runs = ranks(4).run("ddp_19_fewer_items_than_ranks", |ddp| {
        [1, 2, 3].map(|len| {
            [Tail::Pad, Tail::Drop, Tail::Exact].map(|tail| {
                let loader = items(&ddp, len).tail(tail).build().unwrap();
                loader.iter().flat_map(Result::unwrap).collect::<Vec<u32>>()
            })
        })
    });
    for run in runs {
        for len in 1..=3 {
            let shards = |tail: usize| {
                run.iter()
                    .map(|rank| rank[len - 1][tail].clone())
                    .collect::<Vec<_>>()
            };
            let (pad, drop, exact) = (shards(0), shards(1), shards(2));
            assert!(pad.iter().all(|shard| shard.len() == 1), "{pad:?}");
            let mut padded = union(&pad);
            padded.dedup();
            assert_eq!(padded, (0..len as u32).collect::<Vec<_>>());
            assert!(drop.iter().all(Vec::is_empty), "{drop:?}");
            assert_eq!(union(&exact), (0..len as u32).collect::<Vec<_>>());
        }
    }
}

#[test]
fn ddp_01_c_seven_items_on_three_ranks() {
    let runs = ranks(3).run("ddp_01_c_seven_items_on_three_ranks", |ddp| {
        let loader = items(&ddp, 7).batch_size(2).build().unwrap();
        (
            loader.num_batches(),
            loader
                .iter()
                .map(|batch| batch.unwrap().len())
                .collect::<Vec<_>>(),
        )
    });
    for rank in runs.iter().flatten() {
        // One batch of two items on each rank, and one for the seventh item.
        assert_eq!(*rank, (2, vec![2, 1]));
    }
}

#[derive(Module, Debug)]
struct Leaf {
    w: Param<Tensor<1>>,
}

/// One leaf used three times in a concat. With x = rank + 1 its gradient is 1x + 2x + 1x on each rank, 10 in the mean.
#[test]
fn ddp_24_no_gradient_is_lost_between_processes() {
    let runs = ranks(4).run("ddp_24_no_gradient_is_lost_between_processes", |ddp| {
        let device = Device::flex().autodiff();
        let leaf = Leaf {
            w: Param::from_tensor(Tensor::from_data([0.5, -0.5], &device)),
        };
        let model = ddp.wrap(leaf).unwrap();
        let x = (ddp.rank() + 1) as f32;
        let right = (0..300).filter(|_| {
            let w = model.w.val();
            let parts = Tensor::cat(vec![w.clone(), w.clone() * 2.0, w], 0);
            let grads = GradientsParams::from_grads((parts * x).sum().backward(), &model);
            let gradient = grads
                .get::<1>(model.w.id)
                .map(|g| g.into_data().try_to_vec::<f32>().unwrap());
            gradient == Some(vec![10.0, 10.0])
        });
        right.count()
    });
    assert!(runs.iter().flatten().all(|right| *right == 300), "{runs:?}");
}
