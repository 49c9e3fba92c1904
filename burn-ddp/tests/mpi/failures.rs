//! Ranks that fail: the others are told who and why, and mpirun returns an error.

use crate::{SOON, errors, failure, ranks};
use burn_ddp::{Ddp, Error, group::GroupError, try_backward};
use burn_ddp_tests::{
    dying::{self, Moment},
    models::Mlp,
    oracle::{batch, device},
};
use rustix::process::{Signal, getpid, kill_process};
use std::{
    thread,
    time::{Duration, Instant},
};

/// Rank 2 of 4 dies in its step as `way` says.
fn death(test: &str, way: &str) -> Vec<(Vec<String>, String)> {
    let moments = [
        ("before", Moment::Before),
        ("during", Moment::During),
        ("after", Moment::After),
    ];
    let end = |(name, _): &(&str, Moment)| {
        let start = Instant::now();
        // mpirun ends the survivors of a signal, or they end by the error; nobody waits for the time-out.
        let run = ranks(4, test, name, &[], |ddp, name| {
            let (_, moment) = moments.iter().find(|(n, _)| *n == name).unwrap();
            dying::train(ddp, *moment, dying::way(way))
        })?;
        assert!(!run.success, "{name}: {}", run.text);
        assert!(start.elapsed() < SOON, "{name}: {}", run.text);
        Some((errors(&run), run.text))
    };
    moments.iter().filter_map(end).collect()
}

fn assert_lost(errors: &[String], text: &str, cause: &str) {
    for rank in [0, 1, 3] {
        let lost = format!("rank {rank}: lost rank 2 ({cause})");
        assert!(errors.iter().any(|e| e.starts_with(&lost)), "{text}");
    }
}

#[test]
fn ddp_03_panic() {
    for (errors, text) in death("failures::ddp_03_panic", "panic") {
        assert!(text.contains("on purpose"), "{text}");
        assert_lost(&errors, &text, "its thread panicked");
    }
}

#[test]
fn ddp_03_exit_0() {
    for (errors, text) in death("failures::ddp_03_exit_0", "exit") {
        assert_lost(&errors, &text, "its process ended");
    }
}

#[test]
fn ddp_03_sigkill() {
    for (_, text) in death("failures::ddp_03_sigkill", "kill") {
        // Nobody but mpirun speaks: its words differ, the signal does not.
        let says = text.to_lowercase().contains("signal 9") || text.contains("KILLED");
        assert!(says, "{text}");
    }
}

#[test]
fn ddp_03_abort() {
    for (_, text) in death("failures::ddp_03_abort", "abort") {
        // MPICH may report a rank that it has killed itself.
        let says = text.to_lowercase().contains("signal 6") || text.contains("ABORTED");
        assert!(says || text.contains("BAD TERMINATION"), "{text}");
    }
}

#[test]
fn an_abort_names_the_rank_and_the_reason() {
    let test = "failures::an_abort_names_the_rank_and_the_reason";
    let ended = failure(test, &[], |ddp| {
        if ddp.rank() == 1 {
            ddp.abort("the disk is full");
        }
        ddp.barrier()
    });
    let Some((errors, text)) = ended else { return };
    for rank in 0..3 {
        let of = format!("rank {rank}: stopped");
        let named = |e: &&String| e.starts_with(&of) && e.contains("rank 1");
        let error = errors.iter().find(named).expect(&text);
        assert!(error.ends_with("failed: the disk is full"), "{text}");
    }
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let test = "failures::a_rank_that_leaves_early_is_named";
    let ended = failure(test, &[], |ddp| {
        ddp.barrier()?;
        if ddp.rank() == 1 {
            return Ok(());
        }
        ddp.barrier()
    });
    let Some((errors, text)) = ended else { return };
    let left = |e: &String| {
        e.contains("rank 1") && e.contains("has finished and left") && e.contains("barrier")
    };
    assert_eq!(errors.iter().filter(|e| left(e)).count(), 2, "{text}");
}

#[test]
fn ddp_20_the_first_cause_is_in_every_error() {
    let test = "failures::ddp_20_the_first_cause_is_in_every_error";
    let ended = failure(test, &[], |ddp| {
        let model = ddp.wrap(Mlp::new(&device()))?;
        if ddp.rank() == 1 {
            return Err(Error::Group(GroupError::InvalidArgument {
                rank: 1,
                operation: "reading a batch".into(),
                cause: "boom-42".into(),
            }));
        }
        let loss = model.forward(batch(0, 0..1, [0, 8], &device())).mean();
        try_backward(&loss).map(drop)
    });
    let Some((errors, text)) = ended else { return };
    assert_eq!(errors.len(), 3, "{text}");
    for error in errors {
        assert!(error.contains("rank 1: reading a batch: boom-42"), "{text}");
    }
}

#[test]
fn ddp_20_a_panic_is_printed_and_names_the_rank() {
    let test = "failures::ddp_20_a_panic_is_printed_and_names_the_rank";
    let ended = failure(test, &[], |ddp| {
        let _kept = ddp.clone();
        assert_ne!(ddp.rank(), 1, "boom-{}", 42);
        ddp.barrier()
    });
    let Some((errors, text)) = ended else { return };
    assert!(text.contains("boom-42"), "{text}");
    for rank in [0, 2] {
        let lost = format!("rank {rank}: lost rank 1 (its thread panicked)");
        assert!(errors.iter().any(|e| e.starts_with(&lost)), "{text}");
    }
}

/// Rank 0 does not come to rank 1's and rank 2's operation in time.
fn late(ddp: &Ddp, operation: fn(&Ddp) -> Result<(), Error>) -> Result<(), Error> {
    if ddp.rank() == 0 {
        thread::sleep(Duration::from_secs(5));
    }
    operation(ddp)
}

const TWO_SECONDS: (&str, &str) = ("BURN_DDP_TIMEOUT", "2");

#[test]
fn ddp_27_a_barrier_ends_at_the_time_out() {
    let test = "failures::ddp_27_a_barrier_ends_at_the_time_out";
    let ended = failure(test, &[TWO_SECONDS], |ddp| late(ddp, Ddp::barrier));
    let Some((errors, text)) = ended else { return };
    let named = |e: &String| e.contains("timed out after 2") && e.contains("no answer from rank 0");
    assert!(errors.iter().any(named), "{text}");
}

#[test]
fn ddp_27_a_monitored_barrier_waits_as_long_as_its_peers_live() {
    let test = "failures::ddp_27_a_monitored_barrier_waits_as_long_as_its_peers_live";
    let run = ranks(3, test, "late", &[TWO_SECONDS], |ddp, _| {
        late(ddp, Ddp::monitored_barrier)
    });
    let Some(run) = run else { return };
    assert!(run.success, "{}", run.text);
    // At half of the limit, without any log.
    assert!(run.stderr.contains("s for rank 0 on "), "{}", run.stderr);
}

#[test]
fn ddp_27_a_monitored_barrier_ends_with_its_peers() {
    let test = "failures::ddp_27_a_monitored_barrier_ends_with_its_peers";
    failure(test, &[TWO_SECONDS], |ddp| {
        if ddp.rank() == 0 {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
        ddp.monitored_barrier()
    });
}
