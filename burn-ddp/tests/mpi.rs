//! Training programs under mpirun: values, and how they end.

#![cfg(all(feature = "mpi", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    prelude::*,
};
use burn_ddp::{
    Ddp, Error, ReduceOp,
    group::{DType, GroupError},
    launch, try_backward,
};
use common::mpirun::{self, mpirun, mpirun_with};
use std::{
    io::Write,
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

mod common {
    pub(crate) mod mpirun;
}

const TEST: &str = "ranks";

/// Not a test by itself: what the ranks run.
#[test]
fn ranks() {
    let Some(program) = mpirun::program() else {
        return;
    };
    let ended = launch(|ddp: Ddp| match program.as_str() {
        "values" => values(&ddp),
        "names" => names(&ddp),
        "panics" => panics(&ddp),
        "dies" => dies(&ddp),
        "leaves" => leaves(&ddp),
        "differs" => differs(&ddp),
        "sleeps" => sleeps(&ddp),
        "fails in backward" => fails_in_backward(&ddp),
        other => panic!("no program {other}"),
    });
    if let Err(error) = ended {
        // In one piece: three processes write to one pipe.
        let text = format!("ended by: {error}\n");
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        process::exit(1);
    }
}

fn model(ddp: &Ddp) -> Result<(Device, Linear), Error> {
    let device = ddp.device(Device::flex())?.autodiff();
    device.seed(3);
    let model = ddp.wrap(LinearConfig::new(300, 40).init(&device))?;
    Ok((device, model))
}

/// Every reduction of numbers whose sums round, and ten steps of training, as one number.
fn values(ddp: &Ddp) -> Result<(), Error> {
    let mut all = Vec::new();
    let mut noise = 0x9e37_79b9_u32.wrapping_mul(ddp.rank() as u32 + 1);
    for (dtype, ops) in [
        (
            DType::F32,
            &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product][..],
        ),
        (DType::F64, &[ReduceOp::Sum, ReduceOp::Mean]),
        (DType::F16, &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max]),
        (DType::BF16, &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min]),
    ] {
        for &op in ops {
            for len in [5, 40_001] {
                let mut numbers = (0..len).map(|_| {
                    noise ^= noise << 13;
                    noise ^= noise >> 17;
                    noise ^= noise << 5;
                    0.5 + noise as f32 / u32::MAX as f32
                });
                let mut data: Vec<u8> = match dtype {
                    DType::F32 => numbers.flat_map(f32::to_ne_bytes).collect(),
                    DType::F64 => numbers.flat_map(|x| f64::from(x).to_ne_bytes()).collect(),
                    DType::F16 => numbers
                        .flat_map(|x| half::f16::from_f32(x).to_ne_bytes())
                        .collect(),
                    _ => numbers
                        .by_ref()
                        .flat_map(|x| half::bf16::from_f32(x).to_ne_bytes())
                        .collect(),
                };
                ddp.group().all_reduce(&mut data, dtype, op)?;
                all.extend(data);
            }
        }
    }
    let (device, mut model) = model(ddp)?;
    let mut optim = SgdConfig::new().init();
    for step in 0..10 {
        let x = Tensor::<1, Int>::arange(0..1200, &device).float();
        let x = (x * (1.0 + ddp.rank() as f32) + step as f32)
            .sin()
            .reshape([4, 300]);
        let loss = model.forward(x).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(try_backward(&loss)?, &model);
        model = optim.step(0.1, model, grads);
    }
    ddp.check_replicas(&model)?;
    let hashes = ddp.param_hashes(&model)?;
    let sum = all.chunks(8).fold(0u64, |sum, bytes| {
        let word = bytes
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte));
        sum.rotate_left(7) ^ word
    });
    let sums = ddp.all_gather(&sum)?;
    assert!(sums.iter().all(|other| *other == sum));
    if ddp.is_main() {
        println!("values of {}: {sum:016x} {}", ddp.world_size(), hashes[0]);
    }
    Ok(())
}

fn names(ddp: &Ddp) -> Result<(), Error> {
    if ddp.rank() == 1 {
        ddp.abort("the disk is full");
    }
    ddp.barrier()
}

fn panics(ddp: &Ddp) -> Result<(), Error> {
    let _kept = ddp.clone();
    assert_ne!(ddp.rank(), 1, "expected by the test");
    ddp.barrier()
}

fn dies(ddp: &Ddp) -> Result<(), Error> {
    if ddp.rank() == 1 {
        println!("process {}", process::id());
        let this = rustix::process::getpid();
        rustix::process::kill_process(this, rustix::process::Signal::KILL).unwrap();
    }
    ddp.barrier()
}

fn leaves(ddp: &Ddp) -> Result<(), Error> {
    ddp.barrier()?;
    if ddp.rank() == 1 {
        return Ok(());
    }
    ddp.barrier()
}

fn differs(ddp: &Ddp) -> Result<(), Error> {
    let mut data = vec![0; if ddp.rank() == 1 { 64 } else { 32 }];
    Ok(ddp
        .group()
        .all_reduce(&mut data, DType::F32, ReduceOp::Sum)?)
}

fn sleeps(ddp: &Ddp) -> Result<(), Error> {
    if ddp.rank() == 1 {
        thread::sleep(Duration::from_secs(100));
    }
    ddp.barrier()
}

fn fails_in_backward(ddp: &Ddp) -> Result<(), Error> {
    let (device, model) = model(ddp)?;
    if ddp.rank() == 1 {
        return Err(Error::Group(GroupError::InvalidArgument {
            rank: 1,
            operation: "reading a batch".into(),
            cause: "file not found".into(),
        }));
    }
    let loss = model.forward(Tensor::<2>::ones([1, 300], &device)).mean();
    try_backward(&loss).map(drop)
}

/// The errors that the ranks printed, and all text.
fn end(program: &str, limit: Duration) -> Option<(Vec<String>, String)> {
    end_with(program, limit, &[])
}

fn end_with(
    program: &str,
    limit: Duration,
    variables: &[(&str, &str)],
) -> Option<(Vec<String>, String)> {
    let start = Instant::now();
    let run = mpirun_with(3, TEST, program, variables)?;
    assert!(!run.success, "{}", run.text);
    assert!(start.elapsed() < limit, "{}", run.text);
    let errors = run.text.split("ended by: ").skip(1);
    let errors = errors.filter_map(|text| Some(text.lines().next()?.to_owned()));
    Some((errors.collect(), run.text))
}

const SOON: Duration = Duration::from_secs(15);

#[test]
fn ddp_03_mpi_gives_the_bits_of_the_host_group() {
    for ranks in [2, 4] {
        let Some(run) = mpirun(ranks, TEST, "values") else {
            return;
        };
        assert!(run.success, "{}", run.text);
        let host = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env("BURN_DDP_TEST_MPI", "values")
            .env("BURN_DDP_NPROC", ranks.to_string())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let host = String::from_utf8_lossy(&host.stdout).into_owned();
        let line = |text: &str| {
            let start = text.find("values of").expect(text);
            text[start..].lines().next().unwrap().to_owned()
        };
        assert_eq!(line(&run.text), line(&host));
    }
}

#[test]
fn an_abort_names_the_rank_and_the_reason() {
    let Some((errors, text)) = end("names", SOON) else {
        return;
    };
    for rank in 0..3 {
        let of = format!("rank {rank}: stopped");
        let named = |e: &&String| e.starts_with(&of) && e.contains("rank 1");
        let error = errors.iter().find(named).expect(&text);
        assert!(error.ends_with("failed: the disk is full"), "{text}");
    }
}

#[test]
fn a_panic_names_the_rank() {
    let Some((errors, text)) = end("panics", SOON) else {
        return;
    };
    assert!(text.contains("expected by the test"));
    for rank in [0, 2] {
        let lost = format!("rank {rank}: lost rank 1 (its thread panicked)");
        assert!(errors.iter().any(|e| e.starts_with(&lost)), "{text}");
    }
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some((_, text)) = end("dies", SOON) else {
        return;
    };
    // Nobody but mpirun speaks: its words differ, the signal does not.
    assert!(
        text.to_lowercase().contains("signal 9") || text.contains("KILLED"),
        "{text}"
    );
}

#[test]
fn a_rank_that_leaves_early_is_named() {
    let Some((errors, text)) = end("leaves", SOON) else {
        return;
    };
    let left = |e: &String| {
        e.contains("rank 1") && e.contains("has finished and left") && e.contains("barrier")
    };
    assert!(errors.iter().any(left), "{text}");
}

#[test]
fn ddp_25_a_mismatch_shows_both_sides() {
    let Some((errors, text)) = end("differs", SOON) else {
        return;
    };
    assert_eq!(errors.len(), 3, "{text}");
    for error in errors {
        let (eight, sixteen) = ("all_reduce(sum) of 8 x f32", "all_reduce(sum) of 16 x f32");
        assert!(error.contains(eight) && error.contains(sixteen), "{error}");
    }
}

#[test]
fn a_hung_rank_is_named_and_ended() {
    let Some((errors, text)) = end_with("sleeps", SOON, &[("BURN_DDP_TIMEOUT", "2")]) else {
        return;
    };
    let named = "no answer from rank 1";
    assert!(errors.iter().any(|e| e.contains(named)), "{text}");
}

#[test]
fn an_error_of_one_rank_ends_backward_on_the_others() {
    let Some((errors, text)) = end("fails in backward", SOON) else {
        return;
    };
    assert_eq!(errors.len(), 3, "{text}");
    for error in errors {
        assert!(
            error.contains("rank 1: reading a batch: file not found"),
            "{text}"
        );
    }
}
