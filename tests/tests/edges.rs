//! Graphs and loops off the beaten track: shared uses of tied fields, copies of a model, interrupted passes, gradients collected in parts.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use burn::module::{Module, Param, ParamId, list_param_ids};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::{Ddp, try_backward};
use burn_ddp_tests::{mark, models::*, oracle::*, ranks};
use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

fn rows() -> Tensor<2> {
    batch(0, 0..4, [0, 8], &device())
}

fn words() -> Tensor<2, Int> {
    let words = TensorData::new((0..12).collect::<Vec<i32>>(), [4, 3]);
    Tensor::from_data(words, &device())
}

#[test]
fn ddp_13_tied_fields_used_twice_in_one_backward() {
    let runs = ranks(2).run(
        "ddp_13_tied_fields_used_twice_in_one_backward",
        |ddp: Ddp| {
            let model = ddp.wrap(TwiceTiedLm::new(&device())).unwrap();
            let loss = square(model.forward(words()) - 0.5) + square(model.forward(words()) + 0.25);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            (parameters(&model), gradients(&model, &grads))
        },
    );
    for run in &runs {
        let (start, ours) = &run[0];
        let single: Weights = start
            .iter()
            .filter(|(p, _)| p != "output")
            .cloned()
            .collect();
        let one = load(TiedLm::new(&device()), &single);
        let loss = square(one.forward(words()) - 0.5) + square(one.forward(words()) + 0.25);
        let plain = gradients(&one, &GradientsParams::from_grads(loss.backward(), &one));
        let plain = at(&plain, "embedding.weight").unwrap();
        for field in ["embedding.weight", "output"] {
            for (ours, plain) in at(ours, field).unwrap().iter().zip(plain) {
                assert!(
                    (ours - plain).abs() <= 1e-6 * plain.abs().max(1e-3),
                    "{field}: {ours} is not {plain}"
                );
            }
        }
    }
}

#[test]
fn ddp_28_two_models_in_another_order_on_each_rank() {
    let runs = ranks(2).timeout(10).run(
        "ddp_28_two_models_in_another_order_on_each_rank",
        |ddp: Ddp| {
            let layer = || -> Linear { ddp.wrap(LinearConfig::new(8, 4).init(&device())).unwrap() };
            let (a, b) = (layer(), layer());
            let sum =
                |x: &Linear, y: &Linear| square(x.forward(rows())) + square(y.forward(rows()));
            let mut seen = Vec::new();
            for _ in 0..2 {
                let loss = if ddp.rank() == 0 {
                    sum(&a, &b)
                } else {
                    sum(&b, &a)
                };
                let mut grads = try_backward(&loss).unwrap();
                seen.push(
                    [&a, &b].map(|m| gradients(m, &GradientsParams::from_module(&mut grads, m))),
                );
            }
            seen
        },
    );
    for run in &runs {
        assert_eq!(run[0], run[1]);
        assert!(run[0].iter().flatten().all(|weights| weights.len() == 2));
    }
}

#[test]
fn a_stepped_copy_in_the_same_graph_is_an_error_that_names_the_parameter() {
    let runs = ranks(2).over("shm").run_raw(
        "a_stepped_copy_in_the_same_graph_is_an_error_that_names_the_parameter",
        || {
            let ddp = Ddp::from_env().unwrap();
            let mut model: Linear = ddp.wrap(LinearConfig::new(8, 4).init(&device())).unwrap();
            let target = model.clone();
            let loss = square(model.forward(rows()) - 0.5);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = SgdConfig::new().init().step(0.1, model, grads);
            // The usual target network takes part without gradients.
            let loss = square(
                model.forward(rows()) - Tensor::from_inner(target.valid().forward(rows().inner())),
            );
            assert_eq!(
                GradientsParams::from_grads(loss.backward(), &model).len(),
                2
            );
            let loss = square(model.forward(rows()) - target.forward(rows()));
            try_backward(&loss).map(|_| ()).unwrap_err().to_string()
        },
    );
    for (_, error) in &runs[0] {
        let error = error.as_ref().unwrap();
        assert!(
            error.contains("two values of") || error.contains(" because rank "),
            "{error}"
        );
    }
    let named = |(_, error): &(_, Option<String>)| {
        error.as_ref().unwrap().contains("two values of `weight`")
            || error.as_ref().unwrap().contains("two values of `bias`")
    };
    assert!(runs[0].iter().any(named), "{:?}", runs[0]);
}

#[test]
fn ddp_28_a_step_between_collecting_two_parts() {
    let runs = ranks(2).run("ddp_28_a_step_between_collecting_two_parts", |ddp: Ddp| {
        let mut model = ddp.wrap(TwoHeads::new(&device())).unwrap();
        let trunk: Vec<ParamId> = list_param_ids(&model.trunk);
        let heads: Vec<ParamId> = [list_param_ids(&model.a), list_param_ids(&model.b)].concat();
        let (mut first, mut second) = (SgdConfig::new().init(), SgdConfig::new().init());
        let mut counts = Vec::new();
        for _ in 0..2 {
            let loss = square(model.forward(rows(), ddp.rank() == 0) - 0.5);
            let mut grads = loss.backward();
            let part = GradientsParams::from_params(&mut grads, &model, &trunk);
            model = first.step(0.1, model, part);
            let part = GradientsParams::from_params(&mut grads, &model, &heads);
            counts.push(part.len());
            model = second.step(0.1, model, part);
        }
        ddp.check_replicas(&model).unwrap();
        counts
    });
    // Each rank's own head has been stepped away from its leaf; what matters is that the other rank's is there too.
    assert!(
        runs.iter().flatten().all(|counts| counts == &[4, 4]),
        "{runs:?}"
    );
}

/// A loss with a point between the layers at which backward panics while `boom` is set.
fn marked(model: &Mlp, boom: &Arc<AtomicBool>) -> Tensor<1> {
    let boom = boom.clone();
    let hidden = burn::tensor::activation::relu(model.a.forward(rows()));
    let hidden = mark(hidden, move || {
        if boom.swap(false, Ordering::SeqCst) {
            resume_unwind(Box::new("boom"))
        }
    });
    square(model.b.forward(hidden) - 0.5)
}

fn collect(model: &Mlp, loss: &Tensor<1>) -> Result<Weights, String> {
    let grads = try_backward(loss).map_err(|e| e.to_string())?;
    Ok(gradients(model, &GradientsParams::from_grads(grads, model)))
}

/// Gradients of a first pass, and of one after a pass that was left by a panic. `between(ddp, pass)` runs that pass.
fn interrupted(
    ddp: &Ddp,
    between: impl FnOnce(&Mlp, &Arc<AtomicBool>),
) -> (Weights, Result<Weights, String>) {
    let model = ddp.wrap(Mlp::new(&device())).unwrap();
    let boom = Arc::new(AtomicBool::new(false));
    let before = collect(&model, &marked(&model, &boom)).unwrap();
    between(&model, &boom);
    (before, collect(&model, &marked(&model, &boom)))
}

fn panics(loss: &Tensor<1>, boom: &Arc<AtomicBool>) {
    boom.store(true, Ordering::SeqCst);
    assert!(catch_unwind(AssertUnwindSafe(|| loss.backward())).is_err());
}

#[test]
fn ddp_04_a_pass_left_by_a_panic_under_no_sync_leaves_nothing() {
    let runs = ranks(2).run(
        "ddp_04_a_pass_left_by_a_panic_under_no_sync_leaves_nothing",
        |ddp: Ddp| {
            interrupted(&ddp, |model, boom| {
                let loss = marked(model, boom);
                ddp.without_sync(|| panics(&loss, boom));
            })
        },
    );
    for (before, after) in runs.iter().flatten() {
        assert_eq!(after.as_ref(), Ok(before));
    }
}

#[test]
fn ddp_04_another_loss_after_a_pass_left_by_a_panic_is_not_doubled() {
    let runs = ranks(2).run(
        "ddp_04_another_loss_after_a_pass_left_by_a_panic_is_not_doubled",
        |ddp: Ddp| {
            // Both forwards come first; large buckets, so that nothing has been sent when the pass is left.
            let model = ddp.wrap(Mlp::new(&device())).unwrap();
            let (boom, calm) = (Arc::default(), Arc::default());
            let before = collect(&model, &marked(&model, &calm)).unwrap();
            let (first, second) = (marked(&model, &boom), marked(&model, &calm));
            panics(&first, &boom);
            (before, collect(&model, &second))
        },
    );
    for (before, after) in runs.iter().flatten() {
        assert_eq!(after.as_ref(), Ok(before));
    }
}

#[test]
fn ddp_04_a_closing_pass_left_by_a_panic_is_an_error() {
    let runs =
        ranks(2)
            .over("shm")
            .run_raw("ddp_04_a_closing_pass_left_by_a_panic_is_an_error", || {
                let ddp = Ddp::from_env().unwrap();
                let (_, after) = interrupted(&ddp, |model, boom| {
                    ddp.without_sync(|| collect(model, &marked(model, boom)).unwrap());
                    panics(&marked(model, boom), boom);
                });
                after.unwrap_err()
            });
    for (_, error) in &runs[0] {
        let error = error.as_ref().unwrap();
        assert!(error.contains("interrupted by a panic"), "{error}");
    }
}

#[test]
fn a_value_taken_inside_backward_is_the_plain_one() {
    let runs = ranks(2).run(
        "a_value_taken_inside_backward_is_the_plain_one",
        |ddp: Ddp| {
            let model = ddp.wrap(Mlp::new(&device())).unwrap();
            let copy = model.clone();
            let hidden = burn::tensor::activation::relu(model.a.forward(rows()));
            let hidden = mark(hidden, move || {
                assert_eq!(copy.a.weight.val().inner().dims(), [8, 16])
            });
            let loss = square(model.b.forward(hidden) - 0.5);
            GradientsParams::from_grads(loss.backward(), &model).len()
        },
    );
    assert!(runs.iter().flatten().all(|count| *count == 4));
}

#[derive(Module, Debug)]
struct Named {
    ddp: Param<Tensor<1>>,
    other: Param<Tensor<1>>,
}

#[test]
fn ddp_06_a_field_may_be_called_ddp() {
    let runs = ranks(2).run("ddp_06_a_field_may_be_called_ddp", |ddp: Ddp| {
        let value = |x: f32| {
            Param::from_tensor(Tensor::<1>::full(
                [2],
                x + 10.0 * ddp.rank() as f32,
                &device(),
            ))
        };
        let model = ddp
            .wrap(Named {
                ddp: value(1.0),
                other: value(2.0),
            })
            .unwrap();
        ddp.check_replicas(&model).unwrap();
        parameters(&model)
    });
    for weights in runs.iter().flatten() {
        assert_eq!(at(weights, "ddp").unwrap(), [1.0, 1.0]);
        assert_eq!(at(weights, "other").unwrap(), [2.0, 2.0]);
    }
}

#[test]
fn a_model_that_only_one_rank_cannot_wrap_is_an_error_on_all() {
    let runs = ranks(2).timeout(10).run_raw(
        "a_model_that_only_one_rank_cannot_wrap_is_an_error_on_all",
        || {
            let ddp = Ddp::from_env().unwrap();
            let model = Mlp::new(&device());
            let model = if ddp.rank() == 1 {
                model.freeze()
            } else {
                model
            };
            let error = ddp.wrap(model).map(|_| ()).unwrap_err().to_string();
            ddp.barrier().unwrap();
            error
        },
    );
    for run in &runs {
        let text = |rank: usize| run[rank].1.clone().unwrap();
        assert!(
            text(0).contains("rank 1 cannot: rank 1: the model has no trainable parameter"),
            "{}",
            text(0)
        );
        assert!(
            text(1).starts_with("rank 1: the model has no trainable parameter"),
            "{}",
            text(1)
        );
    }
}

#[derive(Module, Debug)]
struct Six {
    layers: Vec<Linear>,
}

/// While the return steps of one pass run, another thread begins a pass of a copy: it is refused, and the first loses no gradient.
#[test]
fn ddp_28_another_thread_between_two_return_steps() {
    ranks(1).over("auto").run(
        "ddp_28_another_thread_between_two_return_steps",
        |ddp: Ddp| {
            let layer = |_| LinearConfig::new(8, 4).init(&device());
            let model = ddp
                .wrap(Six {
                    layers: (0..6).map(layer).collect(),
                })
                .unwrap();
            let pass = |input: &dyn Fn() -> Tensor<2>| {
                let losses = model.layers.iter().map(|l| square(l.forward(input())));
                let loss = losses.reduce(|a, b| a + b).unwrap();
                gradients(
                    &model,
                    &GradientsParams::from_grads(loss.backward(), &model),
                )
            };
            let undisturbed = pass(&|| rows().require_grad());
            let refused = Arc::new(AtomicBool::new(false));
            let (copy, seen) = (model.clone(), refused.clone());
            // As deep as the return steps, and so somewhere among them.
            let disturbed = pass(&|| {
                let (copy, seen) = (copy.clone(), seen.clone());
                mark(rows().require_grad(), move || {
                    let copy = copy.clone();
                    let other = std::thread::spawn(move || {
                        let loss = square(copy.layers[0].forward(rows()));
                        let outcome: Result<_, burn_ddp::Error> = try_backward(&loss);
                        outcome.err().map(|error| error.to_string())
                    });
                    if let Some(error) = other.join().unwrap() {
                        assert!(error.contains("thread"), "{error}");
                        seen.store(true, Ordering::Relaxed);
                    }
                })
            });
            assert!(refused.load(Ordering::Relaxed));
            assert_eq!(disturbed, undisturbed);
        },
    );
}
