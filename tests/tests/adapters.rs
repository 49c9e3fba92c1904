//! What changes how a model computes and what it trains: LoRA, and activations that are computed again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::{Lora, Module, QLora, Quantizer};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::quantization::{Calibration, QuantValue};
use burn_ddp::{Ddp, Reduction, WrapConfig};
use burn_ddp_tests::{Ending, assert_says, models::*, oracle::*, ranks};
use std::ops::Range;

/// Factors of rank 2 at both weights.
fn adapted(device: &Device) -> Mlp {
    Mlp::new(device).apply_lora(Lora::new(2, 4.0))
}

fn loss(model: &Mlp, step: u64, rows: Range<usize>) -> Tensor<1> {
    square(model.forward(batch(step, rows, [0, 8], &device())) - 0.5)
}

/// This rank's half of eight rows.
fn half(ddp: &Ddp) -> Range<usize> {
    ddp.rank() * 4..ddp.rank() * 4 + 4
}

fn is_factor(path: &str) -> bool {
    path.contains(".lora.")
}

/// (those of the base, those of the factors).
fn parts(weights: Weights) -> (Weights, Weights) {
    weights.into_iter().partition(|(path, _)| !is_factor(path))
}

fn step(model: Mlp, at: u64, rows: Range<usize>) -> Mlp {
    let grads = GradientsParams::from_grads(loss(&model, at, rows).backward(), &model);
    SgdConfig::new().init().step(0.1, model, grads)
}

#[test]
fn lora_trains_its_factors_as_in_one_process() {
    let runs = ranks(2).run("lora_trains_its_factors_as_in_one_process", |ddp: Ddp| {
        let mut plain = adapted(&device());
        let mut model = ddp.wrap(plain.clone()).unwrap();
        let (base, factors) = parts(parameters(&model));
        for at in 0..5 {
            model = step(model, at, half(&ddp));
            plain = step(plain, at, 0..8);
            assert_same_bits(&ddp, &model);
        }
        let bytes = ddp.stats().gradient_bytes_per_step;
        let end = parts(parameters(&model));
        let input = batch(9, 0..8, [0, 8], &device());
        let output = floats(model.forward(input.clone()));
        // The factors become part of the weights.
        let merged = ddp.unwrap(model).materialize();
        assert_same_bits(&ddp, &merged);
        let of_merged = floats(merged.forward(input));
        let count = merged.num_params();
        let one = parts(parameters(&plain));
        ((base, factors), end, one, bytes, (output, of_merged, count))
    });
    for run in &runs {
        let ((base, factors), end, one, bytes, _) = &run[0];
        assert_eq!(factors.len(), 4, "{factors:?}");
        assert_eq!(end.0, *base);
        assert_close(&end.1, &one.1, 1e-6);
        assert!(factors.iter().zip(&end.1).all(|(from, to)| from.1 != to.1));
        // 8x2, 2x16, 16x2 and 2x4 with a flag each, and what two ranks say of themselves: nothing of the base.
        assert_eq!(*bytes, 4 * (16 + 32 + 32 + 8) + 4 * (4 + 2 * 11));
        for (.., (output, of_merged, count)) in run {
            assert_eq!(*count, 8 * 16 + 16 + 16 * 4 + 4);
            assert_eq!(*output, run[0].4.0);
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
            assert!(output.iter().zip(of_merged).all(close));
        }
    }
}

#[test]
fn lora_and_accumulation() {
    let runs = ranks(2).run("lora_and_accumulation", |ddp: Ddp| {
        let mut plain = adapted(&device());
        let mut model = ddp.wrap(plain.clone()).unwrap();
        // One factor of each pair begins at zero, and the other has no gradient then.
        model = step(model, 0, half(&ddp));
        plain = step(plain, 0, 0..8);
        for at in [1, 2] {
            ddp.without_sync(|| loss(&model, at, half(&ddp)).backward());
        }
        let collect = |model: &Mlp, loss: Tensor<1>| {
            let grads = GradientsParams::from_grads(loss.backward(), model);
            gradients(model, &grads)
        };
        let whole = [1, 2, 3].map(|at| loss(&plain, at, 0..8));
        let whole = whole.into_iter().reduce(|a, b| a + b).unwrap();
        let ours = collect(&model, loss(&model, 3, half(&ddp)));
        (ours, collect(&plain, whole), ddp.stats().rounds)
    });
    for run in &runs {
        let (ours, whole, rounds) = &run[0];
        assert!(ours.len() == 4 && ours.iter().all(|(path, _)| is_factor(path)));
        assert_close(ours, whole, 1e-6);
        assert_eq!(run[1].0, *ours);
        assert_eq!(*rounds, 2);
    }
}

#[test]
fn lora_on_a_quantized_base() {
    let runs = ranks(2).run("lora_on_a_quantized_base", |ddp: Ddp| {
        let device = device();
        let scheme = device.settings().quantization.scheme;
        let quantizer = Quantizer::new(Calibration::MinMax, scheme.with_value(QuantValue::Q8S));
        let lora = QLora::new(Lora::new(2, 4.0), quantizer);
        let mut plain = Mlp::new(&device).apply_qlora(lora);
        let mut model = ddp.wrap(plain.clone()).unwrap();
        for at in 0..3 {
            model = step(model, at, half(&ddp));
            plain = step(plain, at, 0..8);
            assert_same_bits(&ddp, &model);
        }
        let output = |model: &Mlp| floats(model.forward(batch(9, 0..8, [0, 8], &device)));
        (output(&model), output(&plain))
    });
    for run in &runs {
        let weights = |values: &[f32]| vec![(String::new(), values.to_vec())];
        assert_close(&weights(&run[0].0), &weights(&run[0].1), 1e-5);
        assert_eq!(run[1].0, run[0].0);
    }
}

#[test]
fn lora_with_a_trainable_base_is_an_error_that_names_it() {
    let test = "lora_with_a_trainable_base_is_an_error_that_names_it";
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let error = ddp.wrap(adapted(&device()).unfreeze()).unwrap_err();
        error.to_string()
    });
    for (ending, error) in runs.into_iter().flatten() {
        assert_eq!(ending, Ending::Exit(0));
        let text = "`a.weight` is trainable and carries a reparameterization of its own";
        assert_says(&error.unwrap(), &[text, "Freeze the base"]);
    }
}

/// Rows of each rank in the two passes of a window: all eight of a batch.
const ROWS: [[Range<usize>; 2]; 2] = [[0..3, 3..4], [4..5, 5..8]];

#[test]
fn ddp_13_recomputation_in_a_window_of_weighted_passes() {
    let test = "ddp_13_recomputation_in_a_window_of_weighted_passes";
    let runs = ranks(2).run(test, |ddp: Ddp| {
        let device = device().gradient_checkpointing();
        let config = WrapConfig::new().reduction(Reduction::WeightedMean);
        let model = ddp.wrap_with(Rnn::new(&device), config).unwrap();
        let start = parameters(&model);
        let [first, last] = ROWS[ddp.rank()].clone().map(|rows| {
            let loss = square(model.forward(batch(0, rows.clone(), [0, 8], &device), 5) - 0.5);
            (loss, rows.len())
        });
        ddp.without_sync(|| ddp.weighted(first.1, || first.0.backward()));
        let grads = ddp.weighted(last.1, || last.0.backward());
        let grads = GradientsParams::from_grads(grads, &model);
        (start, gradients(&model, &grads))
    });
    for run in &runs {
        let (start, ours) = &run[0];
        let one = load(Rnn::new(&device()), start);
        let loss = square(one.forward(batch(0, 0..8, [0, 8], &device()), 5) - 0.5);
        let grads = GradientsParams::from_grads(loss.backward(), &one);
        assert_close(ours, &gradients(&one, &grads), 1e-6);
        assert_eq!(run[1].1, *ours);
    }
}
