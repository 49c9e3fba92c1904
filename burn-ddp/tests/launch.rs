//! The launcher with real processes: this test binary starts itself as launcher, and that one as ranks.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/marked.rs"]
mod marked;

use burn_ddp::launch::{self, LaunchError, Launcher};
use marked::{Marked, SCRATCH};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::{
    env, fmt, fs,
    io::Read,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    sync::{Arc, atomic::AtomicBool},
    thread,
    time::Duration,
};

/// After this everything is killed and the test fails.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug)]
enum Failure {
    Launch(LaunchError),
    Own(&'static str),
    Peer(&'static str),
}

impl From<LaunchError> for Failure {
    fn from(error: LaunchError) -> Self {
        Failure::Launch(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Launch(error) => error.fmt(f),
            Failure::Own(text) | Failure::Peer(text) => f.write_str(text),
        }
    }
}

struct PeerLost;

// ---- the programs that are launched

/// Not a test by itself: the entry of the launched programs.
#[test]
fn program() {
    let Ok(name) = env::var("LAUNCH_PROGRAM") else {
        return;
    };
    let (nproc, grace) = match name.as_str() {
        "impatient" => (2, 60),
        "single" => (1, 1),
        "environment" => (2, 1),
        _ => (3, 1),
    };
    if name == "environment" {
        tracing_subscriber::fmt()
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
    }
    let mut launcher = Launcher::<Failure>::new()
        .grace(Duration::from_secs(grace))
        .secondary(|error| matches!(error, Failure::Peer(_)))
        .panic_payload(|payload| {
            payload
                .is::<PeerLost>()
                .then(|| ("typed: lost rank 1".to_owned(), true))
        });
    if name != "from_env" {
        launcher = launcher.nproc(nproc);
    }
    match launcher.run_local(|| rank(&name)) {
        Ok(()) => process::exit(0),
        Err(Failure::Launch(error)) => error.exit(),
        Err(error) => {
            eprintln!("{error}");
            process::exit(1)
        }
    }
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| "-".to_owned())
}

fn scratch(name: &str) -> PathBuf {
    Path::new(&variable(SCRATCH)).join(name)
}

fn wait_for(path: &Path) {
    while !path.exists() {
        thread::sleep(Duration::from_millis(10));
    }
}

fn ignore_signals() {
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false))).unwrap();
    }
}

fn sleep_for_ever() -> ! {
    loop {
        thread::sleep(Duration::from_secs(1000));
    }
}

/// What a rank of program `name` does.
#[allow(clippy::zombie_processes, reason = "what becomes of them is the point")]
fn rank(name: &str) -> Result<(), Failure> {
    let rank = variable(launch::RANK);
    match name {
        "environment" => environment(&rank),
        "single" => println!("body in {}", process::id()),
        "from_env" => println!("body of {rank}"),
        "boom" => {
            if rank == "1" {
                // The peers' errors come first in time, and are still not the cause.
                thread::sleep(Duration::from_millis(300));
                eprintln!("last words of rank 1");
                panic!("boom-{}", 42);
            } else if rank == "0" {
                return Err(Failure::Peer("lost rank 1"));
            }
            std::panic::panic_any(PeerLost);
        }
        "order" => match rank.as_str() {
            "2" => {
                fs::write(scratch("failed"), "").unwrap();
                return Err(Failure::Own("first cause"));
            }
            "0" => {
                wait_for(&scratch("failed"));
                thread::sleep(Duration::from_millis(500));
                return Err(Failure::Own("second cause"));
            }
            _ => {}
        },
        "killed" => {
            if rank == "2" {
                kill_process(getpid(), Signal::KILL).unwrap();
                sleep_for_ever();
            }
            return Err(Failure::Peer("lost rank 2"));
        }
        "exit" if rank == "1" => process::exit(7),
        "exit" => return Err(Failure::Peer("lost rank 1")),
        "caught" => {
            let _ = std::panic::catch_unwind(|| panic!("caught and done with"));
            if rank == "1" {
                return Err(Failure::Own("the real reason"));
            }
        }
        "daemon" => {
            Command::new("sleep").arg("1000").spawn().unwrap();
        }
        "nested" if rank == "1" => {
            let nested = Command::new(env::current_exe().unwrap())
                .args(env::args().skip(1))
                .env("LAUNCH_PROGRAM", "fails")
                .status();
            assert_eq!(nested.unwrap().code(), Some(1));
        }
        "nested" => {}
        "fails" => return Err(Failure::Own("of no interest to the launcher")),
        "hang" if rank == "1" => {
            wait_for(&scratch("ready-0"));
            wait_for(&scratch("ready-2"));
            return Err(Failure::Own("out of data"));
        }
        "hang" | "sleep" | "impatient" => {
            if rank != "0" {
                ignore_signals();
            }
            if rank == "1" {
                Command::new("sh")
                    .args(["-c", "trap '' TERM INT HUP; sleep 1000"])
                    .spawn()
                    .unwrap();
            }
            fs::write(
                scratch(&format!("port-{rank}")),
                variable(launch::MASTER_PORT),
            )
            .unwrap();
            fs::write(scratch(&format!("ready-{rank}")), process::id().to_string()).unwrap();
            sleep_for_ever();
        }
        other => panic!("no program {other}"),
    }
    Ok(())
}

fn environment(rank: &str) {
    let sockets = fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(|entry| {
            fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
        });
    // Bound and listening: a connection is taken up without anybody having called accept.
    let port = variable(launch::MASTER_PORT).parse().unwrap();
    let sockets = sockets.count();
    TcpStream::connect((variable(launch::MASTER_ADDR), port)).unwrap();
    let secret = variable(launch::SECRET);
    assert!(secret.len() == 64 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()));
    println!(
        "rank {rank} local {} of {} local {} threads {} {} sockets {sockets} listens {}",
        variable(launch::LOCAL_RANK),
        variable(launch::WORLD_SIZE),
        variable(launch::LOCAL_WORLD_SIZE),
        variable("RAYON_NUM_THREADS"),
        variable("OMP_NUM_THREADS"),
        env::var(launch::LISTEN_FD).is_ok(),
    );
    println!("port {port}");
    eprintln!("to stderr");
    if rank == "1" {
        print!("no end of line");
    }
}

// ---- the tests' side

/// A running launcher.
struct Run(Marked);

struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Run {
    fn start(program: &str, variables: &[(&str, &str)]) -> Self {
        Self(Marked::start(LIMIT, |_| {
            let mut command = Command::new(env::current_exe().unwrap());
            command
                // Quiet: rank 0's harness would leave a line open, into which the other ranks' lines would fall.
                .args([
                    "--exact",
                    "program",
                    "--nocapture",
                    "--test-threads=1",
                    "--quiet",
                ])
                .env("LAUNCH_PROGRAM", program)
                .env("RUST_BACKTRACE", "0")
                .env_remove("RAYON_NUM_THREADS")
                .envs(variables.iter().copied())
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            command
        }))
    }

    fn wait_until_ready(&self, ranks: usize) -> Vec<Pid> {
        let ready = |rank: usize| {
            let text =
                fs::read_to_string(self.0.scratch.path().join(format!("ready-{rank}"))).ok()?;
            Pid::from_raw(text.parse().ok()?)
        };
        loop {
            if let Some(pids) = (0..ranks).map(ready).collect::<Option<Vec<_>>>() {
                return pids;
            }
            self.0.check_limit("the start");
        }
    }

    fn wait(mut self) -> Ended {
        let read = |mut from: Box<dyn Read + Send>| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                from.read_to_end(&mut bytes).unwrap();
                String::from_utf8(bytes).unwrap()
            })
        };
        let stdout = read(Box::new(self.0.program.stdout.take().unwrap()));
        let stderr = read(Box::new(self.0.program.stderr.take().unwrap()));
        let status = self.0.wait();
        Ended {
            code: status.code(),
            stdout: stdout.join().unwrap(),
            stderr: stderr.join().unwrap(),
        }
    }
}

fn run(program: &str) -> Ended {
    Run::start(program, &[]).wait()
}

/// The launcher's own report, which comes after all output of the ranks.
fn report(ended: &Ended) -> &str {
    let start = ended
        .stderr
        .rfind("\nrank ")
        .map_or(0, |newline| newline + 1);
    &ended.stderr[start..]
}

#[track_caller]
fn assert_order(text: &str, parts: &[&str]) {
    let mut from = 0;
    for part in parts {
        match text[from..].find(part) {
            Some(at) => from += at + part.len(),
            None => panic!("no {part:?} (in this order: {parts:?}) in:\n{text}"),
        }
    }
}

#[test]
fn ddp_42_ranks_get_their_place_and_their_share_of_the_cores() {
    let ended = Run::start("environment", &[("OMP_NUM_THREADS", "7")]).wait();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let share = (thread::available_parallelism().unwrap().get() / 2).max(1);
    let line = |rank, sockets, listens| {
        format!(
            "rank {rank} local {rank} of 2 local 2 threads {share} 7 sockets {sockets} listens {listens}"
        )
    };
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert!(
        lines.contains(&line(0, 1, true).as_str()),
        "{}",
        ended.stdout
    );
    assert!(
        lines.contains(&format!("[rank 1] {}", line(1, 0, false)).as_str()),
        "{}",
        ended.stdout
    );
    assert!(
        lines.contains(&"[rank 1] no end of line"),
        "{}",
        ended.stdout
    );
    assert!(ended.stderr.lines().any(|line| line == "to stderr"));
    assert!(
        ended
            .stderr
            .lines()
            .any(|line| line == "[rank 1] to stderr")
    );
    assert!(ended.stderr.contains(&format!(
        "{share} thread(s) each (RAYON_NUM_THREADS, MKL_NUM_THREADS"
    )));
}

#[test]
fn ddp_17_four_launches_at_once() {
    let runs: Vec<Run> = (0..4).map(|_| Run::start("environment", &[])).collect();
    let mut ports: Vec<String> = runs
        .into_iter()
        .map(|run| {
            let ended = run.wait();
            assert_eq!(ended.code, Some(0), "{}", ended.stderr);
            ended
                .stdout
                .lines()
                .find_map(|line| line.strip_prefix("port "))
                .unwrap()
                .to_owned()
        })
        .collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), 4);
}

#[test]
fn ddp_20_the_first_cause_is_reported() {
    let ended = run("boom");
    let report = report(&ended);
    assert_order(
        report,
        &[
            "rank 1 of 3 failed first",
            "exit code 101",
            "boom-42",
            "last words of rank 1",
            "then rank",
        ],
    );
    assert_order(report, &["boom-42", "then rank 0", "lost rank 1"]);
    assert_order(report, &["boom-42", "then rank 2", "typed: lost rank 1"]);
    assert!(
        report.contains("tests/launch.rs:"),
        "the panic's place is missing in {report}"
    );
    let pointers = ended.stderr.matches("book/src/troubleshooting.md");
    assert_eq!(pointers.count(), 1, "{}", ended.stderr);
    assert_eq!(ended.code, Some(101));
}

#[test]
fn ddp_20_of_two_causes_the_earlier_one_is_reported() {
    let ended = run("order");
    assert_order(
        report(&ended),
        &[
            "rank 2 of 3 failed first",
            "first cause",
            "then rank 0",
            "second cause",
        ],
    );
    assert_eq!(ended.code, Some(1));
}

#[test]
fn ddp_20_a_killed_rank_is_reported_with_its_signal() {
    let ended = run("killed");
    assert_order(
        report(&ended),
        &[
            "rank 2 of 3 failed first",
            "signal 9 (SIGKILL)",
            "then rank",
            "lost rank 2",
        ],
    );
    assert_eq!(ended.code, Some(137));
}

#[test]
fn an_exit_code_is_passed_on() {
    let ended = run("exit");
    assert_order(
        report(&ended),
        &[
            "rank 1 of 3 failed first",
            "exit code 7",
            "then rank",
            "lost rank 1",
        ],
    );
    assert_eq!(ended.code, Some(7));
}

#[test]
fn a_caught_panic_is_no_failure() {
    let ended = run("caught");
    assert_order(
        report(&ended),
        &["rank 1 of 3 failed first", "exit code 1", "the real reason"],
    );
    assert!(!report(&ended).contains("then rank"), "{}", ended.stderr);
}

#[test]
fn what_a_finished_rank_leaves_behind_is_ended() {
    // `wait` looks for what is left.
    assert_eq!(run("daemon").code, Some(0));
}

#[test]
fn a_program_that_a_rank_starts_is_no_rank() {
    let ended = run("nested");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
}

#[test]
fn ddp_03_ranks_that_hang_after_a_failure_are_ended() {
    let ended = run("hang");
    let report = report(&ended);
    assert_order(
        report,
        &[
            "rank 1 of 3 failed first",
            "out of data",
            "then rank",
            "ended by the launcher",
        ],
    );
    assert!(
        report.contains("then ranks 0, 2 (ended by the launcher)"),
        "{report}"
    );
    assert_eq!(ended.code, Some(1));
}

/// Signals the launcher alone, with one rank that obeys and two that do not, one of which has a child that does not.
fn stopped_by(signal: Signal) -> Ended {
    let run = Run::start("sleep", &[]);
    run.wait_until_ready(3);
    let port = fs::read_to_string(run.0.scratch.path().join("port-0"))
        .unwrap()
        .parse()
        .unwrap();
    run.0.signal(signal);
    let ended = run.wait();
    TcpListener::bind(("127.0.0.1", port)).expect("the port is free again");
    ended
}

#[test]
fn ddp_15_sigint_ends_everything() {
    let ended = stopped_by(Signal::INT);
    assert_eq!(ended.code, Some(130));
    assert_order(&ended.stderr, &["stopped by signal 2 (SIGINT)"]);
}

#[test]
fn ddp_15_sigterm_ends_everything() {
    let ended = stopped_by(Signal::TERM);
    assert_eq!(ended.code, Some(143));
    assert_order(&ended.stderr, &["stopped by signal 15 (SIGTERM)"]);
}

#[test]
fn ddp_15_a_killed_launcher_takes_everything_along() {
    assert_eq!(stopped_by(Signal::KILL).code, None);
}

#[test]
fn ddp_15_a_killed_launcher_takes_stopped_ranks_along() {
    let run = Run::start("sleep", &[]);
    for pid in run.wait_until_ready(3) {
        kill_process(pid, Signal::STOP).unwrap();
    }
    run.0.signal(Signal::KILL);
    run.wait();
}

#[test]
fn ddp_15_a_second_signal_skips_the_grace_period() {
    // The grace period is twice this test's limit.
    let run = Run::start("impatient", &[]);
    run.wait_until_ready(2);
    run.0.signal(Signal::TERM);
    // Rank 0 obeys; once it is gone, the first signal has been dealt with.
    let marker = run.wait_until_ready(2)[0];
    while Path::new(&format!("/proc/{}", marker.as_raw_nonzero())).exists() {
        run.0.check_limit("the first signal");
    }
    run.0.signal(Signal::TERM);
    assert_eq!(run.wait().code, Some(143));
}

#[test]
fn one_rank_runs_in_the_program_itself() {
    let run = Run::start("single", &[]);
    let body = format!("body in {}", run.0.program.id());
    let ended = run.wait();
    assert!(
        ended.stdout.lines().any(|line| line == body),
        "{}",
        ended.stdout
    );
    assert_eq!(ended.code, Some(0));
}

#[test]
fn another_launchers_rank_runs_in_the_program_itself() {
    let ended = Run::start(
        "from_env",
        &[("RANK", "1"), ("WORLD_SIZE", "2"), (launch::NPROC, "3")],
    )
    .wait();
    assert_eq!(
        ended.stdout.matches("body of 1").count(),
        1,
        "{}",
        ended.stdout
    );
}

#[test]
fn the_number_of_ranks_comes_from_the_environment() {
    let ended = Run::start("from_env", &[(launch::NPROC, "3")]).wait();
    let mut bodies: Vec<&str> = ended
        .stdout
        .lines()
        .filter(|line| line.contains("body of"))
        .collect();
    bodies.sort_unstable();
    assert_eq!(
        bodies,
        ["[rank 1] body of 1", "[rank 2] body of 2", "body of 0"]
    );
    for wrong in ["0", "two", "-1"] {
        let ended = Run::start("from_env", &[(launch::NPROC, wrong)]).wait();
        assert_order(
            &ended.stderr,
            &[wrong, launch::NPROC, "is no number of ranks"],
        );
        assert_eq!(ended.code, Some(1));
    }
    // Far above any machine's cores, and what the user allows.
    for (nproc, allowed) in [("99999999", None), ("3", Some("2"))] {
        let mut variables = vec![(launch::NPROC, nproc)];
        variables.extend(allowed.map(|allowed| (launch::MAX_RANKS, allowed)));
        let ended = Run::start("from_env", &variables).wait();
        let allows = format!("set BURN_DDP_MAX_RANKS={nproc}");
        assert_order(&ended.stderr, &[nproc, "ranks on a machine with", &allows]);
        assert!(!ended.stdout.contains("body of"), "{}", ended.stdout);
        assert_eq!(ended.code, Some(1));
    }
}
