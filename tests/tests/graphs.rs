//! Graphs that use a parameter several times, and several graphs per step.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::{Module, ParamId, list_param_ids};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::Ddp;
use burn_ddp_tests::{models::*, oracle::*, ranks};
use std::ops::Range;

/// Steps, rows of the global batch, learning rate.
const RUN: (u64, usize, f64) = (5, 8, 0.05);

/// Trains on two ranks over both transports and compares with one plain process: O1 and O2.
fn compare<M: Module + 'static>(
    test: &'static str,
    (ours, new): (Device, impl Fn(&Device) -> M),
    loss: impl Fn(&M, u64, Range<usize>, &Device) -> Tensor<1>,
) {
    let runs = ranks(2).run(test, |ddp: Ddp| {
        let model = ddp.wrap(new(&ours)).unwrap();
        let start = parameters(&model);
        let model = train(model, RUN, (ddp.rank(), 2), |m, step, rows| {
            loss(m, step, rows, &ours)
        });
        assert_same_bits(&ddp, &model);
        (start, parameters(&model))
    });
    for run in &runs {
        let (start, end) = &run[0];
        let plain = device();
        let one = load(new(&plain), start);
        let one = train(one, RUN, (0, 1), |m, step, rows| {
            loss(m, step, rows, &plain)
        });
        assert_close(end, &parameters(&one), 1e-6);
    }
}

fn words(step: u64, rows: Range<usize>, device: &Device) -> Tensor<2, Int> {
    let rows_of = rows
        .clone()
        .flat_map(|row| (0..3).map(move |i| ((row as u64 * 5 + i * 7 + step) % 12) as i32));
    Tensor::from_data(
        TensorData::new(rows_of.collect::<Vec<i32>>(), [rows.len(), 3]),
        device,
    )
}

/// A record of a wrapped model holds an id for each field; they are one parameter all the same.
#[test]
fn ddp_13_a_tie_survives_saving_and_loading() {
    let device = device();
    ranks(2).run("ddp_13_a_tie_survives_saving_and_loading", |ddp: Ddp| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model");
        let model = ddp.wrap(TwiceTiedLm::new(&device)).unwrap();
        model.save_file(&path).unwrap();
        let model = TwiceTiedLm::new(&device).try_load_file(&path).unwrap();
        assert_ne!(model.embedding.weight.id, model.output.id);
        let model = ddp.wrap(model).unwrap();
        let loss =
            |m: &TwiceTiedLm, step, rows| square(m.forward(words(step, rows, &device)) - 0.5);
        let model = train(model, (2, 8, 0.05), (ddp.rank(), 2), loss);
        let (a, b) = (model.embedding.weight.val(), model.output.val());
        assert_eq!(floats(a), floats(b));
        // As in the test below: the matrix once.
        let bytes = ddp.stats().gradient_bytes_per_step;
        assert_eq!(bytes, 4 * (96 + 64 + 8) + 4 * (3 + 2 * 11));
    });
}

#[test]
fn ddp_13_one_parameter_in_two_fields() {
    let device = device();
    let runs = ranks(2).run("ddp_13_one_parameter_in_two_fields", |ddp: Ddp| {
        let model = TwiceTiedLm::new(&device);
        assert_eq!(model.embedding.weight.id, model.output.id);
        let mut model = ddp.wrap(model).unwrap();
        let start = parameters(&model);
        let loss =
            |m: &TwiceTiedLm, step, rows| square(m.forward(words(step, rows, &device)) - 0.5);
        for _ in 0..3 {
            let before = floats(model.output.val());
            model = train(model, (1, 8, 0.05), (ddp.rank(), 2), loss);
            assert_ne!(floats(model.output.val()), before);
            assert_eq!(
                floats(model.embedding.weight.val()),
                floats(model.output.val()),
                "still tied"
            );
        }
        assert_same_bits(&ddp, &model);
        // Matrix 12 x 8 once, mix 8 x 8 and 8; one flag each and two window lengths.
        assert_eq!(
            ddp.stats().gradient_bytes_per_step,
            4 * (96 + 64 + 8) + 4 * (3 + 2 * 11)
        );
        let mut sent = ddp.traces()[0].buckets[0].parameters.clone();
        sent.sort();
        assert_eq!(sent, ["embedding.weight", "mix.bias", "mix.weight"]);
        (start, parameters(&model))
    });
    for run in &runs {
        // Plain Burn with the matrix in one field.
        let (start, end) = &run[0];
        let single = |weights: &Weights| {
            weights
                .iter()
                .filter(|(path, _)| path != "output")
                .cloned()
                .collect()
        };
        let loss = |m: &TiedLm, step, rows| square(m.forward(words(step, rows, &device)) - 0.5);
        let mut one = load(TiedLm::new(&device), &single(start));
        for _ in 0..3 {
            one = train(one, (1, 8, 0.05), (0, 1), loss);
        }
        assert_close(&single(end), &parameters(&one), 1e-6);
    }
}

#[test]
fn ddp_13_two_forwards_one_backward() {
    compare(
        "ddp_13_two_forwards_one_backward",
        (device(), Mlp::new),
        |model, step, rows, device| {
            let [x, y] =
                [step, step + 100].map(|s| model.forward(batch(s, rows.clone(), [0, 8], device)));
            square(x - 0.5) + square(y + 0.25)
        },
    );
}

#[test]
fn ddp_13_recomputation() {
    let ours = device().gradient_checkpointing();
    compare(
        "ddp_13_recomputation",
        (ours, Rnn::new),
        |model, step, rows, device| {
            square(model.forward(batch(step, rows, [0, 8], device), 5) - 0.5)
        },
    );
}

/// Generator and discriminator.
type Gan = (Mlp, Linear);

fn new_gan(device: &Device) -> Gan {
    (Mlp::new(device), LinearConfig::new(4, 1).init(device))
}

/// Five rounds of a least-squares GAN (X. Mao et al., ICCV 2017); with `frozen` the generator's loss
/// goes through a discriminator that takes no gradients.
fn train_gan((mut g, mut d): Gan, rank: usize, world: usize, frozen: bool) -> Gan {
    let (mut of_g, mut of_d) = (SgdConfig::new().init(), SgdConfig::new().init());
    let rows = rank * 8 / world..(rank + 1) * 8 / world;
    for round in 0..5 {
        let real: Tensor<2> = batch(round, rows.clone(), [0, 4], &device());
        let noise: Tensor<2> = batch(100 + round, rows.clone(), [0, 8], &device());
        let fake = g.forward(noise.clone()).detach();
        let loss = square(d.forward(real) - 1.0) + square(d.forward(fake));
        let grads = GradientsParams::from_grads(loss.backward(), &d);
        d = of_d.step(0.05, d, grads);

        let judge = if frozen {
            d.clone().freeze()
        } else {
            d.clone()
        };
        let loss = square(judge.forward(g.forward(noise)) - 1.0);
        let grads = GradientsParams::from_grads(loss.backward(), &g);
        g = of_g.step(0.05, g, grads);
    }
    (g, d)
}

#[test]
fn ddp_28_generator_and_discriminator() {
    for (frozen, name) in [(false, "through"), (true, "frozen")] {
        let runs = ranks(2)
            .named(name)
            .run("ddp_28_generator_and_discriminator", |ddp: Ddp| {
                let (g, d) = new_gan(&device());
                let (g, d) = (ddp.wrap(g).unwrap(), ddp.wrap(d).unwrap());
                let start = (parameters(&g), parameters(&d));
                let (g, d) = train_gan((g, d), ddp.rank(), 2, frozen);
                assert_same_bits(&ddp, &g);
                assert_same_bits(&ddp, &d);
                // D's own 5 backward passes and G's 5, which pass through D too unless it is frozen.
                assert_eq!(ddp.stats().rounds, if frozen { 10 } else { 15 });
                (start, (parameters(&g), parameters(&d)))
            });
        for run in &runs {
            let ((g, d), end) = &run[0];
            let new = new_gan(&device());
            let (g, d) = train_gan((load(new.0, g), load(new.1, d)), 0, 1, frozen);
            assert_close(&end.0, &parameters(&g), 1e-6);
            assert_close(&end.1, &parameters(&d), 1e-6);
        }
    }
}

/// Four steps of two losses, two backward calls and two optimizers over disjoint parts.
fn train_two_heads(mut model: TwoHeads, rank: usize, world: usize) -> TwoHeads {
    let ids = |parts: &[Vec<ParamId>]| parts.concat();
    let left = ids(&[list_param_ids(&model.trunk), list_param_ids(&model.a)]);
    let right = list_param_ids(&model.b);
    let (mut first, mut second) = (SgdConfig::new().init(), SgdConfig::new().init());
    let rows = rank * 8 / world..(rank + 1) * 8 / world;
    for step in 0..4 {
        let loss =
            |a: bool| square(model.forward(batch(step, rows.clone(), [0, 8], &device()), a) - 0.5);
        // Both forward passes before both backward passes, in either order.
        let (a, b) = (loss(true), loss(false));
        let (mut of_a, mut of_b) = if step % 2 == 0 {
            let of_a = a.backward();
            (of_a, b.backward())
        } else {
            let of_b = b.backward();
            (a.backward(), of_b)
        };
        let left = GradientsParams::from_params(&mut of_a, &model, &left);
        let right = GradientsParams::from_params(&mut of_b, &model, &right);
        assert_eq!((left.len(), right.len()), (6, 2));
        model = first.step(0.05, model, left);
        model = second.step(0.1, model, right);
    }
    model
}

#[test]
fn ddp_28_one_trunk_two_backward_calls() {
    let runs = ranks(2).run("ddp_28_one_trunk_two_backward_calls", |ddp: Ddp| {
        let model = ddp.wrap(TwoHeads::new(&device())).unwrap();
        let start = parameters(&model);
        let model = train_two_heads(model, ddp.rank(), 2);
        assert_same_bits(&ddp, &model);
        assert_eq!(ddp.stats().rounds, 8);
        (start, parameters(&model))
    });
    for run in &runs {
        let (start, end) = &run[0];
        let one = train_two_heads(load(TwoHeads::new(&device()), start), 0, 1);
        assert_close(end, &parameters(&one), 1e-6);
    }
}
