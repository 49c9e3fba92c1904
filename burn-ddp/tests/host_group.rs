//! The host group with real processes: deaths, stops and goodbyes.
//!
//! Each test starts this test binary again, once per rank, with [`SCENARIO`] set; there [`rank_process`] is the only test that runs.
#![cfg(unix)]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::group::{
    DType, GroupError, ProcessGroup, ReduceOp,
    host::{Heartbeat, HostGroup, Rendezvous},
};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::{Pid, Signal, getpid, kill_process},
};
use std::{
    env,
    io::Read,
    net::TcpListener,
    os::fd::AsRawFd,
    process::{Child, Command, Stdio},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

const SCENARIO: &str = "BURN_DDP_TEST_SCENARIO";
/// In the scenario `finish`: how many turns each rank waits before it ends.
const ORDER: &str = "BURN_DDP_TEST_ORDER";
const LIMIT: Duration = Duration::from_secs(30);
/// The step at which something happens.
const STEP: usize = 3;

/// One rank's process, and what it left behind.
struct Rank {
    child: Child,
    output: Option<thread::JoinHandle<(String, String)>>,
}

#[derive(Debug)]
struct End {
    /// Since the start of the test.
    at: Duration,
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

/// Kills what is left, whatever ends the test.
struct Ranks(Vec<Rank>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.child.kill();
            let _ = rank.child.wait();
        }
    }
}

/// The listening socket is open to be inherited for a moment: not by another test's processes.
static STARTING: Mutex<()> = Mutex::new(());

fn start(scenario: &str, transport: &str, world_size: usize, extra: &[(&str, &str)]) -> Ranks {
    let _one_at_a_time = STARTING.lock().unwrap_or_else(|error| error.into_inner());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let home = env::temp_dir().join(format!("burn-ddp-test-{}", std::process::id()));
    std::fs::create_dir_all(&home).unwrap();
    let spawn = |rank: usize| {
        let inherit = if rank == 0 {
            FdFlags::empty()
        } else {
            FdFlags::CLOEXEC
        };
        fcntl_setfd(&listener, inherit).unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "rank_process", "--nocapture", "--test-threads=1"])
            .env(SCENARIO, scenario)
            .env("XDG_RUNTIME_DIR", &home)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("BURN_DDP_LISTEN_FD", listener.as_raw_fd().to_string())
            .env("BURN_DDP_TRANSPORT", transport)
            .env("BURN_DDP_TIMEOUT", "25")
            .env("BURN_DDP_RENDEZVOUS_TIMEOUT", "25")
            .env_remove("BURN_DDP_SECRET")
            .envs(extra.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let output = thread::spawn(move || {
            let errors = thread::spawn(move || {
                let mut text = String::new();
                let _ = err.read_to_string(&mut text);
                text
            });
            let mut text = String::new();
            let _ = out.read_to_string(&mut text);
            (text, errors.join().unwrap())
        });
        Rank {
            child,
            output: Some(output),
        }
    };
    Ranks((0..world_size).map(spawn).collect())
}

/// Waits for all ranks but `stopped`.
fn finish(ranks: &mut Ranks, stopped: Option<usize>) -> Vec<Option<End>> {
    let start = Instant::now();
    let mut ends: Vec<Option<End>> = ranks.0.iter().map(|_| None).collect();
    while ends
        .iter()
        .enumerate()
        .any(|(rank, end)| end.is_none() && Some(rank) != stopped)
    {
        assert!(
            start.elapsed() < LIMIT,
            "still running after {LIMIT:?}; ended so far: {ends:#?}"
        );
        for (rank, end) in ranks
            .0
            .iter_mut()
            .zip(&mut ends)
            .filter(|(_, end)| end.is_none())
        {
            if let Some(status) = rank.child.try_wait().unwrap() {
                let (stdout, stderr) = rank.output.take().unwrap().join().unwrap();
                *end = Some(End {
                    at: start.elapsed(),
                    code: status.code(),
                    stdout,
                    stderr,
                });
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
    ends
}

#[test]
fn rank_process() {
    let Ok(scenario) = env::var(SCENARIO) else {
        return;
    };
    let settings = Rendezvous::from_env()
        .unwrap()
        .expect("the environment says who this is");
    let settings = if scenario.starts_with("stop") {
        settings.heartbeat(Heartbeat {
            interval: Duration::from_millis(100),
            limit: Duration::from_secs(1),
        })
    } else {
        settings
    };
    let group = HostGroup::connect(settings).unwrap();
    let (rank, ranks) = (group.rank(), group.world_size());
    if scenario == "finish" {
        group.barrier().unwrap();
        let order: Vec<usize> = env::var(ORDER)
            .unwrap()
            .split(',')
            .map(|word| word.parse().unwrap())
            .collect();
        thread::sleep(Duration::from_millis(400) * order[rank] as u32);
        return;
    }
    let (what, victim) = scenario.split_once('-').unwrap_or((&scenario, "2"));
    let victim: usize = victim.parse().unwrap();
    for step in 0.. {
        if step == STEP && rank == victim {
            match what {
                "kill" => kill_process(getpid(), Signal::KILL).unwrap(),
                "stop" => kill_process(getpid(), Signal::STOP).unwrap(),
                "abort" => std::process::abort(),
                "exit" => std::process::exit(0),
                "panic" => panic!("on purpose"),
                "return" => return,
                "reason" => {
                    group.abort("the loss is not finite");
                    std::process::exit(1)
                }
                other => panic!("no scenario {other}"),
            }
            // A signal may reach another thread first; this one must not take part in the step meanwhile.
            thread::sleep(LIMIT);
        }
        let mut data = [(rank + 1) as f32; 5000];
        match group.all_reduce(
            bytemuck::cast_slice_mut(&mut data),
            DType::F32,
            ReduceOp::Sum,
        ) {
            Ok(()) => assert_eq!(data, [(ranks * (ranks + 1) / 2) as f32; 5000]),
            Err(error) => {
                assert_eq!(step, STEP);
                let kind = match &error {
                    GroupError::PeerLost { .. } => "lost",
                    GroupError::PeerLeft { .. } => "left",
                    GroupError::Aborted { .. } => "aborted",
                    _ => "other",
                };
                println!("\nRESULT {kind}: {error}");
                return;
            }
        }
    }
}

/// The scenario at rank `victim` of 4: every survivor must report `kind` with all of `words`, within 5 s.
fn survivors_report(what: &str, victim: usize, kind: &str, words: &[&str]) {
    for transport in ["tcp", "auto"] {
        let mut ranks = start(&format!("{what}-{victim}"), transport, 4, &[]);
        let stopped = (what == "stop").then_some(victim);
        let ends = finish(&mut ranks, stopped);
        let death = ends[victim].as_ref().map(|end| end.at);
        for (rank, end) in ends.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let end = end.as_ref().unwrap();
            let result = end
                .stdout
                .lines()
                .find_map(|line| line.strip_prefix("RESULT "));
            let result = result.unwrap_or_else(|| panic!("{transport} rank {rank}: {end:#?}"));
            assert!(
                result.starts_with(kind),
                "{transport} rank {rank}: {result}"
            );
            assert!(
                words.iter().all(|word| result.contains(word)),
                "{transport} rank {rank}: {result}"
            );
            assert_eq!(end.code, Some(0), "{end:#?}");
            if let Some(death) = death {
                assert!(
                    end.at.saturating_sub(death) < Duration::from_secs(5),
                    "{transport} rank {rank}"
                );
            }
        }
        if stopped.is_some() {
            let pid = Pid::from_child(&ranks.0[victim].child);
            kill_process(pid, Signal::CONT).unwrap();
        }
    }
}

#[test]
fn ddp_03_sigkill() {
    survivors_report(
        "kill",
        2,
        "lost",
        &["lost rank 2", "all_reduce(sum) of 5000 x f32"],
    );
}

#[test]
fn ddp_03_sigkill_of_rank_0() {
    survivors_report(
        "kill",
        0,
        "lost",
        &["lost rank 0", "all_reduce(sum) of 5000 x f32"],
    );
}

#[test]
fn ddp_03_abort() {
    survivors_report("abort", 2, "lost", &["lost rank 2", "all_reduce(sum)"]);
}

#[test]
fn ddp_03_exit_0() {
    survivors_report("exit", 2, "lost", &["lost rank 2", "all_reduce(sum)"]);
}

#[test]
fn ddp_03_panic() {
    survivors_report(
        "panic",
        2,
        "lost",
        &["lost rank 2 (it panicked)", "all_reduce(sum)"],
    );
}

#[test]
fn ddp_03_a_stopped_process() {
    survivors_report(
        "stop",
        2,
        "lost",
        &["lost rank 2 (no sign of life for 1s)", "all_reduce(sum)"],
    );
}

#[test]
fn ddp_01_a_rank_that_finishes_early() {
    survivors_report(
        "return",
        2,
        "left",
        &["rank 2 on ", "has finished and left", "all_reduce(sum)"],
    );
    survivors_report(
        "return",
        0,
        "left",
        &["rank 0 on ", "has finished and left", "all_reduce(sum)"],
    );
}

#[test]
fn an_abort_right_before_the_exit_is_heard() {
    survivors_report(
        "reason",
        2,
        "aborted",
        &["because rank 2 on ", " failed: the loss is not finite"],
    );
}

#[test]
fn ddp_41_ranks_finish_quietly_in_any_order() {
    for transport in ["tcp", "auto"] {
        for order in ["0,1,2", "2,1,0", "1,0,2"] {
            let mut ranks = start("finish", transport, 3, &[(ORDER, order)]);
            for end in finish(&mut ranks, None).into_iter().flatten() {
                assert_eq!(end.code, Some(0), "{order}: {end:#?}");
                assert_eq!(end.stderr, "", "{order}");
            }
        }
    }
}
