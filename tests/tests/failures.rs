//! A rank dies, leaves early or is late.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn_ddp::{Ddp, try_backward};
use burn_ddp_tests::{
    Ending,
    dying::{self, Moment, VICTIM},
    log_to_stderr,
    models::{Mlp, Scalar},
    oracle::{batch, device},
    ranks,
};
use std::{
    thread,
    time::{Duration, Instant},
};

const SOON: Duration = Duration::from_secs(5);

/// Rank 2 of 4 dies in this way before, during and after backward; the survivors say so and end.
fn survivors_are_told(test: &str, way: &str, ending: Ending) {
    for (name, moment) in [
        ("before", Moment::Before),
        ("during", Moment::During),
        ("after", Moment::After),
    ] {
        let runs = ranks(4).named(name).watch(test, || {
            let ddp = Ddp::from_env().unwrap();
            dying::train(&ddp, moment, dying::way(way)).map_err(|e| e.to_string())
        });
        for (run, mut traces) in runs.into_iter().enumerate() {
            let victim = traces.remove(VICTIM);
            assert_eq!(
                (&victim.ending, &victim.result),
                (&ending, &None),
                "{name}: {victim:#?}"
            );
            for trace in traces {
                let error = trace.finished().as_ref().unwrap_err();
                // It names the rank and the operation, and the process has ended, all in the time for the error alone.
                assert!(
                    error.contains("lost rank 2") && error.contains("all_reduce(mean) of "),
                    "{name}, run {run}: {error}"
                );
                assert_eq!(trace.stderr, "", "{name}, run {run}");
                let after = trace.after.saturating_sub(victim.after);
                assert!(after < SOON, "{name}, run {run}: ended after {after:?}");
            }
        }
    }
}

#[test]
fn ddp_03_abort() {
    survivors_are_told("ddp_03_abort", "abort", Ending::Signal(6));
}

#[test]
fn ddp_03_panic() {
    survivors_are_told("ddp_03_panic", "panic", Ending::Exit(101));
}

#[test]
fn ddp_03_exit_with_0() {
    survivors_are_told("ddp_03_exit_with_0", "exit", Ending::Exit(0));
}

#[test]
fn ddp_03_sigkill() {
    survivors_are_told("ddp_03_sigkill", "kill", Ending::Signal(9));
}

/// Batch counts 3, 5 and 4, no join.
#[test]
fn ddp_01_a_rank_that_runs_out_of_batches() {
    let runs = ranks(3)
        .timeout(5)
        .watch("ddp_01_a_rank_that_runs_out_of_batches", || {
            let ddp = Ddp::from_env().unwrap();
            let device = Device::flex().autodiff();
            let mut model = ddp.wrap(Mlp::new(&device)).unwrap();
            let mut optim = SgdConfig::new().init();
            for step in 0..[3, 5, 4][ddp.rank()] {
                let row = ddp.rank();
                let loss = model
                    .forward(batch(step, row..row + 1, [0, 8], &device))
                    .mean();
                let start = Instant::now();
                match try_backward(&loss) {
                    Ok(grads) => {
                        let grads = GradientsParams::from_grads(grads, &model);
                        model = optim.step(0.05, model, grads);
                    }
                    Err(error) => return Some((step, error.to_string(), start.elapsed())),
                }
            }
            None
        });
    for traces in runs {
        assert_eq!(traces[0].finished(), &None);
        for trace in &traces[1..] {
            let (step, error, elapsed) = trace.finished().as_ref().unwrap();
            assert_eq!(*step, 3, "{error}");
            assert!(
                error.contains("has finished and left")
                    && error.contains("different numbers of steps"),
                "{error}"
            );
            assert!(*elapsed < Duration::from_secs(5 + 2), "{elapsed:?}");
        }
    }
}

/// Three steps of `x` unless `leave` says otherwise before one; the gradients, and the error with the time it took.
fn decide_alone(
    model: &Scalar,
    leave: impl Fn(usize) -> Option<bool>,
) -> (Vec<f32>, Option<(String, Duration)>) {
    let mut seen = Vec::new();
    for step in 0..3 {
        match leave(step) {
            Some(true) => break,
            Some(false) => continue,
            None => {}
        }
        let start = Instant::now();
        match try_backward(&model.loss((1 + step) as f32)) {
            Ok(grads) => {
                let grads = GradientsParams::from_grads(grads, model);
                seen.push(model.gradient(&grads).unwrap());
            }
            Err(error) => return (seen, Some((error.to_string(), start.elapsed()))),
        }
    }
    (seen, None)
}

fn names_the_one_that_left(outcome: &Option<(String, Duration)>, rank: usize) {
    let (error, elapsed) = outcome.as_ref().unwrap();
    let left = format!("rank {rank}");
    assert!(
        error.contains("has finished and left") && error.contains(&left),
        "{error}"
    );
    assert!(*elapsed < Duration::from_secs(5 + 2), "{elapsed:?}");
}

/// Rank 1 passes over its second batch by itself, and so its third is averaged with the others' second and nothing with their third.
#[test]
fn ddp_05_c_a_rank_that_skips_a_batch_alone() {
    let test = "ddp_05_c_a_rank_that_skips_a_batch_alone";
    let runs = ranks(3).timeout(5).watch(test, || {
        let ddp = Ddp::from_env().unwrap();
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        decide_alone(&model, |step| {
            ((ddp.rank(), step) == (1, 1)).then_some(false)
        })
    });
    for traces in runs {
        let second = (2.0 + 3.0 + 2.0) / 3.0;
        for (rank, trace) in traces.iter().enumerate() {
            let (seen, outcome) = trace.finished();
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-6;
            assert_eq!(seen.len(), 2);
            assert!(seen.iter().zip(&[1.0, second]).all(close), "{seen:?}");
            match rank {
                1 => assert_eq!(*outcome, None),
                _ => names_the_one_that_left(outcome, 1),
            }
        }
    }
}

/// Losses of 0.10 and 0.20 with a threshold of 0.15, which each rank compares for itself.
#[test]
fn ddp_12_a_rank_that_stops_alone() {
    let test = "ddp_12_a_rank_that_stops_alone";
    let runs = ranks(2).timeout(5).watch(test, || {
        let ddp = Ddp::from_env().unwrap();
        let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
        let own_loss = [0.10, 0.20][ddp.rank()];
        decide_alone(&model, |step| {
            (step == 1 && own_loss < 0.15).then_some(true)
        })
    });
    for traces in runs {
        assert_eq!(*traces[0].finished(), (vec![1.0], None));
        let (seen, outcome) = traces[1].finished();
        assert_eq!(*seen, [1.0]);
        names_the_one_that_left(outcome, 0);
    }
}

/// Three ranks finish 0.3 s apart, in three orders, with the model alive to the end.
#[test]
fn ddp_41_ranks_finish_in_any_order() {
    for (name, order) in [("012", [0, 1, 2]), ("201", [2, 0, 1]), ("120", [1, 2, 0])] {
        let runs = ranks(3)
            .named(name)
            .watch("ddp_41_ranks_finish_in_any_order", || {
                let ddp = Ddp::from_env().unwrap();
                let device = Device::flex().autodiff();
                let model = ddp.wrap(Mlp::new(&device)).unwrap();
                let row = ddp.rank();
                let loss = model
                    .forward(batch(0, row..row + 1, [0, 8], &device))
                    .mean();
                let grads = GradientsParams::from_grads(loss.backward(), &model);
                thread::sleep(Duration::from_millis(300) * order[ddp.rank()]);
                grads.len()
            });
        for trace in runs.iter().flatten() {
            assert_eq!(*trace.finished(), 4);
            assert_eq!(trace.stderr, "", "{name}");
        }
    }
}

/// Rank 1 does not come to the third operation and lives on.
#[test]
fn ddp_03_a_hang_is_reported_once_with_every_ranks_last_operation() {
    for name in ["logged", "without a log"] {
        let runs = ranks(3).timeout(2).named(name).watch(
            "ddp_03_a_hang_is_reported_once_with_every_ranks_last_operation",
            || {
                if name == "logged" {
                    log_to_stderr();
                }
                let ddp = Ddp::from_env().unwrap();
                ddp.sum(1.0).unwrap();
                ddp.barrier().unwrap();
                if ddp.rank() == 1 {
                    while ddp.failure().is_none() {
                        thread::sleep(Duration::from_millis(20));
                    }
                }
                ddp.sum(1.0).unwrap_err().to_string()
            },
        );
        for run in runs {
            for (rank, trace) in run.iter().enumerate() {
                trace.finished();
                let reports = trace.stderr.matches("the job failed: ").count();
                assert_eq!(reports, usize::from(rank == 0), "{name}: {}", trace.stderr);
            }
            // Every rank's last completed operation, the two that wait, and who keeps them waiting for what.
            let report = &run[0].stderr;
            assert_eq!(report.matches("1.1 barrier, ").count(), 4, "{report}");
            let due = "1.2 all_reduce(sum) of 1 x f64";
            let unfinished = [", for ", ", failed after "].map(|state| format!("{due}{state}"));
            let unfinished = unfinished.iter().map(|text| report.matches(text).count());
            assert_eq!(unfinished.sum::<usize>(), 2, "{report}");
            let behind =
                format!("behind in group 1, where {due} is due:\n  rank 1 is at 1.1 barrier, ");
            assert!(report.contains(&behind), "{report}");
            assert!(report.contains("it fails after 2.0s"), "{report}");
        }
    }
}

/// Nine ranks are one ring, on which each waits for its neighbour only: the report still knows who it is.
#[test]
fn ddp_03_the_report_of_a_hang_on_a_ring_names_the_rank_that_hangs() {
    let test = "ddp_03_the_report_of_a_hang_on_a_ring_names_the_rank_that_hangs";
    let runs = ranks(9).over("tcp").timeout(3).watch(test, || {
        let ddp = Ddp::from_env().unwrap();
        ddp.barrier().unwrap();
        if ddp.rank() == 2 {
            while ddp.failure().is_none() {
                thread::sleep(Duration::from_millis(20));
            }
        }
        ddp.sum(1.0).unwrap_err().to_string()
    });
    let report = &runs[0][0].stderr;
    let behind = "is due:\n  rank 2 is at 1.0 barrier, ";
    assert!(report.contains(behind), "{report}");
    // Nobody else is.
    assert_eq!(report.matches("\n  rank ").count(), 1, "{report}");
}
