//! Accumulation windows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::optim::{GradientsAccumulator, GradientsParams};
use burn_ddp::{Ddp, try_backward};
use burn_ddp_tests::{Ending, models::Scalar, oracle::*, ranks};
use std::panic::{self, AssertUnwindSafe};

/// This rank's numbers, of those for rank 0 and rank 1.
fn mine<const N: usize>(ddp: &Ddp, xs: [[f32; N]; 2]) -> [f32; N] {
    xs[ddp.rank()]
}

fn backward(model: &Scalar, x: f32) -> GradientsParams {
    GradientsParams::from_grads(model.loss(x).backward(), model)
}

/// The gradient that a window over `xs` ends with. All before its last pass give nothing and send nothing.
fn window(ddp: &Ddp, model: &Scalar, xs: &[f32]) -> Option<f32> {
    let (last, first) = xs.split_last().unwrap();
    for x in first {
        let before = ddp.stats();
        let _guard = ddp.no_sync();
        assert_eq!(model.gradient(&backward(model, *x)), None);
        assert_eq!(ddp.stats(), before);
    }
    model.gradient(&backward(model, *last))
}

/// Bucket sets and collectives that `f` issues.
fn sent<T>(ddp: &Ddp, f: impl FnOnce() -> T) -> (T, u64, u64) {
    let before = ddp.stats();
    let result = f();
    let after = ddp.stats();
    (
        result,
        after.rounds - before.rounds,
        after.collectives - before.collectives,
    )
}

#[test]
fn ddp_04_the_whole_window_is_reduced_once() {
    ranks(2).run("ddp_04_the_whole_window_is_reduced_once", |ddp: Ddp| {
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        // The first round also agrees on the order of the buckets.
        let first = sent(&ddp, || {
            window(&ddp, &model, &mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]))
        });
        assert_eq!(first, (Some(7.0), 1, 2));
        let one = sent(&ddp, || window(&ddp, &model, &mine(&ddp, [[5.0], [7.0]])));
        assert_eq!(one, (Some(6.0), 1, 1));
        let three = sent(&ddp, || {
            window(
                &ddp,
                &model,
                &mine(&ddp, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
            )
        });
        assert_eq!(three, (Some(10.5), 1, 1));
        let again = sent(&ddp, || {
            window(&ddp, &model, &mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]))
        });
        assert_eq!(again, (Some(7.0), 1, 1));
    });
}

#[test]
fn ddp_04_a_panic_inside_the_guard_restores_synchronisation() {
    ranks(2).run(
        "ddp_04_a_panic_inside_the_guard_restores_synchronisation",
        |ddp: Ddp| {
            let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
            let [x, y] = mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]);
            // After the backward pass: it stays in the window.
            let caught = panic::catch_unwind(AssertUnwindSafe(|| {
                ddp.without_sync(|| {
                    assert_eq!(model.gradient(&backward(&model, x)), None);
                    panic::resume_unwind(Box::new("expected"));
                })
            }));
            assert!(caught.is_err());
            assert_eq!(model.gradient(&backward(&model, y)), Some(7.0));
            // Between forward and backward: nothing came of that forward.
            let caught = panic::catch_unwind(AssertUnwindSafe(|| {
                let _outer = ddp.no_sync();
                let _guard = ddp.no_sync();
                let _loss = model.loss(100.0);
                panic::resume_unwind(Box::new("expected"));
            }));
            assert!(caught.is_err());
            for _ in 0..2 {
                assert_eq!(window(&ddp, &model, &[x, y]), Some(7.0));
            }
        },
    );
}

#[test]
fn ddp_04_an_early_return_and_nested_guards_restore_synchronisation() {
    ranks(2).run(
        "ddp_04_an_early_return_and_nested_guards_restore_synchronisation",
        |ddp: Ddp| {
            let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
            let [x, y] = mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]);
            let fails = || -> Option<()> {
                let _guard = ddp.no_sync();
                None?;
                Some(())
            };
            assert_eq!(fails(), None);
            let outer = ddp.no_sync();
            drop(ddp.no_sync());
            assert_eq!(
                model.gradient(&backward(&model, x)),
                None,
                "the outer guard is alive"
            );
            drop(outer);
            assert_eq!(model.gradient(&backward(&model, y)), Some(7.0));
        },
    );
}

#[test]
fn ddp_04_with_burns_accumulator() {
    ranks(2).run("ddp_04_with_burns_accumulator", |ddp: Ddp| {
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        let [x, y] = mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]);
        let mut accumulator = GradientsAccumulator::new();
        // Every pass synchronised: 2 and 5 add up.
        for x in [x, y] {
            accumulator.accumulate(&model, backward(&model, x));
        }
        assert_eq!(model.gradient(&accumulator.grads()), Some(7.0));
        // Only the last one.
        let (_, rounds, collectives) = sent(&ddp, || {
            ddp.without_sync(|| accumulator.accumulate(&model, backward(&model, x)));
            accumulator.accumulate(&model, backward(&model, y));
        });
        assert_eq!((rounds, collectives), (1, 1));
        assert_eq!(model.gradient(&accumulator.grads()), Some(7.0));
    });
}

#[test]
fn ddp_04_two_models_under_one_guard() {
    ranks(2).run("ddp_04_two_models_under_one_guard", |ddp: Ddp| {
        let [a, b] = [1.0, 2.0].map(|w| ddp.wrap(Scalar::new(w, &device())).unwrap());
        let [x, y] = mine(&ddp, [[1.0, 2.0], [3.0, 8.0]]);
        let step = |x: f32| {
            let mut grads = (a.loss(x) + b.loss(x * 10.0)).backward();
            [&a, &b].map(|model| model.gradient(&GradientsParams::from_module(&mut grads, model)))
        };
        for round in 0..2 {
            let (result, rounds, collectives) = sent(&ddp, || {
                assert_eq!(ddp.without_sync(|| step(x)), [None, None]);
                step(y)
            });
            assert_eq!(result, [Some(7.0), Some(70.0)]);
            // One set of buckets per model; the first also agrees on their order.
            assert_eq!((rounds, collectives), (2, if round == 0 { 4 } else { 2 }));
        }
    });
}

#[test]
fn ddp_04_unequal_windows_are_an_error_on_both_ranks() {
    let runs = ranks(2).run_raw("ddp_04_unequal_windows_are_an_error_on_both_ranks", || {
        let ddp = Ddp::from_env().unwrap();
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        if ddp.is_main() {
            ddp.without_sync(|| backward(&model, 1.0));
        }
        try_backward(&model.loss(2.0)).err().unwrap().to_string()
    });
    for run in runs {
        for (ending, text) in run {
            assert_eq!(ending, Ending::Exit(0));
            let text = text.unwrap();
            let lengths = "1 backward pass(es) on rank(s) [1], 2 on [0]";
            assert!(text.contains(lengths), "{text}");
        }
    }
}
