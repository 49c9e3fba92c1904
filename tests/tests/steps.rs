//! What the ranks agree on in a step beside its gradients: who has data, how much, whether the numbers are numbers, in how many bits they travel.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    optim::{GradientsParams, SgdConfig, momentum::MomentumConfig},
    prelude::*,
};
use burn_ddp::{
    CommHook, CompressHook, Ddp, Error, GradBucket, NonFinite, NonFinitePolicy, ReduceOp,
    Reduction, WrapConfig, group::GroupError, try_backward,
};
use burn_ddp_tests::{
    models::{Mlp, Scalar, Vectors},
    oracle::*,
    ranks,
};
use std::sync::{Arc, Mutex};

fn gradient(model: &Scalar, loss: Tensor<1>) -> Option<f32> {
    model.gradient(&GradientsParams::from_grads(loss.backward(), model))
}

/// Of rank `rank` in step `step`: four rows.
fn rows(model: &Mlp, step: usize, rank: usize) -> Tensor<2> {
    let x = batch(step as u64, rank * 4..(rank + 1) * 4, [0, 8], &device());
    model.forward(x)
}

#[test]
fn ddp_01_b_ranks_without_data_answer_those_that_have_more() {
    const BATCHES: [usize; 3] = [3, 5, 4];
    let optimizer = || {
        let momentum = MomentumConfig::new().with_momentum(0.9);
        SgdConfig::new().with_momentum(Some(momentum)).init()
    };
    let runs = ranks(3).run(
        "ddp_01_b_ranks_without_data_answer_those_that_have_more",
        |ddp: Ddp| {
            let start = Mlp::new(&device());
            let mut model = ddp.wrap(start).unwrap();
            let start = parameters(&model);
            let mut optim = optimizer();
            for step in 0..BATCHES[ddp.rank()] {
                let loss = square(rows(&model, step, ddp.rank()));
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(0.1, model, grads);
            }
            model = ddp
                .join(model, |model, grads| optim.step(0.1, model, grads))
                .unwrap();
            assert_same_bits(&ddp, &model);
            // The optimizers' momenta are equal too: the next epoch begins alike.
            let loss = square(rows(&model, 9, ddp.rank()));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.1, model, grads);
            assert_same_bits(&ddp, &model);
            (start, parameters(&model))
        },
    );
    for (start, ours) in runs.iter().flatten() {
        let mut model = load(Mlp::new(&device()), start);
        let mut optim = optimizer();
        for step in [0, 1, 2, 3, 4, 9] {
            let active = (0..3).filter(|rank| step == 9 || BATCHES[*rank] > step);
            let all = active.map(|rank| rows(&model, step, rank)).collect();
            let loss = square(Tensor::cat(all, 0));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(0.1, model, grads);
        }
        assert_close(ours, &parameters(&model), 1e-6);
    }
}

/// The texts of the ranks' errors: one has its own, of which the others hear.
fn refused(test: &str, body: impl Fn(&Ddp) -> Result<(), Error>) -> Vec<String> {
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        body(&ddp).unwrap_err().to_string()
    });
    let ranks = runs.into_iter().flatten();
    ranks.map(|(_, error)| error.unwrap()).collect()
}

#[test]
fn join_inside_a_window_is_an_error_on_all_ranks() {
    let texts = refused("join_inside_a_window_is_an_error_on_all_ranks", |ddp| {
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        if ddp.is_main() {
            ddp.without_sync(|| model.loss(1.0).backward());
        }
        ddp.join(model, |model, _| model).map(|_| ())
    });
    for text in texts {
        assert!(text.contains("1 backward pass(es) accumulated"), "{text}");
    }
}

/// Generator and discriminator, trained in turn, the second one twice as often.
#[test]
fn ddp_01_b_two_models_are_joined_together() {
    let test = "ddp_01_b_two_models_are_joined_together";
    ranks(2).run(test, |ddp: Ddp| {
        let [g, d] = [1.0, 2.0].map(|w| ddp.wrap(Scalar::new(w, &device())).unwrap());
        let (mut of_g, mut of_d) = (Vec::new(), Vec::new());
        for step in 0..if ddp.is_main() { 1 } else { 3 } {
            let x = (10 * ddp.rank() + step) as f32;
            of_d.push(gradient(&d, d.loss(x)));
            of_d.push(gradient(&d, d.loss(x + 100.0)));
            of_g.push(gradient(&g, g.loss(x + 1000.0)));
        }
        let see = |seen: &mut Vec<_>, model: Scalar, grads| {
            seen.push(model.gradient(&grads));
            model
        };
        let pair = ddp.join_pair(
            (g, d),
            |g, grads| see(&mut of_g, g, grads),
            |d, grads| see(&mut of_d, d, grads),
        );
        let (g, d) = pair.unwrap();
        // Of both, then of rank 1 alone.
        let steps = [5.0, 11.0, 12.0];
        assert_eq!(of_g, steps.map(|x| Some(x + 1000.0)));
        assert_eq!(of_d, steps.map(|x| [Some(x), Some(x + 100.0)]).concat());
        // The next epoch begins with both.
        let x = 2.0 * ddp.rank() as f32;
        assert_eq!(gradient(&g, g.loss(x)), Some(1.0));
        assert_eq!(gradient(&d, d.loss(x)), Some(1.0));
    });
}

/// Rank 1 leaves without joining.
#[test]
fn join_pair_fails_with_the_cause() {
    let runs = ranks(2).run_raw("join_pair_fails_with_the_cause", || {
        let ddp = Ddp::from_env().unwrap();
        let [g, d] = [1.0, 2.0].map(|w| ddp.wrap(Scalar::new(w, &device())).unwrap());
        if !ddp.is_main() {
            return None;
        }
        let joined = ddp.join_pair((g, d), |g, _| g, |d, _| d);
        Some(joined.map(drop).unwrap_err().to_string())
    });
    for run in runs {
        let text = run[0].1.clone().unwrap().unwrap();
        assert!(text.contains("rank 1 on"), "{text}");
        assert!(text.contains("has finished and left"), "{text}");
    }
}

fn weighted(ddp: &Ddp) -> Scalar {
    let config = WrapConfig::new().reduction(Reduction::WeightedMean);
    ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap()
}

#[test]
fn ddp_09_every_sample_counts_once() {
    ranks(2).run("ddp_09_every_sample_counts_once", |ddp: Ddp| {
        let model = weighted(&ddp);
        let main = ddp.is_main();
        let step = |samples: [usize; 2], x: [f32; 2]| {
            let rank = ddp.rank();
            let loss = model.loss(x[rank]);
            let grads = ddp.weighted(samples[rank], || loss.backward());
            model.gradient(&GradientsParams::from_grads(grads, &model))
        };
        assert_eq!(step([1, 3], [8.0, 0.0]), Some(2.0), "plain mean: 4");
        // The mean over no sample is no number.
        assert_eq!(step([1, 0], [8.0, f32::NAN]), Some(8.0));
        assert_eq!(step([0, 5], [f32::NAN, 3.0]), Some(3.0));
        assert_eq!(step([0, 0], [f32::NAN, f32::NAN]), None);
        // More samples than f32 can count.
        assert_eq!(step([1 << 40, 1 << 40], [1.0, 3.0]), Some(2.0));

        // Windows: (1 * 8 + 1 * 4 + 3 * 0) / 5.
        let samples = if main { [1, 1] } else { [3, 0] };
        let xs = if main { [8.0, 4.0] } else { [0.0, f32::NAN] };
        let loss = model.loss(xs[0]);
        ddp.without_sync(|| ddp.weighted(samples[0], || loss.backward()));
        let loss = model.loss(xs[1]);
        let grads = ddp.weighted(samples[1], || loss.backward());
        let grads = GradientsParams::from_grads(grads, &model);
        assert_eq!(model.gradient(&grads), Some(2.4));
    });
}

#[test]
fn ddp_09_a_weight_without_a_weighted_mean() {
    let texts = refused("ddp_09_a_weight_without_a_weighted_mean", |ddp| {
        let plain = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        let loss = plain.loss(1.0);
        ddp.weighted(3, || try_backward(&loss)).map(|_| ())
    });
    for text in texts {
        assert!(text.contains("Reduction::WeightedMean"), "{text}");
    }
}

#[test]
fn ddp_09_a_weighted_mean_without_a_weight() {
    let texts = refused("ddp_09_a_weighted_mean_without_a_weight", |ddp| {
        let model = weighted(ddp);
        try_backward(&model.loss(1.0)).map(|_| ())
    });
    for text in texts {
        assert!(
            text.contains("ddp.weighted(samples, || loss.backward())"),
            "{text}"
        );
    }
}

#[test]
fn join_and_weights() {
    ranks(2).run("join_and_weights", |ddp: Ddp| {
        let model = weighted(&ddp);
        let data: &[(usize, f32)] = if ddp.is_main() {
            &[(1, 8.0)]
        } else {
            &[(3, 0.0), (5, 6.0), (0, f32::NAN)]
        };
        let mut seen = Vec::new();
        for (samples, x) in data {
            let loss = model.loss(*x);
            let grads = ddp.weighted(*samples, || loss.backward());
            seen.push(model.gradient(&GradientsParams::from_grads(grads, &model)));
        }
        ddp.join(model, |model, grads| {
            seen.push(model.gradient(&grads));
            model
        })
        .unwrap();
        assert_eq!(seen, [Some(2.0), Some(6.0), None]);
    });
}

#[test]
fn ddp_05_all_ranks_skip_the_step_that_one_has_spoilt() {
    for policy in [NonFinitePolicy::Pass, NonFinitePolicy::Skip] {
        ranks(3).run(
            "ddp_05_all_ranks_skip_the_step_that_one_has_spoilt",
            |ddp: Ddp| {
                let config = WrapConfig::new().non_finite(policy);
                let mut model = ddp.wrap_with(Mlp::new(&device()), config).unwrap();
                let mut optim = SgdConfig::new().init();
                let mut prints = vec![fingerprint(&model)];
                let mut verdicts = Vec::new();
                for step in 1..=3 {
                    let mut out = rows(&model, step, ddp.rank());
                    if (step, ddp.rank()) == (2, 1) {
                        out = out * f32::NAN;
                    }
                    let grads = GradientsParams::from_grads(square(out).backward(), &model);
                    model = optim.step(0.1, model, grads);
                    assert_same_bits(&ddp, &model);
                    prints.push(fingerprint(&model));
                    verdicts.push(ddp.non_finite());
                }
                match policy {
                    NonFinitePolicy::Pass => {
                        let spoilt = parameters(&model);
                        assert!(at(&spoilt, "b.weight").unwrap().iter().all(|x| x.is_nan()));
                        assert_eq!(verdicts, [None, None, None]);
                    }
                    NonFinitePolicy::Skip => {
                        assert_eq!(prints[1], prints[2]);
                        assert_ne!(prints[2], prints[3]);
                        let NonFinite { step, ranks, path } = verdicts[1].clone().unwrap();
                        assert_eq!((step, ranks), (2, vec![1]));
                        assert_eq!(path, "b.bias", "the first in the first bucket");
                        assert_eq!([&verdicts[0], &verdicts[2]], [&None, &None]);
                    }
                }
            },
        );
    }
}

#[test]
fn ddp_05_an_overflow_in_the_reduction_is_found_too() {
    ranks(2).run(
        "ddp_05_an_overflow_in_the_reduction_is_found_too",
        |ddp: Ddp| {
            let config = WrapConfig::new()
                .reduction(Reduction::Sum)
                .non_finite(NonFinitePolicy::Skip);
            let model = ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap();
            assert_eq!(gradient(&model, model.loss(3e38)), None);
            let text = ddp.non_finite().unwrap().to_string();
            assert!(text.contains("it overflowed in the reduction"), "{text}");
            assert_eq!(gradient(&model, model.loss(1.0)), Some(2.0));
            assert_eq!(ddp.non_finite(), None);
        },
    );
}

#[test]
fn ddp_05_one_rank_skips_too() {
    ranks(1).run("ddp_05_one_rank_skips_too", |ddp: Ddp| {
        let config = WrapConfig::new().non_finite(NonFinitePolicy::Skip);
        let model = ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap();
        assert_eq!(gradient(&model, model.loss(3.0)), Some(3.0));
        assert_eq!(gradient(&model, model.loss(f32::NAN)), None);
        let NonFinite { step, ranks, path } = ddp.non_finite().unwrap();
        assert_eq!((step, ranks, path), (2, vec![0], "w".to_string()));
        assert_eq!(gradient(&model, model.loss(3.0)), Some(3.0));
        assert_eq!(ddp.non_finite(), None);
    });
}

/// A hook that makes all numbers finite.
#[derive(Debug)]
struct Zeros;

impl CommHook for Zeros {
    fn describe(&self) -> String {
        "zeros".into()
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        bucket.data_mut().fill(0);
        Ok(())
    }
}

#[test]
fn ddp_05_a_hook_does_not_hide_what_a_rank_has_sent() {
    ranks(2).run(
        "ddp_05_a_hook_does_not_hide_what_a_rank_has_sent",
        |ddp: Ddp| {
            let config = WrapConfig::new()
                .non_finite(NonFinitePolicy::Skip)
                .comm_hook(Arc::new(Zeros));
            let model = ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap();
            let x = if ddp.is_main() { 1.0 } else { f32::INFINITY };
            assert_eq!(gradient(&model, model.loss(x)), None);
            assert_eq!(ddp.non_finite().unwrap().ranks, [1]);
        },
    );
}

/// 4,096 times 100 is more than f16 has.
#[test]
fn ddp_32_weights_leave_sixteen_bits_their_range() {
    ranks(2).run(
        "ddp_32_weights_leave_sixteen_bits_their_range",
        |ddp: Ddp| {
            let config = WrapConfig::new()
                .reduction(Reduction::WeightedMean)
                .comm_hook(Arc::new(CompressHook::f16()));
            let model = ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap();
            for _ in 0..2 {
                let loss = model.loss(100.0);
                let grads = ddp.weighted(4096, || loss.backward());
                let grads = GradientsParams::from_grads(grads, &model);
                assert_eq!(model.gradient(&grads), Some(100.0));
            }
        },
    );
}

#[test]
fn one_hook_for_two_models_is_refused() {
    ranks(2)
        .over("tcp")
        .run("one_hook_for_two_models_is_refused", |ddp: Ddp| {
            let config = WrapConfig::new().comm_hook(Arc::new(CompressHook::bf16()));
            let new = || Scalar::new(1.0, &device());
            let first = ddp.wrap_with(new(), config.clone()).unwrap();
            let error = ddp
                .wrap_with(new(), config.clone())
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("give each model a hook of its own"),
                "{error}"
            );
            drop(first);
            ddp.wrap_with(new(), config).unwrap();
        });
}

#[test]
fn join_takes_one_wrapped_model() {
    ranks(1).run("join_takes_one_wrapped_model", |ddp: Ddp| {
        let text = |model| {
            ddp.join(model, |model: Vec<Scalar>, _| model)
                .unwrap_err()
                .to_string()
        };
        let new = || Scalar::new(1.0, &device());
        let two = vec![ddp.wrap(new()).unwrap(), ddp.wrap(new()).unwrap()];
        assert!(text(vec![new()]).contains("this one is not wrapped"));
        assert!(text(two).contains("this one has several of them in it"));
    });
}

fn hooked(ddp: &Ddp, hook: impl CommHook + 'static) -> Scalar {
    let config = WrapConfig::new().comm_hook(Arc::new(hook));
    ddp.wrap_with(Scalar::new(1.0, &device()), config).unwrap()
}

#[test]
fn ddp_32_sixteen_bits_neither_overflow_nor_hide_it() {
    ranks(4).run(
        "ddp_32_sixteen_bits_neither_overflow_nor_hide_it",
        |ddp: Ddp| {
            let half = hooked(&ddp, CompressHook::f16());
            // The sum of four would be infinite.
            assert_eq!(gradient(&half, half.loss(30000.0)), Some(30000.0));
            // Twice the smallest f16, 2^-24.
            assert_eq!(gradient(&half, half.loss(1e-7)), Some(2f32.powi(-23)));
            assert_eq!(gradient(&half, half.loss(1e-9)), Some(0.0));
            // Too large on one rank alone, and infinite on all.
            let x = if ddp.rank() == 2 { 1e6 } else { 1.0 };
            assert_eq!(gradient(&half, half.loss(x)), Some(f32::INFINITY));

            let brain = hooked(&ddp, CompressHook::bf16());
            // 8 bits: 2^20 - 2^12 is the neighbour of 1e6 that bf16 has.
            assert_eq!(gradient(&brain, brain.loss(1e6)), Some(999_424.0));
            let x = ddp.rank() as f32;
            assert_eq!(gradient(&brain, brain.loss(x)), Some(1.5));
        },
    );
}

#[test]
fn comm_hook_and_parameters_that_nobody_uses() {
    ranks(2).run("comm_hook_and_parameters_that_nobody_uses", |ddp: Ddp| {
        let config = WrapConfig::new().comm_hook(Arc::new(CompressHook::bf16()));
        let model = ddp
            .wrap_with(Vectors::new(3, 5, &device()), config)
            .unwrap();
        for _ in 0..3 {
            // Rank 0 has 4 for the first, rank 1 has 8 for the second.
            let own = &model.w[ddp.rank()];
            let loss = own.val().sum() * if ddp.is_main() { 4.0 } else { 8.0 };
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let expected = [("w.0", 2.0), ("w.1", 4.0)];
            let expected: Weights = expected.map(|(path, x)| (path.into(), vec![x; 5])).into();
            assert_eq!(gradients(&model, &grads), expected);
        }
    });
}

/// A hook as a user writes it: the plain mean, and a diary.
#[derive(Debug, Default)]
struct Diary(Mutex<Vec<(usize, Vec<String>)>>);

impl CommHook for Diary {
    fn describe(&self) -> String {
        "diary".into()
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        let paths = bucket.parameters().map(|p| p.path.to_string()).collect();
        self.0.lock().unwrap().push((bucket.index(), paths));
        let (group, dtype) = (bucket.group(), bucket.dtype());
        group.all_reduce(bucket.data_mut(), dtype, ReduceOp::Mean)
    }
}

#[test]
fn a_hook_of_the_users_own_sees_every_bucket() {
    ranks(2).run("a_hook_of_the_users_own_sees_every_bucket", |ddp: Ddp| {
        let diary = Arc::new(Diary::default());
        let config = WrapConfig::new()
            .reduction(Reduction::Sum)
            .first_bucket_bytes(4)
            .bucket_bytes(40)
            .comm_hook(diary.clone());
        let model = ddp
            .wrap_with(Vectors::new(3, 5, &device()), config)
            .unwrap();
        let used = model.w.iter().map(|w| w.val().sum());
        let loss = used.reduce(|a, b| a + b).unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let all = gradients(&model, &grads);
        assert!(all.iter().all(|(_, x)| *x == [2.0; 5]), "the sum: {all:?}");
        let bucket =
            |index: usize, paths: &[&str]| (index, paths.iter().map(|p| p.to_string()).collect());
        let expected = [bucket(0, &["w.2"]), bucket(1, &["w.1", "w.0"])];
        assert_eq!(*diary.0.lock().unwrap(), expected);
    });
}

#[test]
fn hooks_that_differ_are_refused() {
    ranks(2)
        .over("tcp")
        .run("hooks_that_differ_are_refused", |ddp: Ddp| {
            let hook = if ddp.is_main() {
                CompressHook::f16()
            } else {
                CompressHook::bf16()
            };
            let config = WrapConfig::new().comm_hook(Arc::new(hook));
            let error = ddp
                .wrap_with(Scalar::new(1.0, &device()), config)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("send as f16") && error.contains("send as bf16"),
                "{error}"
            );
        });
}
