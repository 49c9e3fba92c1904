//! The list of cases that every group passes, and what is MPI's own, under mpirun.
//!
//! `cargo test` starts this test program again as the ranks; there the same test function is a rank's program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::group::{DType, ProcessGroup, ReduceOp, conformance};
use ::mpi::{
    environment::{self, Threading, Universe},
    topology::Color,
};
use mpirun::{Mpirun, program};
use std::time::Instant;

#[path = "../../../tests/common/mpirun.rs"]
mod mpirun;

/// As a program that uses MPI itself.
fn own_mpi() -> Universe {
    let (universe, level) = environment::initialize_with_threading(Threading::Multiple).unwrap();
    assert!(level >= Threading::Serialized);
    universe
}

/// How the jobs of a test are made.
#[derive(Clone, Copy, Default)]
struct Setup {
    message: Option<usize>,
    /// Machines to pretend, of four ranks.
    machines: Option<[usize; 4]>,
}

/// This process's handle of a new job of the first `world_size` processes.
fn make(world_size: usize, timeout: Duration, setup: Setup) -> Vec<Arc<dyn ProcessGroup>> {
    let world = SimpleCommunicator::world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    if world_size > size {
        return Vec::new();
    }
    let color = if rank < world_size {
        Color::with_value(0)
    } else {
        Color::undefined()
    };
    let part = world.split_by_color(color);
    let options = MpiOptions {
        operation_timeout: Some(timeout),
        message_bytes: setup.message,
    };
    let group = part.map(|part| match setup.machines {
        None => MpiGroup::from_communicator(&part, options).unwrap(),
        Some(machines) => MpiGroup::over(&part, options, &machines[..world_size]).unwrap(),
    });
    group
        .into_iter()
        .map(|group| Arc::new(group) as Arc<dyn ProcessGroup>)
        .collect()
}

macro_rules! list {
    ($nothing:expr; $($name:ident),*) => {
        [$((stringify!($name), conformance::$name as fn(conformance::Make<'_>))),*]
    };
}

fn rank_of_the_list(setup: Setup) {
    let universe = own_mpi();
    for (name, case) in conformance::cases!([list] (); timeout_names_all_missing) {
        // Shown when a later one hangs.
        eprintln!("{name}");
        case(&|world_size, timeout| make(world_size, timeout, setup));
    }
    let end = Instant::now() + Duration::from_secs(10);
    while !request::reap(&library::enter().unwrap()) {
        assert!(Instant::now() < end, "operations are pending");
    }
    drop(universe);
    println!("the list is done");
}

fn list_under_mpirun(test: &str, ranks: usize, setup: Setup) {
    if program().is_some() {
        return rank_of_the_list(setup);
    }
    let path = format!("group::mpi::tests::{test}");
    let Some(run) = Mpirun::new(ranks, &path, "list").run() else {
        return;
    };
    let text = &run.text;
    assert!(run.success, "{text}");
    assert_eq!(text.matches("the list is done").count(), ranks, "{text}");
}

#[test]
fn the_list_on_two() {
    list_under_mpirun("the_list_on_two", 2, Setup::default());
}

#[test]
fn the_list_on_three_in_small_messages() {
    let setup = Setup {
        message: Some(1000),
        machines: None,
    };
    list_under_mpirun("the_list_on_three_in_small_messages", 3, setup);
}

#[test]
fn the_list_on_machines_of_one_two_and_one() {
    let setup = Setup {
        message: Some(1000),
        machines: Some([0, 1, 1, 3]),
    };
    list_under_mpirun("the_list_on_machines_of_one_two_and_one", 4, setup);
}

#[test]
fn machines_give_the_same_bits() {
    const TEST: &str = "group::mpi::tests::machines_give_the_same_bits";
    if program().is_some() {
        let universe = own_mpi();
        let mut noise = 1 + SimpleCommunicator::world().rank() as u32;
        let mut numbers = || {
            noise ^= noise << 13;
            noise ^= noise >> 17;
            noise ^= noise << 5;
            half::f16::from_f32(noise as f32 / u32::MAX as f32 - 0.3)
        };
        let numbers: Vec<half::f16> = (0..40_001).map(|_| numbers()).collect();
        let singles: Vec<f32> = numbers.iter().map(|x| x.to_f32() / 3.0).collect();
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product] {
            let reduced = [
                None,
                Some([0, 0, 2, 2]),
                Some([0, 1, 1, 1]),
                Some([0, 1, 2, 3]),
            ]
            .map(|machines| {
                let setup = Setup {
                    message: Some(5000),
                    machines,
                };
                let group = make(4, Duration::from_secs(60), setup).remove(0);
                let (mut halves, mut singles) = (numbers.clone(), singles.clone());
                let bytes = bytemuck::cast_slice_mut(&mut halves);
                group.all_reduce(bytes, DType::F16, op).unwrap();
                let bytes = bytemuck::cast_slice_mut(&mut singles);
                group.all_reduce(bytes, DType::F32, op).unwrap();
                (halves, singles)
            });
            assert!(reduced.iter().all(|other| *other == reduced[0]), "{op}");
        }
        drop(universe);
        return println!("right");
    }
    if let Some(run) = Mpirun::new(4, TEST, "rank").run() {
        assert!(run.success, "{}", run.text);
        assert_eq!(run.text.matches("right").count(), 4, "{}", run.text);
    }
}

#[test]
fn the_list_on_four() {
    list_under_mpirun("the_list_on_four", 4, Setup::default());
}

#[test]
fn ddp_37_longer_than_a_message() {
    const TEST: &str = "group::mpi::tests::ddp_37_longer_than_a_message";
    if program().is_some() {
        let universe = own_mpi();
        // 1,000 elements a message, of which a piece has one per rank.
        let setup = Setup {
            message: Some(4000),
            machines: None,
        };
        for group in make(3, Duration::from_secs(60), setup) {
            for len in [1000, 1001, 2500, 2999, 3000, 3001, 25_000] {
                let mut x: Vec<f32> = (0..len).map(|k| (k * (group.rank() + 1)) as f32).collect();
                let bytes = bytemuck::cast_slice_mut(&mut x);
                group.all_reduce(bytes, DType::F32, ReduceOp::Sum).unwrap();
                // (1 + 2 + 3) k, exact below 2^24.
                assert!(x.iter().enumerate().all(|(k, x)| *x == (6 * k) as f32));
            }
        }
        drop(universe);
        return println!("right");
    }
    if let Some(run) = Mpirun::new(3, TEST, "rank").run() {
        let text = &run.text;
        assert!(run.success, "{text}");
        assert_eq!(text.matches("right").count(), 3, "{text}");
    }
}
