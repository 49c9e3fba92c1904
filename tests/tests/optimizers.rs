//! ZeRO-1, clipping and loss scaling.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdafactorConfig, AdamConfig, AdamWConfig, GradientsParams, LambConfig, ModuleOptimizer,
    OptimizerRecord, SgdConfig,
};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn_ddp::train::{LossScaler, Norm, OptimizerError, StateBytes, ZeroRedundancyOptimizer};
use burn_ddp::{Ddp, Error, group::host::TRANSPORT};
use burn_ddp_tests::{models::*, oracle::*, ranks};
use std::{
    fmt::Debug,
    path::{Path, PathBuf},
    time::Duration,
};

const RATE: f64 = 0.01;
/// Rows of a whole batch.
const ROWS: usize = 8;

fn adamw() -> ModuleOptimizer {
    AdamWConfig::new().with_weight_decay(0.1).init()
}

fn momentum() -> ModuleOptimizer {
    SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .init()
}

fn zero(ddp: &Ddp, optimizer: ModuleOptimizer, split: bool) -> ZeroRedundancyOptimizer {
    let optimizer = ZeroRedundancyOptimizer::new(ddp, optimizer);
    if split {
        optimizer.split_parameters()
    } else {
        optimizer
    }
}

/// The loss on this rank's rows of batch `step`.
fn mlp_loss(ddp: &Ddp, model: &Mlp, step: u64) -> Tensor<1> {
    let share = ROWS / ddp.world_size();
    let rows = ddp.rank() * share..(ddp.rank() + 1) * share;
    square(model.forward(batch(step, rows, [0, 8], &device())))
}

fn grads<M: Module>(loss: Tensor<1>, model: &M) -> GradientsParams {
    GradientsParams::from_grads(loss.backward(), model)
}

/// Trains two copies of `start`, one with the plain optimizer, and compares their bits after each step. Returns the state's bytes.
fn assert_plain_bits<M: Module + Debug + 'static>(
    ddp: &Ddp,
    start: M,
    (optimizer, split): (ModuleOptimizer, bool),
    loss: impl Fn(&M, u64) -> Tensor<1>,
) -> (StateBytes, M) {
    let mut plain = ddp.wrap(start.clone()).unwrap();
    let mut model = ddp.wrap(start).unwrap();
    let mut ours = zero(ddp, optimizer.clone(), split);
    let mut theirs = optimizer;
    for step in 0..4 {
        let averaged = grads(loss(&plain, step), &plain);
        plain = theirs.step(RATE, plain, averaged);
        let averaged = grads(loss(&model, step), &model);
        model = ours.step(RATE, model, averaged).unwrap();
        assert_eq!(fingerprint(&model), fingerprint(&plain), "step {step}");
        assert_same_bits(ddp, &model);
    }
    let bytes = ours.state_bytes().unwrap();
    assert!(bytes.held <= bytes.whole);
    (bytes, model)
}

#[test]
fn ddp_31_zero_makes_the_plain_optimizers_step() {
    ranks(4).run("ddp_31_zero_makes_the_plain_optimizers_step", |ddp: Ddp| {
        let optimizers = [adamw(), momentum(), AdamConfig::new().init()];
        for optimizer in optimizers {
            for split in [false, true] {
                let start = Mlp::new(&device());
                let loss = |model: &Mlp, step| mlp_loss(&ddp, model, step);
                assert_plain_bits(&ddp, start, (optimizer.clone(), split), loss);
            }
        }
        // One that looks at whole parameters.
        let loss = |model: &Mlp, step| mlp_loss(&ddp, model, step);
        let lamb = (LambConfig::new().init(), false);
        assert_plain_bits(&ddp, Mlp::new(&device()), lamb, loss);
    });
}

/// The state is one of the factors, 16 + 32 + 32 + 8 numbers with two moments each, and none of the base.
#[test]
fn lora_and_zero() {
    ranks(2).run("lora_and_zero", |ddp: Ddp| {
        for split in [false, true] {
            let start = Mlp::new(&device()).apply_lora(Lora::new(2, 4.0));
            let base = floats(start.a.weight.base());
            let loss = |model: &Mlp, step| mlp_loss(&ddp, model, step);
            let (bytes, model) = assert_plain_bits(&ddp, start, (adamw(), split), loss);
            assert_eq!(bytes.whole, 2 * 4 * (16 + 32 + 32 + 8));
            let base = ddp.broadcast(base).unwrap();
            assert_eq!(floats(model.a.weight.base()), base);
        }
    });
}

/// Head b is used in no step after the first.
#[test]
fn a_parameter_without_gradient_is_left_alone() {
    ranks(2).run("a_parameter_without_gradient_is_left_alone", |ddp: Ddp| {
        for split in [false, true] {
            let loss = |model: &TwoHeads, step| {
                let rows = ddp.rank() * 4..ddp.rank() * 4 + 4;
                square(model.forward(batch(step, rows, [0, 8], &device()), step > 0))
            };
            let start = TwoHeads::new(&device());
            let before = floats(start.a.weight.val());
            let (_, model) = assert_plain_bits(&ddp, start, (adamw(), split), loss);
            assert_ne!(floats(model.a.weight.val()), before);
        }
    });
}

/// Layer a is trained from step 2 on, layer b up to step 5: in between it has gradients of zero, then none.
#[test]
fn freezing_and_zero() {
    ranks(4).run("freezing_and_zero", |ddp: Ddp| {
        let change = |mut model: Mlp, step| {
            match step {
                2 => model.a = trainable(model.a),
                5 => model.b = model.b.no_grad(),
                _ => {}
            }
            model
        };
        for split in [false, true] {
            let mut start = load(Mlp::new(&device()), &start());
            start.a = start.a.no_grad();
            let mut plain = ddp.wrap(start.clone()).unwrap();
            let mut model = ddp.wrap(start).unwrap();
            let (mut theirs, mut ours) = (adamw(), zero(&ddp, adamw(), split));
            for step in 0..8 {
                let frozen = floats(model.a.weight.base());
                plain = change(plain, step);
                let averaged = grads(mlp_loss(&ddp, &plain, step), &plain);
                plain = theirs.step(RATE, plain, averaged);
                model = change(model, step);
                let averaged = grads(mlp_loss(&ddp, &model, step), &model);
                model = ours.step(RATE, model, averaged).unwrap();
                assert_eq!(fingerprint(&model), fingerprint(&plain), "step {step}");
                assert_eq!(floats(model.a.weight.base()) == frozen, step < 2);
            }
            // Of a frozen layer the state is kept: two moments of each parameter.
            let bytes = ours.state_bytes().unwrap();
            assert_eq!(bytes.whole, model.num_params() * 2 * 4);
            assert!(model.a.weight.is_require_grad());
        }
    });
}

fn trainable<M: Module>(module: M) -> M {
    struct Unfreeze;
    impl ModuleMapper for Unfreeze {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.set_require_grad(true)
        }
    }
    module.map(&mut Unfreeze)
}

/// Rank 0 has two batches more; rank 1 makes those steps too, and owns its share in them.
#[test]
fn join_and_zero() {
    ranks(2).run("join_and_zero", |ddp: Ddp| {
        let steps = if ddp.is_main() { 5 } else { 3 };
        let mut plain = ddp.wrap(load(Mlp::new(&device()), &start())).unwrap();
        let mut theirs = adamw();
        for step in 0..steps {
            let averaged = grads(mlp_loss(&ddp, &plain, step), &plain);
            plain = theirs.step(RATE, plain, averaged);
        }
        let plain = ddp.join(plain, |model, grads| theirs.step(RATE, model, grads));
        let plain = fingerprint(&plain.unwrap());
        for split in [false, true] {
            let mut model = ddp.wrap(load(Mlp::new(&device()), &start())).unwrap();
            let mut ours = zero(&ddp, adamw(), split);
            for step in 0..steps {
                let averaged = grads(mlp_loss(&ddp, &model, step), &model);
                model = ours.step(RATE, model, averaged).unwrap();
            }
            let model = ddp.try_join(model, |model, grads| ours.step(RATE, model, grads));
            assert_eq!(fingerprint(&model.unwrap()), plain);
        }
    });
}

#[test]
fn tied_fields_stay_tied_under_zero() {
    ranks(2).run("tied_fields_stay_tied_under_zero", |ddp: Ddp| {
        for split in [false, true] {
            let loss = |model: &TwiceTiedLm, step| {
                let words = [1, 2, 3, 4].map(|word| word + 2 * ddp.rank() as i64 + step as i64);
                let words = Tensor::<1, Int>::from_data(words, &device()).reshape([2, 2]);
                square(model.forward(words))
            };
            let start = TwiceTiedLm::new(&device());
            let (_, model) = assert_plain_bits(&ddp, start, (adamw(), split), loss);
            let [a, b] = [&model.embedding.weight, &model.output].map(|p| floats(p.base()));
            assert_eq!(a, b);
        }
    });
}

/// Gradients 1, 2 and 3; Adam holds two moments, 24 bytes in all.
#[test]
fn ddp_31_three_elements_on_four_ranks() {
    for split in [false, true] {
        let name = if split { "split" } else { "whole" };
        let runs = ranks(4)
            .named(name)
            .run("ddp_31_three_elements_on_four_ranks", |ddp: Ddp| {
                let x = Tensor::<1>::from_data([1.0, 2.0, 3.0], &device());
                let loss = |model: &Vectors, _| (model.w[0].val() * x.clone()).sum();
                let optimizer = AdamConfig::new().with_epsilon(1e-30).init();
                let start = Vectors::new(1, 3, &device());
                let (bytes, model) = assert_plain_bits(&ddp, start, (optimizer, split), loss);
                (bytes.held, bytes.whole, floats(model.w[0].val()))
            });
        let held = if split { [8, 8, 8, 0] } else { [24, 0, 0, 0] };
        for run in runs {
            assert_eq!(run.iter().map(|r| r.0).collect::<Vec<_>>(), held);
            for (_, whole, w) in run {
                assert_eq!(whole, 24);
                // Adam's first steps with a constant gradient are as long as the rate.
                assert!(w.iter().all(|w| (w + 0.04).abs() < 1e-6), "{w:?}");
            }
        }
    }
}

/// Three steps of AdamW on the whole batches, from `first` on, of the model and the state that are saved in `from`.
fn three_steps(ddp: &Ddp, from: Option<&Path>, split: bool) -> (Mlp, ZeroRedundancyOptimizer) {
    let mut optimizer = zero(ddp, adamw(), split);
    // The ids of the parameters differ between ranks and from those in the file.
    let weights = from.map_or_else(start, |from| parameters(&saved(from)));
    let mut model = ddp.wrap(load(Mlp::new(&device()), &weights)).unwrap();
    if let Some(from) = from {
        optimizer = optimizer.load_record(record(from), &model).unwrap();
    }
    let first = if from.is_some() { 3 } else { 0 };
    for step in first..first + 3 {
        let averaged = grads(mlp_loss(ddp, &model, step), &model);
        model = optimizer.step(RATE, model, averaged).unwrap();
    }
    assert_same_bits(ddp, &model);
    (model, optimizer)
}

fn start() -> Weights {
    let mut weights = parameters(&Mlp::new(&device()));
    for (seed, (_, values)) in weights.iter_mut().enumerate() {
        *values = numbers(seed as u64, values.len());
    }
    weights
}

fn saved(from: &Path) -> Mlp {
    Mlp::new(&device()).load_file(from.join("model.bpk"))
}

fn record(from: &Path) -> OptimizerRecord {
    OptimizerRecord::load(from.join("optimizer.bpk")).unwrap()
}

fn directory() -> PathBuf {
    let root = std::env::var("BURN_DDP_TEST_STATE").unwrap();
    Path::new(&root).join(std::env::var(TRANSPORT).unwrap())
}

/// Saved on four ranks, resumed on four, two and one, and by the plain optimizer.
#[test]
fn ddp_31_zero_resumes_on_another_number_of_ranks() {
    let test = "ddp_31_zero_resumes_on_another_number_of_ranks";
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    ranks(4)
        .named("save")
        .env("BURN_DDP_TEST_STATE", root)
        .run(test, |ddp: Ddp| {
            for (name, split) in [("whole", false), ("split", true)] {
                let (model, optimizer) = three_steps(&ddp, None, split);
                let record = optimizer.to_record().unwrap();
                assert_eq!(record.is_some(), ddp.is_main());
                let Some(record) = record else { continue };
                let to = directory().join(name);
                std::fs::create_dir_all(&to).unwrap();
                record.save(to.join("optimizer.bpk")).unwrap();
                model.save_file(to.join("model.bpk")).unwrap();
            }
        });

    // The plain optimizer all the way, in one process.
    let mut plain = load(Mlp::new(&device()), &start());
    let mut optimizer = adamw();
    for step in 0..6 {
        let loss = square(plain.forward(batch(step, 0..ROWS, [0, 8], &device())));
        let whole = grads(loss, &plain);
        plain = optimizer.step(RATE, plain, whole);
    }
    for (count, name) in [(4, "four"), (2, "two"), (1, "one")] {
        let runs = ranks(count)
            .named(name)
            .env("BURN_DDP_TEST_STATE", root)
            .run(test, |ddp: Ddp| {
                let resume = |saved, split| {
                    let from = directory().join(saved);
                    parameters(&three_steps(&ddp, Some(&from), split).0)
                };
                // What was saved one way resumes the other way too.
                let all = [
                    resume("whole", false),
                    resume("split", true),
                    resume("whole", true),
                    resume("split", false),
                ];
                assert!(all.iter().all(|one| *one == all[0]), "the same bits");
                all[0].clone()
            });
        for resumed in runs.into_iter().flatten() {
            assert_close(&resumed, &parameters(&plain), 1e-6);
        }
    }
    // The plain optimizer goes on with what four ranks have left.
    ranks(4)
        .named("plain")
        .env("BURN_DDP_TEST_STATE", root)
        .run(test, |ddp: Ddp| {
            for name in ["whole", "split"] {
                let from = directory().join(name);
                let mut model = ddp.wrap(saved(&from)).unwrap();
                let mut optimizer = adamw().load_record(record(&from));
                for step in 3..6 {
                    let averaged = grads(mlp_loss(&ddp, &model, step), &model);
                    model = optimizer.step(RATE, model, averaged);
                }
                let (ours, _) = three_steps(&ddp, Some(&from), false);
                assert_eq!(fingerprint(&model), fingerprint(&ours), "{name}");
            }
        });
}

#[test]
fn a_record_of_something_else_is_refused() {
    ranks(2).run("a_record_of_something_else_is_refused", |ddp: Ddp| {
        let model = ddp.wrap(Mlp::new(&device())).unwrap();
        let stepped = |optimizer: ModuleOptimizer| {
            let mut optimizer = optimizer;
            let grads = grads(mlp_loss(&ddp, &model, 0), &model);
            let _ = optimizer.step(RATE, model.clone(), grads);
            optimizer.to_record()
        };
        let cause = |error: Error| match error {
            Error::Optimizer(OptimizerError::Record { rank, cause }) => {
                assert_eq!(rank, ddp.rank());
                cause
            }
            other => panic!("{other}"),
        };
        let other = Deep::new(1, &device());
        let optimizer = zero(&ddp, adamw(), false);
        let error = optimizer.load_record(stepped(adamw()), &other).unwrap_err();
        assert!(cause(error).contains("state for `a.bias`, which the model has not"));
        let optimizer = zero(&ddp, adamw(), false);
        let error = optimizer
            .load_record(stepped(momentum()), &model)
            .unwrap_err();
        assert!(cause(error).contains("takes 0 of the "));
        // Its state of a matrix is a row and a column.
        let factored = stepped(AdafactorConfig::new().init());
        let optimizer = zero(&ddp, AdafactorConfig::new().init(), true);
        let error = optimizer.load_record(factored, &model).unwrap_err();
        assert!(cause(error).contains("is not element-wise"));
    });
}

/// Without `wrap` the ranks' gradients have nothing to do with each other.
#[test]
fn ranks_that_step_different_parameters_get_an_error() {
    let runs = ranks(2).run(
        "ranks_that_step_different_parameters_get_an_error",
        |ddp: Ddp| {
            let model = Vectors::new(2, 4, &device());
            let mut optimizer = zero(&ddp, adamw(), false);
            let grads = grads(model.w[ddp.rank()].val().sum(), &model);
            optimizer.step(RATE, model, grads).unwrap_err().to_string()
        },
    );
    for run in runs {
        for (rank, text) in run.iter().enumerate() {
            let start = format!(
                "rank {rank}: the step of ZeroRedundancyOptimizer covers other parameters on rank {}",
                1 - rank
            );
            assert!(text.starts_with(&start), "{text}");
        }
    }
}

/// Two passes per step, the norm of the gradient over all parameters limited, the state divided: one process on the whole batches.
#[test]
fn accumulation_with_clipping_and_zero() {
    const LIMIT: f64 = 0.05;
    let micro = |step: u64, pass: u64| 2 * step + pass;
    let mut plain = load(Mlp::new(&device()), &start());
    let mut optimizer = adamw();
    let mut oracle_norms = Vec::new();
    for step in 0..3 {
        let [a, b] = [0, 1].map(|pass| {
            square(plain.forward(batch(micro(step, pass), 0..ROWS, [0, 8], &device())))
        });
        let grads = grads((a + b) / 2.0, &plain);
        let all = gradients(&plain, &grads);
        let squares = all
            .iter()
            .flat_map(|(_, g)| g)
            .map(|x| f64::from(*x).powi(2));
        let norm = squares.sum::<f64>().sqrt();
        oracle_norms.push(norm);
        assert!(norm > LIMIT, "{norm}");
        let mut scaled = GradientsParams::new();
        let factor = LIMIT / norm;
        for layer in [&plain.a, &plain.b] {
            let bias = layer.bias.as_ref().unwrap().id;
            let weight = layer.weight.id;
            scaled.register(weight, grads.get::<2>(weight).unwrap() * factor);
            scaled.register(bias, grads.get::<1>(bias).unwrap() * factor);
        }
        plain = optimizer.step(RATE, plain, scaled);
    }
    for (count, name) in [(2, "two"), (4, "four")] {
        let runs =
            ranks(count)
                .named(name)
                .run("accumulation_with_clipping_and_zero", |ddp: Ddp| {
                    [false, true].map(|split| {
                        let mut model = ddp.wrap(load(Mlp::new(&device()), &start())).unwrap();
                        let mut optimizer = zero(&ddp, adamw(), split);
                        let mut norms = Vec::new();
                        for step in 0..3 {
                            let loss = |pass| mlp_loss(&ddp, &model, micro(step, pass)) / 2.0;
                            ddp.without_sync(|| loss(0).backward());
                            let summed = grads(loss(1), &model);
                            let clipped = ddp.clip_grad_norm(summed, &model, LIMIT, Norm::L2);
                            let (clipped, norm) = clipped.unwrap();
                            norms.push(norm);
                            model = optimizer.step(RATE, model, clipped).unwrap();
                        }
                        assert_same_bits(&ddp, &model);
                        (parameters(&model), norms)
                    })
                });
        for (weights, norms) in runs.into_iter().flatten().flatten() {
            assert_close(&weights, &parameters(&plain), 1e-6);
            for (norm, oracle) in norms.iter().zip(&oracle_norms) {
                assert!((norm - oracle).abs() < 1e-6 * oracle, "{norm} {oracle}");
            }
        }
    }
}

/// Averaged gradients of `w * x` for this rank's `x`, and the clipped ones.
fn clipped(ddp: &Ddp, xs: [f32; 2], limit: f64) -> (f32, f64) {
    let model = ddp.wrap(Scalar::new(0.0, &device())).unwrap();
    let averaged = grads(model.loss(xs[ddp.rank()]), &model);
    let (clipped, norm) = ddp
        .clip_grad_norm(averaged, &model, limit, Norm::L2)
        .unwrap();
    (model.gradient(&clipped).unwrap(), norm)
}

#[test]
fn ddp_31_the_norm_is_that_of_the_averaged_gradient() {
    let runs = ranks(2).run(
        "ddp_31_the_norm_is_that_of_the_averaged_gradient",
        |ddp: Ddp| {
            (
                clipped(&ddp, [3.0, 5.0], 0.5),
                // Clipped before the mean, rank 1 would have 0.6 and the mean be 0.35.
                clipped(&ddp, [0.1, 0.9], 0.6),
            )
        },
    );
    for (large, small) in runs.into_iter().flatten() {
        assert_eq!(large, (0.5, 4.0));
        assert_eq!(small, (0.5, 0.5));
    }
}

/// Gradients (3, 0) and (0, -4): norms of 5 and 4.
#[test]
fn norms_and_limits_over_all_parameters() {
    let runs = ranks(2).run("norms_and_limits_over_all_parameters", |ddp: Ddp| {
        let model = ddp.wrap(Vectors::new(2, 2, &device())).unwrap();
        let gradients_of = |x: [[f32; 2]; 2]| {
            let x = x.map(|x| Tensor::<1>::from_data(x, &device()));
            let [a, b] = [0, 1].map(|i| (model.w[i].val() * x[i].clone()).sum());
            grads(a + b, &model)
        };
        let values = |grads: &GradientsParams| {
            let all = gradients(&model, grads);
            all.into_iter()
                .flat_map(|(_, values)| values)
                .collect::<Vec<_>>()
        };
        let averaged = || gradients_of([[3.0, 0.0], [0.0, -4.0]]);
        let by_norm = |limit, norm| {
            let (clipped, norm) = ddp.clip_grad_norm(averaged(), &model, limit, norm).unwrap();
            (values(&clipped), norm)
        };
        assert_eq!(by_norm(2.5, Norm::L2), (vec![1.5, 0.0, 0.0, -2.0], 5.0));
        assert_eq!(by_norm(1.0, Norm::Inf), (vec![0.75, 0.0, 0.0, -1.0], 4.0));
        let untouched = vec![3.0, 0.0, 0.0, -4.0];
        assert_eq!(by_norm(5.0, Norm::L2), (untouched.clone(), 5.0));
        assert_eq!(by_norm(f64::INFINITY, Norm::Inf), (untouched, 4.0));
        let limited = ddp.clip_grad_value(averaged(), &model, 2.0);
        assert_eq!(values(&limited), [2.0, 0.0, 0.0, -2.0]);

        // Infinite on rank 1 only, so infinite in the mean of all.
        let odd = [f32::NAN, f32::INFINITY].map(|bad| {
            let x = if ddp.rank() == 1 { bad } else { 1.0 };
            [Norm::L2, Norm::Inf].map(|norm| {
                let averaged = gradients_of([[3.0, 0.0], [0.0, x]]);
                let error = ddp.clip_grad_norm(averaged, &model, 1.0, norm).unwrap_err();
                error.to_string()
            })
        });
        odd.into_iter().flatten().collect::<Vec<_>>()
    });
    for run in runs {
        for (rank, texts) in run.iter().enumerate() {
            let start = format!("rank {rank}: the gradient of `w.1` is not finite");
            assert!(
                texts.iter().all(|text| text.starts_with(&start)),
                "{texts:?}"
            );
        }
    }
}

/// The gradients of both fields are scaled, and the parameter counts once.
#[test]
fn the_norm_counts_tied_fields_once() {
    ranks(2).run("the_norm_counts_tied_fields_once", |ddp: Ddp| {
        let words = Tensor::<1, Int>::from_data([1, 2, 3, 4], &device()).reshape([2, 2]);
        let plain = TwiceTiedLm::new(&device());
        let one = TiedLm {
            embedding: plain.embedding.clone(),
            mix: plain.mix.clone(),
        };
        let model = ddp.wrap(plain).unwrap();
        let single = ddp.wrap(one).unwrap();
        let averaged = grads(square(model.forward(words.clone())), &model);
        let (kept, norm) = ddp
            .clip_grad_norm(averaged, &model, f64::INFINITY, Norm::L2)
            .unwrap();
        let averaged = grads(square(single.forward(words)), &single);
        let (_, once) = ddp
            .clip_grad_norm(averaged, &single, f64::INFINITY, Norm::L2)
            .unwrap();
        assert!((norm - once).abs() < 1e-6 * once, "{norm} {once}");
        let (halved, _) = ddp
            .clip_grad_norm(kept, &model, norm / 2.0, Norm::L2)
            .unwrap();
        let [a, b] = [&model.embedding.weight, &model.output]
            .map(|field| floats(halved.get::<2>(field.id).unwrap()));
        assert_eq!(a, b);
        let (_, again) = ddp
            .clip_grad_norm(halved, &model, f64::INFINITY, Norm::L2)
            .unwrap();
        assert!((again - norm / 2.0).abs() < 1e-6 * norm, "{again} {norm}");
    });
}

/// The gradient overflows on rank 1 alone; both ranks leave out the step and halve the scale.
#[test]
fn all_ranks_skip_the_steps_that_overflow_on_one() {
    let runs = ranks(2).run(
        "all_ranks_skip_the_steps_that_overflow_on_one",
        |ddp: Ddp| {
            let mut model = ddp.wrap(Scalar::new(0.0, &device())).unwrap();
            let mut optimizer = SgdConfig::new().init();
            let mut scaler = LossScaler::new().with_scale(8.0).with_growth_interval(2);
            let mut steps = Vec::new();
            let ours = [1.0, 1.0, 3.0, 3.0, 1.0];
            // Times eight this is beyond f32, times four not.
            let theirs = [1e38, 3.0, 1.0, f32::NAN, 3.0];
            for xs in ours.iter().zip(theirs) {
                let x = if ddp.rank() == 0 { *xs.0 } else { xs.1 };
                let averaged = grads(scaler.scale(model.loss(x)), &model);
                let averaged = scaler.unscale(&ddp, averaged, &model).unwrap();
                let stepped = averaged.is_some();
                if let Some(averaged) = averaged {
                    model = optimizer.step(1.0, model, averaged);
                }
                scaler.check(&ddp).unwrap();
                let state = serde_json::to_string(&scaler).unwrap();
                scaler = serde_json::from_str(&state).unwrap();
                steps.push((stepped, scaler.current_scale(), floats(model.w.base())[0]));
            }
            let mut other = scaler;
            if ddp.rank() == 1 {
                other = other.with_scale(1.0);
            }
            (steps, other.check(&ddp).unwrap_err().to_string())
        },
    );
    for run in runs {
        for (rank, (steps, text)) in run.into_iter().enumerate() {
            let expected = [
                (false, 4.0, 0.0),
                (true, 4.0, -2.0),
                (true, 8.0, -4.0),
                (false, 4.0, -4.0),
                (true, 4.0, -6.0),
            ];
            assert_eq!(steps, expected);
            let [ours, theirs] = if rank == 0 { [4, 1] } else { [1, 4] };
            let expected = format!(
                "rank {rank}: the loss scalers differ: rank {rank} has a scale of {ours} for 1 steps, rank {} has a scale of {theirs} for 1 steps",
                1 - rank
            );
            assert!(text.starts_with(&expected), "{text}");
        }
    }
}

/// The gradient is 2^-26, which is less than half of the least f16.
#[test]
fn a_scaled_gradient_survives_f16() {
    let runs = ranks(2).run("a_scaled_gradient_survives_f16", |ddp: Ddp| {
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        let loss = || {
            let w = model.w.val().cast(FloatDType::F16);
            w * 2f32.powi(-12) * 2f32.powi(-14)
        };
        let plain = grads(loss(), &model);
        let mut scaler = LossScaler::new().with_scale(1024.0);
        let scaled = grads(scaler.scale(loss()), &model);
        let unscaled = scaler.unscale(&ddp, scaled, &model).unwrap().unwrap();
        [plain, unscaled].map(|grads| model.gradient(&grads))
    });
    for gradients in runs.into_iter().flatten() {
        assert_eq!(gradients, [Some(0.0), Some(2f32.powi(-26))]);
    }
}

/// Adam holds two numbers for each parameter: 8 layers of 1024 * 1025, of which each of four ranks has two.
#[test]
fn zero_divides_the_memory_of_adam() {
    let runs = ranks(4).over("shm").limit(Duration::from_secs(120)).run(
        "zero_divides_the_memory_of_adam",
        |ddp: Ddp| {
            let layer = || LinearConfig::new(1024, 1024).init(&device());
            let layers: Vec<Linear> = (0..8).map(|_| layer()).collect();
            let mut model = ddp.wrap(layers).unwrap();
            [false, true].map(|split| {
                let mut optimizer = zero(&ddp, AdamConfig::new().init(), split);
                let x = Tensor::<2>::ones([1, 1024], &device());
                let y = model.iter().fold(x, |x, layer| layer.forward(x));
                let averaged = grads(y.mean(), &model);
                model = optimizer.step(RATE, model.clone(), averaged).unwrap();
                let bytes = optimizer.state_bytes().unwrap();
                (bytes.held, bytes.whole)
            })
        },
    );
    for (held, whole) in runs.into_iter().flatten().flatten() {
        assert_eq!(whole, 8 * 1024 * 1025 * 4 * 2);
        assert_eq!(held, whole / 4);
    }
}
