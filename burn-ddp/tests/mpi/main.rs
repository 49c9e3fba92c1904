//! Training programs under mpirun: values, and how they end.
//!
//! Of the cases of data-parallel training in the field these are MPI's own, and have no test here: addresses, names and
//! interfaces (DDP-10), ranks of an earlier run (DDP-33; an MPI job is closed, and nobody can join it), room in /dev/shm
//! (DDP-35), and connections of strangers (DDP-36; burn-ddp opens no port). The book's page on MPI says what to set.

#![cfg(all(feature = "mpi", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ending;
mod example;
mod failures;
mod operations;
mod starting;
mod values;

#[path = "../common/mpirun.rs"]
mod mpirun;

use burn_ddp::{Ddp, Error, launch};
use mpirun::{Mpirun, Run, program};
use std::{
    io::Write,
    process,
    time::{Duration, Instant},
};

/// Within this time a job has ended after a failure, its start included.
const SOON: Duration = Duration::from_secs(15);

/// What a rank does: trains, prints its error in one piece, and exits.
fn train(body: impl FnOnce(&Ddp) -> Result<(), Error>) -> ! {
    if let Err(error) = launch(|ddp: Ddp| body(&ddp)) {
        fail(&error);
    }
    process::exit(0)
}

fn fail(error: &dyn std::fmt::Display) -> ! {
    // In one piece: all processes write to one pipe.
    let text = format!("ended by: {error}\n");
    std::io::stderr().write_all(text.as_bytes()).unwrap();
    process::exit(1)
}

/// Runs `body` on the ranks of an mpirun; in the test itself returns how they ended.
fn ranks(
    ranks: usize,
    test: &str,
    program_name: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&Ddp, &str) -> Result<(), Error>,
) -> Option<Run> {
    if let Some(name) = program() {
        train(|ddp| body(ddp, &name));
    }
    let job = Mpirun::new(ranks, test, program_name);
    let job = variables
        .iter()
        .fold(job, |job, (name, value)| job.env(name, value));
    job.run()
}

/// As [`ranks`], for a body that must succeed on all.
fn succeed(count: usize, test: &str, body: impl FnOnce(&Ddp) -> Result<(), Error>) {
    if let Some(run) = ranks(count, test, "succeeds", &[], |ddp, _| body(ddp)) {
        assert!(run.success, "{}", run.text);
    }
}

/// As [`ranks`], for a body that must fail on three; the errors that the ranks printed, and all text.
fn failure(
    test: &str,
    variables: &[(&str, &str)],
    body: impl FnOnce(&Ddp) -> Result<(), Error>,
) -> Option<(Vec<String>, String)> {
    let start = Instant::now();
    let run = ranks(3, test, "fails", variables, |ddp, _| body(ddp))?;
    assert!(!run.success, "{}", run.text);
    assert!(start.elapsed() < SOON, "{}", run.text);
    Some((errors(&run), run.text))
}

fn errors(run: &Run) -> Vec<String> {
    let errors = run.text.split("ended by: ").skip(1);
    let first_line = |text: &str| text.lines().next().map(str::to_owned);
    errors.filter_map(first_line).collect()
}
