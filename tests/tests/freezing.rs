//! Models that change between steps.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    module::{Module, ModuleMapper, Param},
    nn::LinearConfig,
    optim::{AdamWConfig, GradientsParams, SgdConfig},
    prelude::*,
};
use burn_ddp::{Ddp, try_backward};
use burn_ddp_tests::{models::Mlp, oracle::*, ranks};

fn unfreeze<M: Module>(module: M) -> M {
    struct Unfreeze;
    impl ModuleMapper for Unfreeze {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.set_require_grad(true)
        }
    }
    module.map(&mut Unfreeze)
}

fn loss(model: &Mlp, step: u64, rows: std::ops::Range<usize>) -> Tensor<1> {
    square(model.forward(batch(step, rows, [0, 8], &device())))
}

/// The first layer is unfrozen before step 3, the second frozen before step 15: its gradients are zeros for some steps, and then nothing.
fn change(mut model: Mlp, step: u64) -> Mlp {
    match step {
        3 => model.a = unfreeze(model.a),
        15 => model.b = model.b.no_grad(),
        _ => {}
    }
    model
}

fn frozen_first() -> Mlp {
    let mut model = Mlp::new(&device());
    model.a = model.a.no_grad();
    model
}

#[test]
fn ddp_29_unfreezing_and_freezing_in_mid_training() {
    const STEPS: u64 = 30;
    let runs = ranks(2).run(
        "ddp_29_unfreezing_and_freezing_in_mid_training",
        |ddp: Ddp| {
            let mut model = ddp.wrap(frozen_first()).unwrap();
            let start = parameters(&model);
            let mut optim = AdamWConfig::new().init();
            let mut bytes = Vec::new();
            let rows = ddp.rank() * 2..ddp.rank() * 2 + 2;
            for step in 1..=STEPS {
                model = change(model, step);
                let grads = loss(&model, step, rows.clone()).backward();
                let grads = GradientsParams::from_grads(grads, &model);
                model = optim.step(0.01, model, grads);
                assert_same_bits(&ddp, &model);
                bytes.push(ddp.stats().gradient_bytes_per_step);
            }
            // (8 + 1) * 16 and (16 + 1) * 4 parameters; the tail is less than 100 elements.
            let sent = |step: usize| bytes[step - 1] / 4 / 100 * 100;
            assert_eq!(
                [sent(2), sent(4), sent(14), sent(STEPS as usize)],
                [0, 200, 200, 100]
            );
            (start, parameters(&model))
        },
    );
    for (start, ours) in runs.iter().flatten() {
        let mut model = load(frozen_first(), start);
        let mut optim = AdamWConfig::new().init();
        for step in 1..=STEPS {
            model = change(model, step);
            let grads = loss(&model, step, 0..4).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optim.step(0.01, model, grads);
        }
        assert_close(ours, &parameters(&model), 2e-5);
    }
}

#[test]
fn freeze_and_accumulation() {
    let runs = ranks(2).run("freeze_and_accumulation", |ddp: Ddp| {
        let mut model = ddp.wrap(frozen_first()).unwrap();
        let start = parameters(&model);
        let rows = ddp.rank() * 2..ddp.rank() * 2 + 2;
        // Unfrozen before the second of three passes.
        ddp.without_sync(|| loss(&model, 0, rows.clone()).backward());
        model.a = unfreeze(model.a);
        ddp.without_sync(|| loss(&model, 1, rows.clone()).backward());
        let grads = loss(&model, 2, rows).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        (start, gradients(&model, &grads))
    });
    for (start, ours) in runs.iter().flatten() {
        let mut model = load(frozen_first(), start);
        let first = loss(&model, 0, 0..4);
        let first = GradientsParams::from_grads(first.backward(), &model);
        let first = gradients(&model, &first);
        model.a = unfreeze(model.a);
        let rest = loss(&model, 1, 0..4) + loss(&model, 2, 0..4);
        let rest = GradientsParams::from_grads(rest.backward(), &model);
        let mut sum = gradients(&model, &rest);
        for (path, values) in &mut sum {
            if let Some(first) = at(&first, path) {
                values.iter_mut().zip(first).for_each(|(sum, x)| *sum += x);
            }
        }
        assert_close(ours, &sum, 1e-6);
    }
}

#[test]
fn ddp_29_unfreezing_on_one_rank_names_the_layer() {
    let runs = ranks(2).run_raw("ddp_29_unfreezing_on_one_rank_names_the_layer", || {
        let ddp = Ddp::from_env().unwrap();
        let mut model = ddp.wrap(frozen_first()).unwrap();
        if ddp.rank() == 1 {
            model.a = unfreeze(model.a);
        }
        try_backward(&loss(&model, 0, 0..2))
            .map(|_| ())
            .unwrap_err()
            .to_string()
    });
    for (_, error) in runs.into_iter().flatten() {
        let error = error.unwrap();
        assert!(
            error.contains("`a.weight` is trained on rank(s) [1] and frozen on rank(s) [0]"),
            "{error}"
        );
    }
}

#[test]
fn ddp_29_freezing_on_one_rank_names_the_layer() {
    let runs = ranks(2).run_raw("ddp_29_freezing_on_one_rank_names_the_layer", || {
        let ddp = Ddp::from_env().unwrap();
        let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
        if ddp.rank() == 1 {
            model.b = model.b.no_grad();
        }
        let pass = |model: &Mlp| try_backward(&loss(model, 0, 0..2)).map(|_| ());
        // Rank 1 knows at once, rank 0 hears of it.
        pass(&model)
            .and_then(|()| pass(&model))
            .unwrap_err()
            .to_string()
    });
    for (_, error) in runs.into_iter().flatten() {
        let error = error.unwrap();
        assert!(
            error.contains("`b.weight` is trained on another rank and frozen on rank(s) [1]"),
            "{error}"
        );
    }
}

#[test]
fn a_frozen_copy_beside_the_model_changes_nothing() {
    ranks(2).run(
        "a_frozen_copy_beside_the_model_changes_nothing",
        |ddp: Ddp| {
            let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
            let teacher = model.clone().no_grad();
            let mut optim = SgdConfig::new().init();
            for step in 0..12 {
                let x = batch::<2>(step, 0..2, [0, 8], &device());
                let loss = square(model.forward(x.clone()) - teacher.forward(x));
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                assert_eq!(grads.len(), 4);
                model = optim.step(0.1, model, grads);
            }
            assert_eq!(ddp.stats().rounds, 12);
        },
    );
}

#[test]
fn ddp_21_b_a_layer_replaced_after_wrap_is_an_error_that_names_it() {
    let runs = ranks(2).run_raw(
        "ddp_21_b_a_layer_replaced_after_wrap_is_an_error_that_names_it",
        || {
            let ddp = Ddp::from_env().unwrap();
            let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
            loss(&model, 0, 0..2).backward();
            model.b = LinearConfig::new(16, 4).init(&device());
            try_backward(&loss(&model, 1, 0..2))
                .map(|_| ())
                .unwrap_err()
                .to_string()
        },
    );
    for (_, error) in runs.into_iter().flatten() {
        let error = error.unwrap();
        assert!(
            error.contains("`b.weight` is no longer in the model that was wrapped"),
            "{error}"
        );
    }
}

#[test]
fn ddp_21_b_wrapped_again_it_is_trained() {
    ranks(2).run("ddp_21_b_wrapped_again_it_is_trained", |ddp: Ddp| {
        let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
        loss(&model, 0, 0..2).backward();
        model.b = LinearConfig::new(16, 4).init(&device());
        let mut model = ddp.wrap(ddp.unwrap(model)).unwrap();
        let mut optim = SgdConfig::new().init();
        let rows = ddp.rank() * 2..ddp.rank() * 2 + 2;
        for step in 0..2 {
            let grads = loss(&model, step, rows.clone()).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            assert_eq!(grads.len(), 4);
            model = optim.step(0.1, model, grads);
            assert_same_bits(&ddp, &model);
        }
    });
}

/// Whichever handle forward goes through, what it leads to is reduced. A plain copy is no handle: it is trained on this rank alone,
/// and the check of the replicas finds that.
#[test]
fn ddp_21_a_every_handle_of_the_model_reduces() {
    let test = "ddp_21_a_every_handle_of_the_model_reduces";
    let runs = ranks(2).run(test, |ddp: Ddp| {
        let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
        let start = parameters(&model);
        let mut optim = SgdConfig::new().init();
        let rows = ddp.rank() * 2..ddp.rank() * 2 + 2;
        for step in 0..3 {
            let handle = match step {
                0 => model.clone(),
                1 => model.valid().train(),
                _ => {
                    let mut copy = model.clone();
                    copy.a = model.a.clone();
                    copy
                }
            };
            let grads = loss(&handle, step, rows.clone()).backward();
            let grads = GradientsParams::from_grads(grads, &handle);
            model = optim.step(0.1, model, grads);
            assert_same_bits(&ddp, &model);
        }
        let trained = parameters(&model);
        let plain = ddp.unwrap(model.clone());
        let grads = GradientsParams::from_grads(loss(&plain, 3, rows).backward(), &plain);
        model = optim.step(0.1, model, grads);
        let error = ddp.check_replicas(&model).unwrap_err().to_string();
        (start, trained, error)
    });
    for (start, trained, error) in runs.iter().flatten() {
        let one = load(Mlp::new(&device()), start);
        let one = train(one, (3, 4, 0.1), (0, 1), loss);
        assert_close(trained, &parameters(&one), 1e-6);
        assert!(error.contains("`a.weight`"), "{error}");
    }
}
