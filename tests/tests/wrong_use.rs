//! Wrong use gets a plain error that says what to do, on every rank.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::data::{dataloader::batcher::Batcher, dataset::InMemDataset};
use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn_ddp::Ddp;
use burn_ddp_tests::{assert_says, models::Mlp, ranks};
use std::{thread, time::Duration};

#[test]
fn ddp_27_a_peer_that_is_late_for_an_operation() {
    let runs = ranks(2)
        .timeout(1)
        .watch("ddp_27_a_peer_that_is_late_for_an_operation", || {
            let ddp = Ddp::from_env().unwrap();
            if ddp.rank() == 1 {
                thread::sleep(Duration::from_secs(2));
            }
            ddp.barrier().unwrap_err().to_string()
        });
    for traces in runs {
        let error = traces[0].finished();
        assert_says(
            error,
            &[
                "rank 0: barrier",
                "timed out after ",
                "no answer from rank 1",
                "raise the operation time-out",
            ],
        );
        assert_says(
            traces[1].finished(),
            &["rank 1: ", " because rank 0 ", "timed out"],
        );
    }
}

#[derive(Module, Debug)]
struct Two {
    a: Linear,
    b: Linear,
}

impl Two {
    fn new(out: usize, device: &Device) -> Self {
        Self {
            a: LinearConfig::new(8, 16).init(device),
            b: LinearConfig::new(16, out).init(device),
        }
    }
}

#[derive(Module, Debug)]
struct Three {
    a: Linear,
    b: Linear,
    c: Linear,
}

impl Three {
    fn new(device: &Device) -> Self {
        let Two { a, b } = Two::new(4, device);
        let c = LinearConfig::new(4, 2).init(device);
        Self { a, b, c }
    }
}

/// What each rank's `wrap` says.
fn wrap(
    test: &str,
    wrap: impl Fn(&Ddp, &Device) -> Result<(), burn_ddp::Error>,
) -> Vec<Vec<String>> {
    let runs = ranks(2).watch(test, || {
        let ddp = Ddp::from_env().unwrap();
        wrap(&ddp, &Device::flex().autodiff())
            .unwrap_err()
            .to_string()
    });
    runs.iter()
        .map(|traces| {
            traces
                .iter()
                .map(|trace| trace.finished().clone())
                .collect()
        })
        .collect()
}

#[test]
fn ddp_22_models_of_other_shapes() {
    let told = wrap("ddp_22_models_of_other_shapes", |ddp, device| {
        ddp.wrap(Two::new(4 + ddp.rank(), device)).map(drop)
    });
    for run in told {
        let [ours, theirs] = ["`b.weight` [16, 4] f32", "`b.weight` [16, 5] f32"];
        assert_says(
            &run[0],
            &[
                &format!("rank 0 has {ours}, rank 1 has {theirs}"),
                "Build the same model on every rank",
            ],
        );
        assert_says(
            &run[1],
            &[
                &format!("rank 1 has {theirs}, rank 0 has {ours}"),
                "Build the same model on every rank",
            ],
        );
    }
}

#[test]
fn ddp_22_a_model_with_one_layer_more() {
    let told = wrap(
        "ddp_22_a_model_with_one_layer_more",
        |ddp, device| match ddp.rank() {
            0 => ddp.wrap(Two::new(4, device)).map(drop),
            _ => ddp.wrap(Three::new(device)).map(drop),
        },
    );
    for run in told {
        let [ours, theirs] = ["nothing (the model ends here)", "`c.weight` [4, 2] f32"];
        assert_says(
            &run[0],
            &[&format!("rank 0 has {ours}, rank 1 has {theirs}")],
        );
        assert_says(
            &run[1],
            &[&format!("rank 1 has {theirs}, rank 0 has {ours}")],
        );
    }
}

#[derive(Module, Debug)]
struct Scaled {
    factor: f64,
}

impl Reparameterization for Scaled {
    const NAME: &'static str = "scaled";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        base * self.factor
    }
}

/// Scales `b.weight`, whose base stays trainable or not.
struct ScaleOne {
    trainable: bool,
}

impl Reparameterizer for ScaleOne {
    type Reparam = Scaled;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Scaled>) {
        if path != "b.weight" {
            return (param, None);
        }
        (
            param.set_require_grad(self.trainable),
            Some(Scaled { factor: 0.5 }),
        )
    }
}

#[test]
fn foreign_reparameterization_with_a_trainable_base() {
    let told = wrap(
        "foreign_reparameterization_with_a_trainable_base",
        |ddp, device| {
            let frozen = Mlp::new(device).apply_reparameterization(ScaleOne { trainable: false });
            ddp.wrap(frozen).expect("a frozen base is fine");
            let trainable = Mlp::new(device).apply_reparameterization(ScaleOne { trainable: true });
            ddp.wrap(trainable).map(drop)
        },
    );
    for error in told.iter().flatten() {
        assert_says(
            error,
            &[
                "`b.weight` is trainable and carries a reparameterization of its own",
                "Freeze the base",
            ],
        );
    }
}

#[test]
fn nothing_to_train() {
    let told = wrap("nothing_to_train", |ddp, _| {
        ddp.wrap(Mlp::new(&Device::flex())).map(drop)
    });
    for error in told.iter().flatten() {
        assert_says(error, &["no trainable parameter", "`device.autodiff()`"]);
    }
}

struct Count;

impl Batcher<u32, usize> for Count {
    fn batch(&self, items: Vec<u32>, _: &Device) -> usize {
        items.len()
    }
}

#[test]
fn ddp_19_an_empty_data_set() {
    let runs = ranks(2).run("ddp_19_an_empty_data_set", |ddp| {
        let told = |len: usize| {
            let loader = ddp.loader(InMemDataset::new(vec![0; len]), Count).build();
            loader.err().unwrap().to_string()
        };
        [told(0), told(4 * (1 - ddp.rank()))]
    });
    for run in runs {
        for (rank, [both, one]) in run.iter().enumerate() {
            assert_says(
                both,
                &[&format!(
                    "rank {rank}: the data set is empty; a loader needs at least one item"
                )],
            );
            assert_says(
                one,
                &["the number of items in the data set is 0 on rank 1 but 4 on rank 0"],
            );
        }
    }
}
