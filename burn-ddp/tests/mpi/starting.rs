//! Who a rank is, and whether MPI is fit for it.

use crate::{
    SOON, errors, fail,
    mpirun::{Mpirun, end_of, program},
    ranks, succeed,
};
use burn_ddp::{
    Ddp, Error,
    group::mpi::{MpiError, MpiGroup, MpiOptions},
};
use mpi::{
    environment::{Threading, initialize_with_threading},
    topology::{Communicator, SimpleCommunicator},
};
use std::{net::TcpListener, time::Instant};

/// Nothing meets, no port is needed: one that others hold does not matter.
#[test]
fn ddp_17_four_jobs_at_once_and_a_taken_port() {
    const TEST: &str = "starting::ddp_17_four_jobs_at_once_and_a_taken_port";
    if let Some(job) = program() {
        crate::train(|ddp| {
            let number: f64 = job.parse().unwrap();
            for _ in 0..100 {
                assert_eq!(ddp.sum(number + ddp.rank() as f64)?, 2.0 * number + 1.0);
            }
            Ok(())
        });
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let start = |job: usize| {
        Mpirun::new(2, TEST, &job.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .start()
    };
    let jobs: Vec<_> = (0..4).filter_map(start).collect();
    for job in jobs {
        let run = end_of(job);
        assert!(run.success, "{}", run.text);
    }
}

/// Rank and size are those of MPI's library, whatever the variables of other launchers say.
#[test]
fn ddp_26_variables_of_slurm_do_not_matter() {
    const TEST: &str = "starting::ddp_26_variables_of_slurm_do_not_matter";
    let variables = [
        ("SLURM_PROCID", "5"),
        ("SLURM_NTASKS", "7"),
        ("SLURM_LOCALID", "6"),
        ("LOCAL_RANK", "8"),
    ];
    let run = ranks(3, TEST, "ranks", &variables, |ddp, _| {
        let world = SimpleCommunicator::world();
        assert_eq!((ddp.rank() as i32, ddp.world_size()), (world.rank(), 3));
        assert_eq!((ddp.local_rank(), ddp.local_world_size()), (ddp.rank(), 3));
        assert_eq!(ddp.all_gather(&ddp.rank())?, [0, 1, 2]);
        Ok(())
    });
    if let Some(run) = run {
        assert!(run.success, "{}", run.text);
    }
}

/// `RANK` goes first, so that half of its family is an error and not an MPI job.
#[test]
fn ddp_26_half_a_family_that_goes_first_is_an_error() {
    const TEST: &str = "starting::ddp_26_half_a_family_that_goes_first_is_an_error";
    let start = Instant::now();
    let variables = [("RANK", "1")];
    let Some(run) = ranks(3, TEST, "ranks", &variables, |_, _| Ok(())) else {
        return;
    };
    assert!(!run.success && start.elapsed() < SOON, "{}", run.text);
    assert!(run.text.contains("WORLD_SIZE"), "{}", run.text);
}

/// A program that has started MPI at `level`, and then joins.
fn join_at(level: Threading) -> ! {
    let (universe, provided) = initialize_with_threading(level).unwrap();
    let refused = MpiGroup::connect(MpiOptions::default()).map(drop);
    if refused != Err(MpiError::ThreadLevel { provided }) {
        fail(&format!("{level:?} gives {provided:?} and {refused:?}"));
    }
    // As a program of one line joins.
    let error = Ddp::from_env().map(drop).unwrap_err();
    assert!(matches!(error, Error::Mpi(MpiError::ThreadLevel { .. })));
    println!("refused: {error}");
    drop(universe);
    std::process::exit(0)
}

#[test]
fn a_thread_level_that_is_too_low_is_an_error() {
    const TEST: &str = "starting::a_thread_level_that_is_too_low_is_an_error";
    match program().as_deref() {
        Some("Single") => join_at(Threading::Single),
        Some(_) => join_at(Threading::Funneled),
        None => {}
    }
    for level in ["Single", "Funneled"] {
        let Some(run) = Mpirun::new(2, TEST, level).run() else {
            return;
        };
        assert!(run.success, "{}", run.text);
        let text = format!(
            "refused: MPI runs at thread level {level}, but gradients are reduced on a thread of their own: Serialized is the \
             least that works. Start MPI with `mpi::initialize_with_threading(Threading::Multiple)`, or leave its start to burn-ddp"
        );
        assert_eq!(run.text.matches(&text).count(), 2, "{}", run.text);
    }
}

#[test]
fn serialized_is_enough_and_the_program_keeps_its_mpi() {
    const TEST: &str = "starting::serialized_is_enough_and_the_program_keeps_its_mpi";
    if program().is_some() {
        let (universe, provided) = initialize_with_threading(Threading::Serialized).unwrap();
        assert!(provided >= Threading::Serialized);
        let group = MpiGroup::from_communicator(&universe.world(), MpiOptions::default()).unwrap();
        let ddp = Ddp::from_mpi(group).unwrap();
        assert_eq!(ddp.sum(1.0).unwrap(), 2.0);
        drop(ddp);
        drop(universe);
        let after = MpiGroup::connect(MpiOptions::default()).map(drop);
        assert_eq!(after, Err(MpiError::Finalized));
        std::process::exit(0);
    }
    if let Some(run) = Mpirun::new(2, TEST, "join").run() {
        assert!(run.success, "{}", run.text);
        assert!(errors(&run).is_empty(), "{}", run.text);
    }
}

#[test]
fn mpi_without_mpirun_is_an_error() {
    const TEST: &str = "starting::mpi_without_mpirun_is_an_error";
    if program().is_some() {
        // One process is a job, too.
        succeed(1, TEST, |ddp| {
            assert_eq!(ddp.world_size(), 1);
            Ok(())
        });
    }
    if let Some(run) = Mpirun::new(1, TEST, "join")
        .env("BURN_DDP_TRANSPORT", "mpi")
        .run()
    {
        assert!(run.success, "{}", run.text);
    }
    let alone = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
        .env("BURN_DDP_TEST_MPI", "join")
        .env("BURN_DDP_TRANSPORT", "mpi")
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&alone.stderr);
    assert_eq!(alone.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("no mpirun has started it"), "{stderr}");
}
