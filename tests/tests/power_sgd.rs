//! PowerSGD in training: values that one process reaches, and bits that do not change with what should not matter.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    module::{ModuleMapper, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use burn_ddp::{Ddp, NonFinitePolicy, PowerSgdHook, Reduction, WrapConfig, train::Snapshot};
use burn_ddp_tests::{
    models::TwoHeads,
    oracle::{
        assert_close, assert_same_bits, at, batch, device, fingerprint, gradients, load,
        parameters, square,
    },
    ranks,
};
use std::{path::PathBuf, sync::Arc};

const DIR: &str = "BURN_DDP_TEST_DIR";

/// `body` (of 32 x 32) and a head that is too small to be compressed.
#[derive(Module, Debug)]
struct Net {
    body: Linear,
    head: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = |n| LinearConfig::new(32, n).init(device);
        Self {
            body: linear(32),
            head: linear(2),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.body.forward(x).tanh())
    }
}

/// The mean loss over this rank's `rows` of the batch of step `step`.
fn loss(model: &Net, step: u64, rank: usize, rows: usize) -> Tensor<1> {
    let x = batch(step, rank * rows..(rank + 1) * rows, [0, 32], &device());
    square(model.forward(x))
}

fn hooked(ddp: &Ddp, model: Net, hook: PowerSgdHook) -> (Net, Arc<PowerSgdHook>) {
    let hook = Arc::new(hook);
    let config = WrapConfig::new().comm_hook(hook.clone());
    (ddp.wrap_with(model, config).unwrap(), hook)
}

/// Each rank has the weights of rank 0.
fn steps(ddp: &Ddp, mut model: Net, range: std::ops::Range<u64>, rows: usize) -> Net {
    let mut optim = SgdConfig::new().init();
    for step in range {
        let grads = loss(&model, step, ddp.rank(), rows).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        model = optim.step(0.5, model, grads);
        assert_same_bits(ddp, &model);
    }
    model
}

#[test]
fn ddp_40_full_rank_is_the_plain_reduction() {
    let runs = ranks(2).run("ddp_40_full_rank_is_the_plain_reduction", |ddp: Ddp| {
        let full = PowerSgdHook::new(32).min_compression_rate(0.0);
        let (model, _) = hooked(&ddp, Net::new(&device()), full);
        let start = parameters(&model);
        let grads = loss(&model, 0, ddp.rank(), 32).backward();
        let first = gradients(&model, &GradientsParams::from_grads(grads, &model));
        (
            start,
            first,
            parameters(&steps(&ddp, model.clone(), 1..6, 32)),
        )
    });
    for (start, first, last) in runs.iter().flatten() {
        let mut model = load(Net::new(&device()), start);
        let whole = |model: &Net, step| {
            GradientsParams::from_grads(loss(model, step, 0, 64).backward(), model)
        };
        assert_close(first, &gradients(&model, &whole(&model, 0)), 1e-4);
        let mut optim = SgdConfig::new().init();
        for step in 1..6 {
            let grads = whole(&model, step);
            model = optim.step(0.5, model, grads);
        }
        assert_close(last, &parameters(&model), 1e-4);
    }
}

#[test]
fn ddp_40_a_vector_is_sent_as_it_is_and_a_matrix_is_not() {
    let runs = ranks(2).run(
        "ddp_40_a_vector_is_sent_as_it_is_and_a_matrix_is_not",
        |ddp: Ddp| {
            let (model, _) = hooked(&ddp, Net::new(&device()), PowerSgdHook::new(4));
            let grads = loss(&model, 0, ddp.rank(), 32).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            let stats = ddp.stats();
            (parameters(&model), gradients(&model, &grads), stats.buckets)
        },
    );
    for (start, reduced, _) in runs.iter().flatten() {
        let model = load(Net::new(&device()), start);
        let grads = GradientsParams::from_grads(loss(&model, 0, 0, 64).backward(), &model);
        let whole = gradients(&model, &grads);
        let only = |path: &str, of: &Vec<(String, Vec<f32>)>| {
            vec![(path.to_string(), at(of, path).unwrap().to_vec())]
        };
        for path in ["body.bias", "head.weight", "head.bias"] {
            assert_close(&only(path, reduced), &only(path, &whole), 1e-6);
        }
        let difference: f32 = at(reduced, "body.weight")
            .unwrap()
            .iter()
            .zip(at(&whole, "body.weight").unwrap())
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(difference > 1e-5, "{difference}");
    }
}

#[test]
fn ddp_40_a_checkpoint_holds_the_error_memory() {
    let dir = tempfile::tempdir().unwrap();
    let test = "ddp_40_a_checkpoint_holds_the_error_memory";
    let runs = ranks(2)
        .env(DIR, dir.path().to_str().unwrap())
        .run(test, |ddp: Ddp| {
            let root = PathBuf::from(std::env::var_os(DIR).unwrap());
            let checkpoints = ddp.checkpoints(root.join(ddp.group().transport()));
            let (model, hook) = hooked(&ddp, Net::new(&device()), PowerSgdHook::new(4));
            let model = steps(&ddp, model, 0..5, 8);
            let snapshot = Snapshot::new()
                .model("model", &model)
                .power_sgd("hook", &hook);
            checkpoints.save(5, snapshot).unwrap();
            let through = fingerprint(&steps(&ddp, model, 5..10, 8));

            let resume = |with_hook: bool| {
                let saved = checkpoints.load().unwrap().unwrap();
                let hook = PowerSgdHook::new(4);
                if with_hook {
                    saved.power_sgd("hook", &hook).unwrap();
                }
                let model = saved.model("model", Net::new(&device())).unwrap();
                let (model, _) = hooked(&ddp, model, hook);
                steps(&ddp, model, 5..10, 8)
            };
            let resumed = resume(true);
            assert_eq!(fingerprint(&resumed), through);
            assert_ne!(fingerprint(&resume(false)), through, "it matters");
            parameters(&resumed)
        });
    // Four ranks go on with what two have saved, on the same whole batches.
    let four = ranks(4)
        .named("four")
        .env(DIR, dir.path().to_str().unwrap())
        .run(test, |ddp: Ddp| {
            let root = PathBuf::from(std::env::var_os(DIR).unwrap());
            let checkpoints = ddp.checkpoints(root.join(ddp.group().transport()));
            let saved = checkpoints.load().unwrap().unwrap();
            let hook = PowerSgdHook::new(4);
            saved.power_sgd("hook", &hook).unwrap();
            let model = saved.model("model", Net::new(&device())).unwrap();
            let (model, _) = hooked(&ddp, model, hook);
            parameters(&steps(&ddp, model, 5..10, 4))
        });
    for (two, four) in runs.iter().zip(&four) {
        for four in four {
            assert_close(four, &two[0], 1e-4);
        }
    }
}

/// The head is trained from step 3 on: in one run because it is unfrozen then, which makes new buckets; in the other its gradients are thrown away before, and every
/// parameter has a bucket of its own.
#[test]
fn ddp_40_the_error_memory_survives_new_buckets() {
    struct Unfreeze;
    impl ModuleMapper for Unfreeze {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.set_require_grad(true)
        }
    }
    ranks(2).run(
        "ddp_40_the_error_memory_survives_new_buckets",
        |ddp: Ddp| {
            let start = ddp.unwrap(ddp.wrap(Net::new(&device())).unwrap());
            let run = |frozen: bool, bytes: usize| {
                let hook = Arc::new(PowerSgdHook::new(4));
                let config = WrapConfig::new()
                    .comm_hook(hook.clone())
                    .first_bucket_bytes(bytes)
                    .bucket_bytes(bytes);
                let mut model = start.clone();
                if frozen {
                    model.head = model.head.no_grad();
                }
                let mut model = ddp.wrap_with(model, config).unwrap();
                let mut optim = SgdConfig::new().init();
                for step in 0..8 {
                    if step == 3 {
                        model.head = model.head.map(&mut Unfreeze);
                    }
                    let grads = loss(&model, step, ddp.rank(), 8).backward();
                    let mut grads = GradientsParams::from_grads(grads, &model);
                    if step < 3 {
                        grads.remove::<2>(model.head.weight.id);
                        grads.remove::<1>(model.head.bias.as_ref().unwrap().id);
                    }
                    model = optim.step(0.5, model, grads);
                }
                (fingerprint(&model), ddp.stats().buckets)
            };
            let (one, small) = (run(true, 1 << 20), run(false, 1));
            assert_eq!(one.0, small.0);
            assert!(small.1 > one.1, "{small:?} {one:?}");
        },
    );
}

#[test]
fn weights_and_ranks_without_data() {
    let samples = [[200, 3000], [40, 3000]];
    let runs = ranks(2).run("weights_and_ranks_without_data", |ddp: Ddp| {
        let hook = PowerSgdHook::new(32).min_compression_rate(0.0);
        let config = WrapConfig::new()
            .reduction(Reduction::WeightedMean)
            .comm_hook(Arc::new(hook));
        let mut model = ddp.wrap_with(Net::new(&device()), config).unwrap();
        let start = parameters(&model);
        let mut optim = SgdConfig::new().init();
        // Rank 0 has a step less.
        for step in 0..2 + ddp.rank() {
            let samples = samples.get(step).map_or(7, |all| all[ddp.rank()]);
            let loss = loss(&model, step as u64, ddp.rank(), 32);
            let grads = ddp.weighted(samples, || loss.backward());
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.5, model, grads);
        }
        model = ddp
            .join(model, |model, grads| optim.step(0.5, model, grads))
            .unwrap();
        assert_same_bits(&ddp, &model);
        (start, parameters(&model))
    });
    for (start, last) in runs.iter().flatten() {
        let mut model = load(Net::new(&device()), start);
        let mut optim = SgdConfig::new().init();
        for step in 0..3 {
            let weights = samples.get(step).unwrap_or(&[0, 7]).map(|x| x as f32);
            let losses = [0, 1].map(|rank| loss(&model, step as u64, rank, 32) * weights[rank]);
            let [a, b] = losses;
            let loss = (a + b) / (weights[0] + weights[1]);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.5, model, grads);
        }
        assert_close(last, &parameters(&model), 1e-4);
    }
}

/// A head that nobody uses has no gradient, and what one rank uses is averaged with zeros.
#[test]
fn unused_parameters() {
    let runs = ranks(2).run("unused_parameters", |ddp: Ddp| {
        let hook = PowerSgdHook::new(16).min_compression_rate(0.0);
        let config = WrapConfig::new().comm_hook(Arc::new(hook));
        let model = ddp.wrap_with(TwoHeads::new(&device()), config).unwrap();
        let x = batch(0, ddp.rank() * 4..(ddp.rank() + 1) * 4, [0, 8], &device());
        let grads = |a: bool| {
            let grads = square(model.forward(x.clone(), a)).backward();
            gradients(&model, &GradientsParams::from_grads(grads, &model))
        };
        assert!(at(&grads(true), "b.weight").is_none());
        (parameters(&model), grads(ddp.is_main()))
    });
    for (start, reduced) in runs.iter().flatten() {
        let model = load(TwoHeads::new(&device()), start);
        let x = |rank: usize| batch(0, rank * 4..(rank + 1) * 4, [0, 8], &device());
        let both = square(model.forward(x(0), true)) + square(model.forward(x(1), false));
        let grads = GradientsParams::from_grads((both / 2.0).backward(), &model);
        assert_close(reduced, &gradients(&model, &grads), 1e-4);
    }
}

#[test]
fn a_step_that_is_skipped_changes_nothing() {
    ranks(2).run("a_step_that_is_skipped_changes_nothing", |ddp: Ddp| {
        let start = ddp.unwrap(ddp.wrap(Net::new(&device())).unwrap());
        let run = |spoilt: bool| {
            let config = WrapConfig::new()
                .comm_hook(Arc::new(PowerSgdHook::new(4)))
                .non_finite(NonFinitePolicy::Skip);
            let mut model = ddp.wrap_with(start.clone(), config).unwrap();
            let mut optim = SgdConfig::new().init();
            for step in 0..6 {
                if step == 3 && spoilt {
                    let factor = if ddp.rank() == 1 { f32::NAN } else { 1.0 };
                    let loss = loss(&model, 9, ddp.rank(), 8) * factor;
                    let grads = GradientsParams::from_grads(loss.backward(), &model);
                    assert_eq!(ddp.non_finite().unwrap().ranks, [1]);
                    model = optim.step(0.5, model, grads);
                }
                let grads = loss(&model, step, ddp.rank(), 8).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = optim.step(0.5, model, grads);
                assert_eq!(ddp.non_finite(), None);
            }
            fingerprint(&model)
        };
        assert_eq!(run(false), run(true));
    });
}
