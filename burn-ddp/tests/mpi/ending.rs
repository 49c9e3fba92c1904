//! How a job ends: in good order, and by a signal to mpirun.

use crate::mpirun::{Mpirun, end_of, program};
use burn_ddp::{Ddp, launch};
use burn_ddp_tests::processes_with;
use rustix::process::{Pid, Signal, kill_process};
use std::{
    env, fs, process,
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::{Duration, Instant},
};

#[test]
fn ddp_41_ranks_finish_quietly_in_any_order() {
    const TEST: &str = "ending::ddp_41_ranks_finish_quietly_in_any_order";
    if let Some(program) = program() {
        let (first, joined) = program.split_once(' ').unwrap();
        let mut rest = Duration::ZERO;
        let ended = launch(|ddp: Ddp| {
            ddp.barrier()?;
            // Rank `first` at once, the next one a second later, and so on.
            let place = (ddp.rank() + 3 - first.parse::<usize>().unwrap()) % 3;
            rest = Duration::from_secs(place as u64);
            if joined == "joined" {
                thread::sleep(rest);
            }
            Ok::<_, burn_ddp::Error>(())
        });
        ended.unwrap();
        if joined == "left" {
            thread::sleep(rest);
        }
        process::exit(0);
    }
    for program in ["0 joined", "1 joined", "2 joined", "0 left", "1 left"] {
        let Some(run) = Mpirun::new(3, TEST, program).run() else {
            return;
        };
        assert!(run.success, "{program}: {}", run.text);
        assert_eq!(run.stderr, "", "{program}");
    }
}

/// Set in all processes of a job, to a file that rank 0 makes when all ranks are at work.
const AT_WORK: &str = "BURN_DDP_TEST_AT_WORK";

/// Rank 1 does not end by a polite signal, and the others wait for it.
fn work() -> ! {
    let ended = launch(|ddp: Ddp| {
        if ddp.rank() == 1 {
            signal_hook::flag::register(Signal::TERM.as_raw(), Arc::<AtomicBool>::default())
                .unwrap();
        }
        ddp.barrier()?;
        if ddp.is_main() {
            fs::write(env::var_os(AT_WORK).unwrap(), "").unwrap();
        }
        if ddp.rank() == 1 {
            thread::sleep(Duration::from_secs(100));
        }
        ddp.barrier()
    });
    eprintln!("ended by: {ended:?}");
    process::exit(1)
}

/// Nothing of a job is left soon after mpirun got `signal`.
fn interrupt(test: &str, signal: Signal) {
    if program().is_some() {
        work();
    }
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("at work");
    let name = file.to_str().unwrap();
    let job = Mpirun::new(3, test, "work")
        .env(AT_WORK, name)
        // Of a killed mpirun Open MPI leaves its shared memory behind.
        .env(
            "OMPI_MCA_btl_vader_backing_directory",
            directory.path().to_str().unwrap(),
        );
    let Some(job) = job.start() else { return };
    let limit = Instant::now() + Duration::from_secs(30);
    while !file.exists() {
        assert!(Instant::now() < limit, "{}", end_of(job).text);
        thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&job), signal).unwrap();
    // Open MPI and MPICH kill what is left of a job after a few seconds; and nobody waits for a time-out of ten minutes.
    let limit = Instant::now() + Duration::from_secs(12);
    let marked = format!("{AT_WORK}={name}");
    let run = end_of(job);
    assert!(!run.success, "{}", run.text);
    loop {
        let left = processes_with(&marked);
        if left.is_empty() {
            return;
        }
        assert!(Instant::now() < limit, "{left:?} are left: {}", run.text);
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn ddp_15_sigint_to_mpirun_ends_the_ranks() {
    interrupt(
        "ending::ddp_15_sigint_to_mpirun_ends_the_ranks",
        Signal::INT,
    );
}

#[test]
fn ddp_15_sigterm_to_mpirun_ends_the_ranks() {
    interrupt(
        "ending::ddp_15_sigterm_to_mpirun_ends_the_ranks",
        Signal::TERM,
    );
}

#[test]
fn ddp_15_sigkill_of_mpirun_ends_the_ranks() {
    interrupt(
        "ending::ddp_15_sigkill_of_mpirun_ends_the_ranks",
        Signal::KILL,
    );
}
