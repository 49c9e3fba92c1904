//! Several threads of one process that train: what Burn loses then must not pass for a parameter that was not used.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::prelude::*;
use burn_ddp::{Ddp, WrapConfig, group::host::Rendezvous, try_backward};
use burn_ddp_tests::{free_port, mark, models::Scalar, oracle::*, ranks};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc::{Receiver, Sender, channel},
    thread::{self, JoinHandle},
};

#[derive(Module, Debug)]
struct Leaf {
    w: Param<Tensor<1>>,
}

/// How many steps gave the right gradient, and what came then.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Course {
    right: usize,
    wrong: Option<Vec<f32>>,
    error: Option<String>,
}

/// 300 steps of rank `rank` of 4. With x = rank + 1 the gradient is 1x + 2x + 1x on each rank, 10 in the mean.
fn course(rank: usize, port: u16) -> Course {
    let ddp = Ddp::connect(Rendezvous::new(rank, 4, "127.0.0.1", port).unwrap()).unwrap();
    let leaf = Leaf {
        w: Param::from_tensor(Tensor::from_data([0.5, -0.5], &device())),
    };
    let model = ddp.wrap(leaf).unwrap();
    let x = (rank + 1) as f32;
    let step = || {
        let w = model.w.val();
        let parts = Tensor::cat(vec![w.clone(), model.w.val() * 2.0, w], 0);
        let grads = try_backward(&(parts * x).sum()).map_err(|e: burn_ddp::Error| e.to_string())?;
        let grads = GradientsParams::from_grads(grads, &model);
        Ok(grads.get::<1>(model.w.id).map(floats).unwrap_or_default())
    };
    let mut course = Course {
        right: 0,
        wrong: None,
        error: None,
    };
    for _ in 0..300 {
        // Burn itself panics where the steps of a graph are gone.
        let burns = |panic: Box<dyn std::any::Any + Send>| match panic.downcast::<String>() {
            Ok(text) => Err(*text),
            Err(_) => Err("a panic without a text".into()),
        };
        match catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(burns) {
            Ok(gradient) if gradient == [10.0, 10.0] => course.right += 1,
            Ok(gradient) => {
                course.wrong = Some(gradient);
                break;
            }
            Err(error) => {
                course.error = Some(error);
                break;
            }
        }
    }
    course
}

/// Whether Burn loses a gradient is a matter of chance. That one is lost without an error on every rank is not to happen.
#[test]
fn ddp_24_threads_as_ranks_lose_nothing_in_silence() {
    let test = "ddp_24_threads_as_ranks_lose_nothing_in_silence";
    let runs = ranks(1).over("auto").run(test, |_| {
        let port = free_port();
        let ranks = [0, 1, 2, 3].map(|rank| thread::spawn(move || course(rank, port)));
        ranks.map(|rank| rank.join().unwrap())
    });
    let courses = &runs[0][0];
    println!("{courses:?}");
    assert!(courses.iter().all(|c| c.wrong.is_none()), "{courses:?}");
    let stopped: Vec<&String> = courses.iter().filter_map(|c| c.error.as_ref()).collect();
    if stopped.is_empty() {
        assert!(courses.iter().all(|c| c.right == 300), "{courses:?}");
    } else {
        assert_eq!(stopped.len(), 4, "{courses:?}");
        let known = |text: &&String| text.contains("burn#5573") || text.contains("graph tape");
        assert!(stopped.iter().any(known), "{courses:?}");
    }
}

#[derive(Module, Debug)]
struct Pair {
    a: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
}

/// The gradient of `b` after a step in which it has two uses, 3 and 5, and `meanwhile` runs between them. Which of them reach the loss?
fn step(
    model: &Pair,
    [first, second]: [bool; 2],
    meanwhile: impl FnOnce(),
) -> Result<Option<Vec<f32>>, String> {
    let mut loss = model.a.val();
    let one = model.b.val() * 3.0;
    meanwhile();
    let two = model.b.val() * 5.0;
    for (part, reaches) in [(one, first), (two, second)] {
        if reaches {
            loss = loss + part;
        }
    }
    let grads = try_backward(&loss).map_err(|e: burn_ddp::Error| e.to_string())?;
    let grads = GradientsParams::from_grads(grads, model);
    Ok(grads.get::<1>(model.b.id).map(floats))
}

fn pair(ddp: &Ddp, config: WrapConfig) -> Pair {
    let [a, b] = [1.0, 2.0].map(|w| Param::from_tensor(Tensor::from_data([w], &device())));
    ddp.wrap_with(Pair { a, b }, config).unwrap()
}

/// Another thread trains a model of its own for a step; it is done when it is joined.
fn another_thread() -> JoinHandle<()> {
    thread::spawn(|| train_a_step(|x| x))
}

fn train_a_step(input: impl FnOnce(Tensor<1>) -> Tensor<1>) {
    let ddp = Ddp::connect(Rendezvous::new(0, 1, "127.0.0.1", 0).unwrap()).unwrap();
    let model = ddp.wrap(Scalar::new(1.0, &device())).unwrap();
    let x = Tensor::from_data([2.0], &device()).require_grad();
    (model.w.val() * input(x)).backward();
}

/// A thread that stays in its backward pass until it is told to go on.
fn a_thread_in_backward() -> (JoinHandle<()>, Sender<()>) {
    let (inside, is_inside) = channel();
    let (go, goes): (_, Receiver<()>) = channel();
    let wait = std::sync::Mutex::new(Some((inside, goes)));
    let thread = thread::spawn(move || {
        train_a_step(|x| {
            mark(x.reshape([1, 1]), move || {
                if let Some((inside, goes)) = wait.lock().unwrap().take() {
                    inside.send(()).unwrap();
                    goes.recv().unwrap();
                }
            })
            .reshape([1])
        });
    });
    is_inside.recv().unwrap();
    (thread, go)
}

/// As many uses as in the step before, and one of rank 1's is missing.
#[test]
fn ddp_24_a_missing_gradient_is_an_error_while_threads_train() {
    let test = "ddp_24_a_missing_gradient_is_an_error_while_threads_train";
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        // The uses that reach the loss change from step to step.
        let model = pair(&ddp, WrapConfig::new().learn_uses(false));
        let reach = [true, ddp.rank() == 0];
        let before = step(&model, [true, true], || {});
        let alone = step(&model, reach, || {});
        let again = step(&model, [true, true], || {});
        another_thread().join().unwrap();
        let in_turn = step(&model, reach, || {});
        let again = [again, step(&model, [true, true], || {})];
        let together = step(&model, reach, || another_thread().join().unwrap());
        (before, alone, again, in_turn, together)
    });
    for run in &runs {
        for (rank, (_, result)) in run.iter().enumerate() {
            let (before, alone, again, in_turn, together) = result.as_ref().unwrap();
            let is = |b: f32| Ok(Some(vec![b]));
            assert_eq!(*before, is(8.0));
            // A use that does not reach the loss: (8 + 3) / 2.
            assert_eq!((alone, in_turn), (&is(5.5), &is(5.5)));
            assert_eq!(*again, [is(8.0), is(8.0)]);
            let error = together.as_ref().unwrap_err();
            let own =
                "rank 1: `b` has 1 gradient contribution(s) in this backward pass where 2 were due";
            assert!(error.contains(own), "rank {rank}: {error}");
            assert!(error.contains("tracel-ai/burn#5573"), "{error}");
        }
    }
}

/// The other thread's pass began before this one's forward and has not ended.
#[test]
fn ddp_24_a_pass_that_runs_all_the_time_counts_too() {
    let test = "ddp_24_a_pass_that_runs_all_the_time_counts_too";
    let runs = ranks(1).over("auto").run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let model = pair(&ddp, WrapConfig::new());
        let before = step(&model, [true, true], || {});
        let (thread, go) = a_thread_in_backward();
        let together = step(&model, [true, false], || {});
        go.send(()).unwrap();
        thread.join().unwrap();
        (before, together)
    });
    let (before, together) = runs[0][0].1.as_ref().unwrap();
    assert_eq!(*before, Ok(Some(vec![8.0])));
    let error = together.as_ref().unwrap_err();
    assert!(error.contains("where 2 were due"), "{error}");
}

/// Rank 1 uses `b` and has no gradient of it in the very first step.
#[test]
fn ddp_24_a_gradient_that_only_others_have() {
    for (name, together) in [("alone", false), ("together", true)] {
        let test = "ddp_24_a_gradient_that_only_others_have";
        let runs = ranks(2).named(name).run_raw(test, || {
            let ddp = Ddp::from_env().unwrap();
            let model = pair(&ddp, WrapConfig::new());
            let reach = [ddp.rank() == 0; 2];
            let first = step(&model, reach, || {
                if together && ddp.rank() == 1 {
                    another_thread().join().unwrap();
                }
            });
            (first, step(&model, reach, || {}))
        });
        for run in &runs {
            for (rank, (_, result)) in run.iter().enumerate() {
                let (first, second) = result.as_ref().unwrap();
                if !together {
                    // (8 + 0) / 2, from a parameter that rank 1 does not use.
                    let half = Ok(Some(vec![4.0]));
                    assert_eq!((first, second), (&half, &half));
                    continue;
                }
                // Rank 0 is told at its next operation at the latest.
                let error = first.as_ref().err().or(second.as_ref().err()).unwrap();
                let own = "rank 1: `b` has 0 gradient contribution(s) in this backward pass where 2 were due";
                assert!(error.contains(own), "rank {rank}: {error}");
                assert!(rank == 0 || first.is_err());
            }
        }
    }
}
