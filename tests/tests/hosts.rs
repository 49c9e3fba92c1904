//! Ranks on several hosts: network namespaces of this machine, which the tests make and remove.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::prelude::*;
use burn_ddp::{
    Ddp, Error,
    group::{
        DType, ReduceOp,
        host::{Heartbeat, Rendezvous},
    },
    try_backward,
};
use burn_ddp_tests::{Hosts, PORT, Trace, in_rank, models::*, oracle::*, ranks};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Steps, rows of the global batch (a multiple of every world size here), learning rate.
const RUN: (u64, usize, f64) = (20, 12, 0.05);

fn loss(model: &Mlp, step: u64, rows: std::ops::Range<usize>) -> Tensor<1> {
    square(model.forward(batch(step, rows, [0, 8], &device())) - 0.5)
}

/// The weights of one process on the whole batch, on every rank, and the same bits again in a second run.
fn same_answer(test: &str, hosts: &Hosts, of_rank: &[usize]) {
    let body = |ddp: Ddp| {
        device().seed(7 + ddp.rank() as u64);
        let model = ddp.wrap(Mlp::new(&device())).unwrap();
        let start = parameters(&model);
        let world = (ddp.rank(), ddp.world_size());
        let model = train(model, RUN, world, loss);
        assert_same_bits(&ddp, &model);
        (start, parameters(&model), fingerprint(&model))
    };
    let first = ranks(of_rank.len())
        .on(hosts, of_rank)
        .named("first")
        .run(test, body);
    let again = ranks(of_rank.len())
        .on(hosts, of_rank)
        .named("again")
        .run(test, body);
    let (start, end, print) = &first[0][0];
    assert!(first[0].iter().chain(&again[0]).all(|(.., p)| p == print));
    let one = train(load(Mlp::new(&device()), start), RUN, (0, 1), loss);
    assert_close(end, &parameters(&one), 1e-6);
}

#[test]
fn two_hosts_of_two_ranks_give_the_answer_of_one_process() {
    let Some(hosts) = Hosts::new(2) else { return };
    let test = "two_hosts_of_two_ranks_give_the_answer_of_one_process";
    same_answer(test, &hosts, &[0, 0, 1, 1]);
}

#[test]
fn three_hosts_of_one_two_and_three_ranks_give_the_answer_of_one_process() {
    let Some(hosts) = Hosts::new(3) else { return };
    let test = "three_hosts_of_one_two_and_three_ranks_give_the_answer_of_one_process";
    same_answer(test, &hosts, &[0, 1, 1, 2, 2, 2]);
}

/// Where there is no `nft` or `ip` in the path.
#[test]
fn a_test_that_cannot_run_is_skipped_unless_it_must_run() {
    let hosts = |required: &str| {
        let test = "two_hosts_of_two_ranks_give_the_answer_of_one_process";
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env("PATH", "/nonexistent")
            .env("BURN_DDP_TEST_HOSTS", required)
            .output()
            .unwrap()
    };
    for (required, success, said) in [
        ("", true, "skipped: hosts cannot be made here: "),
        (
            "required",
            false,
            "BURN_DDP_TEST_HOSTS=required, but hosts cannot be made here: ",
        ),
    ] {
        let output = hosts(required);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), success, "{stderr}");
        assert!(stderr.contains(said), "{stderr}");
    }
}

/// Sums over 6 ranks on 3 hosts, of sizes from less than one element a ring segment to several chunks.
#[test]
fn collectives_on_hosts() {
    let Some(hosts) = Hosts::new(3) else { return };
    let of_rank = [0, 1, 1, 2, 2, 0];
    let runs = ranks(6)
        .on(&hosts, &of_rank)
        .run("collectives_on_hosts", |ddp| {
            let group = ddp.group();
            let rank = group.rank() as f32;
            for elements in [0usize, 1, 5, 1000, 1_000_003] {
                let mut x: Vec<f32> = (0..elements).map(|k| (k % 100) as f32 + rank).collect();
                let bytes = bytemuck::cast_slice_mut(&mut x);
                group.all_reduce(bytes, DType::F32, ReduceOp::Sum).unwrap();
                // 0 + 1 + ... + 5 = 15.
                assert!(
                    x.iter()
                        .enumerate()
                        .all(|(k, x)| *x == 6.0 * (k % 100) as f32 + 15.0)
                );
            }
            assert_eq!((group.transport(), ddp.local_world_size()), ("shm+tcp", 2));
            ddp.local_rank()
        });
    assert_eq!(runs, [[0, 0, 1, 0, 1, 1]]);
}

/// Tells the test that a rank has come to a point.
fn signal(ddp: &Ddp) {
    if ddp.rank() == 0 {
        std::fs::write(std::env::var("POINT").unwrap(), "").unwrap();
    }
}

/// Runs `act` once a rank has called [`signal`].
fn at_signal(point: &Path, act: impl FnOnce() + Send) -> impl FnOnce() + Send {
    let point = point.to_owned();
    move || {
        let deadline = Instant::now() + Duration::from_secs(50);
        while !point.exists() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        act();
    }
}

/// Trains until an error comes, which is returned, with the time since the last good step.
fn train_to_the_error() -> (String, Duration) {
    let heartbeat = Heartbeat {
        interval: Duration::from_millis(300),
        limit: Duration::from_secs(3),
    };
    let settings = Rendezvous::from_env()
        .unwrap()
        .unwrap()
        .heartbeat(heartbeat);
    let ddp = Ddp::connect(settings).unwrap();
    let model = ddp.wrap(Mlp::new(&device())).unwrap();
    let mut last = Instant::now();
    for step in 0.. {
        if step == 3 {
            signal(&ddp);
        }
        let outcome: Result<_, Error> = try_backward(&loss(&model, step, 0..2));
        if let Err(error) = outcome {
            return (error.to_string(), last.elapsed());
        }
        last = Instant::now();
    }
    unreachable!()
}

/// Something happens to the link of host 1, on which ranks 2 and 3 are: every rank says so within its limits.
fn broken_link(test: &str, act: impl FnOnce(&Hosts) + Send) {
    let Some(hosts) = Hosts::new(2) else { return };
    let directory = tempfile::tempdir().unwrap();
    let point: PathBuf = directory.path().join("point");
    let of_rank = [0, 0, 1, 1];
    let job = ranks(4)
        .on(&hosts, &of_rank)
        .env("POINT", point.to_str().unwrap());
    if in_rank() {
        job.watch(test, train_to_the_error);
        return;
    }
    let runs = thread::scope(|scope| {
        scope.spawn(at_signal(&point, || act(&hosts)));
        job.watch(test, train_to_the_error)
    });
    for (rank, trace) in runs[0].iter().enumerate() {
        let (error, after) = Trace::finished(trace);
        let (lost, kept) = if rank < 2 {
            ([2, 3], [0, 1])
        } else {
            ([0, 1], [2, 3])
        };
        // Hosts see each other vanish: nobody knows on which side the cut is.
        let names = |ranks: [usize; 2]| {
            ranks
                .iter()
                .any(|k| error.contains(&format!("lost rank {k}")))
        };
        assert!(names(lost) && !names(kept), "rank {rank}: {error}");
        assert!(error.contains("all_reduce(mean)"), "rank {rank}: {error}");
        // The heartbeats' limit is 3 s; the rest is the machine's.
        assert!(*after < Duration::from_secs(15), "rank {rank}: {after:?}");
    }
}

#[test]
fn ddp_03_a_cut_link() {
    broken_link("ddp_03_a_cut_link", |hosts| hosts.cut(1));
}

#[test]
fn ddp_03_a_link_that_loses_everything() {
    broken_link("ddp_03_a_link_that_loses_everything", |hosts| {
        hosts.lose(1, 100)
    });
}

/// 50 ms each way and one packet in a hundred lost: the same bits as on a good link, only later.
#[test]
fn a_far_and_lossy_link_trains_to_the_same_bits() {
    let test = "a_far_and_lossy_link_trains_to_the_same_bits";
    let (Some(near), Some(far)) = (Hosts::new(2), Hosts::far(Duration::from_millis(50), 1)) else {
        return;
    };
    let body = |ddp: Ddp| {
        device().seed(7 + ddp.rank() as u64);
        let model = ddp.wrap(Mlp::new(&device())).unwrap();
        let model = train(model, (5, 12, 0.05), (ddp.rank(), ddp.world_size()), loss);
        fingerprint(&model)
    };
    let of_rank = [0, 0, 1, 1];
    let near = ranks(4).on(&near, &of_rank).named("near").run(test, body);
    let far = ranks(4)
        .on(&far, &of_rank)
        .named("far")
        .timeout(60)
        .limit(Duration::from_secs(100));
    assert_eq!(near, far.run(test, body));
}

/// The example, an epoch of it: the accuracy and the bits of two ranks on one host.
#[test]
fn resnet_ddp_on_two_hosts_gives_the_bits_of_one() {
    let Some(hosts) = Hosts::new(2) else { return };
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/resnet_ddp");
    assert!(
        program.exists(),
        "{}: build the examples first",
        program.display()
    );
    let report = |output: std::process::Output| -> serde_json::Value {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        serde_json::from_str(stdout.lines().next_back().unwrap()).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let arguments = [
        "--epochs",
        "1",
        "--json",
        "--out",
        folder.path().to_str().unwrap(),
    ];
    let one = Command::new(&program).args(arguments).output().unwrap();
    let start = |host: usize| {
        hosts
            .command(host, "timeout")
            .args(["--signal=KILL", "100"])
            .arg(&program)
            .args(arguments)
            .env("RANK", host.to_string())
            .env("WORLD_SIZE", "2")
            .env("MASTER_ADDR", hosts.address(0))
            .env("MASTER_PORT", PORT.to_string())
            .env("BURN_DDP_SECRET", "a secret of two hosts, 1 to 2")
            .env("BURN_DDP_RENDEZVOUS_TIMEOUT", "30")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let [two, other] = [start(0), start(1)].map(|rank| {
        // Each pipe has a reader of its own: a full one would stop its rank, and with it the other.
        thread::spawn(move || rank.wait_with_output().unwrap())
    });
    let (two, other) = (two.join().unwrap(), other.join().unwrap());
    assert!(other.status.success(), "{other:?}");
    let (one, two) = (report(one), report(two));
    for key in ["world_size", "steps", "test_accuracy", "param_hashes"] {
        assert_eq!(one[key], two[key], "{key}");
    }
}
