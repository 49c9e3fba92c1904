//! When and how often gradients are sent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_ddp::{Ddp, Error, WrapConfig, try_backward};
use burn_ddp_tests::{Ending, mark, models::*, oracle::*, ranks};
use std::{
    sync::{Arc, Mutex},
    thread,
};

#[test]
fn ddp_42_many_small_parameters_travel_together() {
    ranks(2).run(
        "ddp_42_many_small_parameters_travel_together",
        |ddp: Ddp| {
            let model = ddp.wrap(Vectors::new(500, 64, &device())).unwrap();
            for step in 0..3 {
                let before = ddp.stats().collectives;
                let parts = model.w.iter().map(|w| w.val() * (1.0 + ddp.rank() as f32));
                let loss = Tensor::cat(parts.collect(), 0).sum();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                // The first step also agrees on the order of the buckets.
                assert_eq!(
                    ddp.stats().collectives - before,
                    if step == 0 { 2 } else { 1 }
                );
                let gradients = gradients(&model, &grads);
                assert_eq!(gradients.len(), 500);
                assert!(
                    gradients.iter().all(|(_, g)| g == &[1.5; 64]),
                    "the mean of 1 and 2"
                );
            }
            let payload = 500 * 64 * 4;
            let bytes = ddp.stats().gradient_bytes_per_step;
            assert!(
                (payload..payload + payload / 50).contains(&bytes),
                "{bytes}"
            );
        },
    );
}

/// What one backward pass of [`Deep`] showed.
struct Pass {
    /// Collectives of this pass that had been issued when backward passed the output of layer 1, the last
    /// point before the first two layers.
    issued: u64,
    trace: burn_ddp::RoundTrace,
}

fn deep_pass(ddp: &Ddp, model: &Deep) -> Pass {
    let before = ddp.stats().collectives;
    let issued = Arc::new(Mutex::new(None));
    let x = batch(0, 0..4, [0, 16], &device());
    let y = model.forward(x, |layer, x| {
        if layer != 1 {
            return x;
        }
        let (ddp, issued) = (ddp.clone(), issued.clone());
        mark(x, move || {
            *issued.lock().unwrap() = Some(ddp.stats().collectives - before)
        })
    });
    let _ = square(y - 0.5).backward();
    let issued = issued
        .lock()
        .unwrap()
        .expect("backward has passed the mark");
    Pass {
        issued,
        trace: ddp.traces().swap_remove(0),
    }
}

fn of_first_two_layers(path: &str) -> bool {
    path.starts_with("layers.0.") || path.starts_with("layers.1.")
}

#[test]
fn the_first_bucket_leaves_before_the_last_quarter_of_backward() {
    ranks(2).run(
        "the_first_bucket_leaves_before_the_last_quarter_of_backward",
        |ddp: Ddp| {
            // A bucket per layer.
            let layer = 4 * (16 * 16 + 16);
            let config = WrapConfig::new()
                .first_bucket_bytes(layer)
                .bucket_bytes(layer);
            let model = ddp.wrap_with(Deep::new(8, &device()), config).unwrap();
            deep_pass(&ddp, &model);
            for _ in 0..3 {
                let Pass { issued, trace } = deep_pass(&ddp, &model);
                assert_eq!(issued, 6, "the buckets of layers 7 to 2");
                assert_eq!(trace.buckets.len(), 8);
                assert!(
                    trace.buckets[0]
                        .parameters
                        .iter()
                        .all(|path| path.starts_with("layers.7."))
                );
                let launched = trace.buckets[0].launched;
                let late: Vec<_> = trace
                    .ready
                    .iter()
                    .filter(|(path, _)| of_first_two_layers(path))
                    .collect();
                assert_eq!(late.len(), 4);
                assert!(late.iter().all(|(_, ready)| *ready > launched), "{trace:?}");
            }
        },
    );
}

#[test]
fn one_bucket_for_all_leaves_after_backward() {
    ranks(2).run("one_bucket_for_all_leaves_after_backward", |ddp: Ddp| {
        let model = ddp.wrap(Deep::new(8, &device())).unwrap();
        deep_pass(&ddp, &model);
        let Pass { issued, trace } = deep_pass(&ddp, &model);
        assert_eq!(issued, 0);
        assert_eq!(trace.buckets.len(), 1);
        let launched = trace.buckets[0].launched;
        assert!(
            trace.ready.iter().all(|(_, ready)| *ready <= launched),
            "{trace:?}"
        );
    });
}

#[test]
fn ddp_25_d_a_metric_between_forward_and_backward() {
    ranks(2).run(
        "ddp_25_d_a_metric_between_forward_and_backward",
        |ddp: Ddp| {
            let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
            let x = [1.0, 4.0][ddp.rank()];
            let metric = || ddp.mean([10.0, 20.0][ddp.rank()]).unwrap();
            for _ in 0..3 {
                let loss = model.loss(x);
                let (gradient, mean) = if ddp.is_main() {
                    // A rank that blocks here would wait for rank 1, which waits for its gradient.
                    thread::scope(|scope| {
                        let mean = scope.spawn(metric);
                        let grads = loss.backward();
                        (
                            GradientsParams::from_grads(grads, &model),
                            mean.join().unwrap(),
                        )
                    })
                } else {
                    let grads = loss.backward();
                    (GradientsParams::from_grads(grads, &model), metric())
                };
                assert_eq!(model.gradient(&gradient), Some(2.5));
                assert_eq!(mean, 15.0);
            }
        },
    );
}

#[test]
fn ddp_25_d_a_metric_that_blocks_backward_is_an_error() {
    let runs =
        ranks(2)
            .timeout(1)
            .run_raw("ddp_25_d_a_metric_that_blocks_backward_is_an_error", || {
                let ddp = Ddp::from_env().unwrap();
                let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
                let loss = model.loss(1.0);
                // Each waits for the other, in operations that never meet.
                let error: Error = if ddp.is_main() {
                    ddp.mean(10.0).unwrap_err()
                } else {
                    try_backward(&loss).err().unwrap()
                };
                error.to_string()
            });
    for run in runs {
        for (rank, (ending, text)) in run.into_iter().enumerate() {
            assert_eq!(ending, Ending::Exit(0));
            let text = text.unwrap();
            assert!(text.starts_with(&format!("rank {rank}: ")), "{text}");
            assert!(text.contains("timed out"), "{text}");
        }
    }
}
