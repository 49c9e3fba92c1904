//! The `burn-ddp` command with real processes. Ranks are shell scripts, or this test binary as a program that joins its job.

#![cfg(all(target_os = "linux", feature = "cli"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/marked.rs"]
mod marked;

use burn_ddp::Ddp;
use marked::{Marked, SCRATCH};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::{
    env, fs,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{self, Command, Stdio},
    thread,
    time::Duration,
};

#[path = "run/restarts.rs"]
mod restarts;

/// After this everything is killed and the test fails.
const LIMIT: Duration = Duration::from_secs(40);

/// A running command.
struct Run(Marked);

#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    stdout: String,
    stderr: String,
    scratch: tempfile::TempDir,
}

impl Ended {
    /// What a rank has written, with the names of the files.
    fn notes(&self) -> Vec<(String, String)> {
        let mut notes: Vec<_> = fs::read_dir(self.scratch.path())
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("note-"))
            .map(|entry| {
                let name = entry.file_name().into_string().unwrap();
                (name, fs::read_to_string(entry.path()).unwrap())
            })
            .collect();
        notes.sort();
        notes
    }

    #[track_caller]
    fn says(&self, words: &[&str]) {
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?}: {self:#?}");
        }
    }
}

impl Run {
    /// `burn-ddp run` with `options`, in a clean environment but for `variables`.
    fn start(options: &[&str], program: &[&str], variables: &[(&str, &str)]) -> Self {
        Self(Marked::start(LIMIT, |scratch| {
            let file = |name: &str| fs::File::create(scratch.join(name)).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_burn-ddp"));
            for name in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
                command.env_remove(name);
            }
            command
                .args(["run"])
                .args(options)
                .args(if options.contains(&"--grace") {
                    &[][..]
                } else {
                    &["--grace", "1"]
                })
                .arg("--")
                .args(program)
                .env("RUST_BACKTRACE", "0")
                .envs(variables.iter().copied())
                .current_dir(scratch)
                .process_group(0)
                .stdin(Stdio::null())
                .stdout(file("stdout"))
                .stderr(file("stderr"));
            command
        }))
    }

    /// Ranks that run a shell script.
    fn script(options: &[&str], script: &str, variables: &[(&str, &str)]) -> Self {
        Self::start(options, &["sh", "-c", script], variables)
    }

    fn wait_for(&self, files: &[&str]) {
        let there = |name: &&str| self.0.scratch.path().join(name).exists();
        while !files.iter().all(there) {
            self.0.check_limit("the start");
        }
    }

    fn wait(mut self) -> Ended {
        let status = self.0.wait();
        let read = |name: &str| fs::read_to_string(self.0.scratch.path().join(name)).unwrap();
        Ended {
            code: status.code(),
            stdout: read("stdout"),
            stderr: read("stderr"),
            scratch: self.0.scratch,
        }
    }
}

/// This binary, as a program whose ranks join and do what their part says.
fn ranks(part: &str) -> Vec<String> {
    program("a_rank", part)
}

/// This binary, as a program that runs the test function `test`.
fn program(test: &str, part: &str) -> Vec<String> {
    let this = env::current_exe().unwrap().display().to_string();
    let part = format!("PART={part}");
    let test = [
        "--exact",
        test,
        "--nocapture",
        "--test-threads=1",
        "--quiet",
    ];
    [&["env", &part, &this][..], &test]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .collect()
}

fn borrowed(words: &[String]) -> Vec<&str> {
    words.iter().map(String::as_str).collect()
}

/// Not a test by itself: a rank.
#[test]
fn a_rank() {
    let Ok(part) = env::var("PART") else {
        return;
    };
    let scratch = PathBuf::from(env::var(SCRATCH).unwrap());
    let generation = env::var("BURN_DDP_GENERATION").unwrap();
    let result = burn_ddp::launch(|ddp: Ddp| {
        let sum = ddp.sum(ddp.rank() as f64 + 1.0)?;
        let note = format!("{} of {} sum {sum}", ddp.local_rank(), ddp.world_size());
        let name = format!("note-{generation}-{}", ddp.rank());
        fs::write(scratch.join(name), note).unwrap();
        match (part.as_str(), generation.as_str(), ddp.rank()) {
            ("dies-once", "0", 1) => kill_process(rustix::process::getpid(), Signal::KILL).unwrap(),
            ("waits", "0", _) => loop {
                ddp.sum(1.0)?;
                thread::sleep(Duration::from_millis(20));
            },
            _ => {}
        }
        ddp.barrier()
    });
    process::exit(result.is_err().into());
}

#[test]
fn ranks_are_told_who_they_are() {
    let script = "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $BURN_DDP_GENERATION ${#BURN_DDP_SECRET} \
        ${BURN_DDP_LISTEN_FD:+listens} $* > note-$RANK; echo out; echo err >&2; exit 0";
    let ended = Run::start(
        &["--nproc", "2"],
        &["sh", "-c", script, "x", "-a", "b"],
        &[],
    )
    .wait();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let notes: Vec<_> = ended.notes().into_iter().map(|(_, note)| note).collect();
    assert_eq!(
        notes,
        [
            "0 0 2 2 0/1 127.0.0.1 0 64 listens -a b\n",
            "1 1 2 2 0/1 127.0.0.1 0 64 -a b\n"
        ]
    );
    let mut lines: Vec<_> = ended.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[rank 1] out", "out"]);
    ended.says(&["[rank 1] err"]);
}

#[test]
fn ddp_20_exit_codes_and_signals_are_passed_on() {
    for (script, code, words) in [
        ("[ $RANK = 1 ] && exit 3; sleep 100", 3, "exit code 3"),
        (
            "[ $RANK = 1 ] && kill -9 $$; sleep 100",
            137,
            "signal 9 (SIGKILL)",
        ),
    ] {
        let ended = Run::script(&["--nproc", "3"], script, &[]).wait();
        assert_eq!(ended.code, Some(code), "{ended:#?}");
        ended.says(&["rank 1 of 3 failed first", words, "ended by the launcher"]);
    }
}

#[test]
fn a_program_that_cannot_be_found_is_named() {
    let script = tempfile::tempdir().unwrap();
    let script = script.path().join("script");
    std::fs::write(&script, "#!/no/such/shell\n").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, executable).unwrap();
    let script = script.to_str().unwrap();
    for (program, text) in [
        (
            "/no/such/program",
            "the program was not found: there is no /no/such/program",
        ),
        (
            "no-such-program",
            "the program was not found: no no-such-program in PATH",
        ),
        (script, "not what its first line says to run it with"),
    ] {
        let ended = Run::start(&["--nproc", "2"], &[program], &[]).wait();
        assert_eq!(ended.code, Some(1));
        ended.says(&[&format!("could not start rank 0 ({program}): "), text]);
    }
}

#[test]
fn a_wrong_command_line_starts_nothing() {
    let ended = Run::script(&["--nnodes", "2"], "touch note-x", &[]).wait();
    assert_eq!((ended.code, ended.notes()), (Some(2), Vec::new()));
    ended.says(&["--nnodes 2 needs --node-rank", "Usage: burn-ddp run"]);
    let ended = Run::script(&[], "touch note-x", &[("BURN_DDP_TIMEOUT", "soon")]).wait();
    assert_eq!((ended.code, ended.notes()), (Some(1), Vec::new()));
    ended.says(&["BURN_DDP_TIMEOUT is \"soon\""]);
    let options = ["--log-dir", "/proc/self/logs"];
    let ended = Run::script(&options, "touch note-x", &[]).wait();
    assert_eq!((ended.code, ended.notes()), (Some(1), Vec::new()));
    ended.says(&["cannot write the log /proc/self/logs/generation-0"]);
}

#[test]
fn each_ranks_output_is_kept_by_generation() {
    let script = "echo out $RANK; echo err $RANK >&2; printf 'no end'; sleep 1; exit $((1 - BURN_DDP_GENERATION))";
    let options = ["--nproc", "2", "--max-restarts", "1", "--log-dir", "logs/a"];
    let ended = Run::script(&options, script, &[]).wait();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    for generation in 0..2 {
        for rank in 0..2 {
            let path = format!("logs/a/generation-{generation}/rank-{rank}.log");
            let text = fs::read_to_string(ended.scratch.path().join(path)).unwrap();
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            lines.sort();
            let expected = [
                format!("err {rank}"),
                "no end".to_owned(),
                format!("out {rank}"),
            ];
            assert_eq!(lines, expected);
        }
    }
    // Rank 0's lines as they are, those of the other under its name, and a line between the generations.
    assert!(ended.stdout.contains("out 0\n") && ended.stdout.contains("[rank 1] out 1\n"));
    ended.says(&["restart 1 of 1, generation 1"]);
}

#[test]
fn restarts_are_counted_and_the_last_failure_is_reported() {
    let script = "touch note-$BURN_DDP_GENERATION-$RANK; [ $RANK = 1 ] && exit $((4 + BURN_DDP_GENERATION)); sleep 100";
    let options = ["--nproc", "2", "--max-restarts", "2"];
    let ended = Run::script(&options, script, &[]).wait();
    assert_eq!(ended.notes().len(), 6, "{ended:#?}");
    assert_eq!(ended.code, Some(6));
    ended.says(&["restart 2 of 2, generation 2", "exit code 6"]);
}

#[test]
fn a_job_goes_on_after_a_rank_was_killed() {
    let program = ranks("dies-once");
    let options = ["--nproc", "3", "--max-restarts", "1"];
    let ended = Run::start(&options, &borrowed(&program), &[]).wait();
    assert_eq!(ended.code, Some(0), "{ended:#?}");
    let notes = ended.notes();
    assert_eq!(notes.len(), 6, "{notes:?}");
    for (rank, (name, note)) in notes[3..].iter().enumerate() {
        assert_eq!(*name, format!("note-1-{rank}"));
        assert_eq!(*note, format!("{rank} of 3 sum 6"));
    }
    ended.says(&[
        "rank 1 of 3 failed first",
        "signal 9",
        "restart 1 of 1, generation 1",
    ]);
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// One of two machines, both of which are this one.
fn node(rank: &str, port: u16, more: &[&str], part: &str) -> Run {
    let port = port.to_string();
    let options = [
        "--nnodes",
        "2",
        "--nproc",
        "2",
        "--master-addr",
        "127.0.0.1",
    ];
    let options = [
        &options[..],
        &["--node-rank", rank, "--master-port", &port][..],
        more,
    ]
    .concat();
    let variables = [
        ("BURN_DDP_SECRET", "the same on all machines"),
        ("BURN_DDP_RENDEZVOUS_TIMEOUT", "20"),
    ];
    Run::start(&options, &borrowed(&ranks(part)), &variables)
}

#[test]
fn two_machines_form_one_job() {
    let port = free_port();
    let runs = ["1", "0"].map(|rank| node(rank, port, &[], ""));
    for (run, ranks) in runs.into_iter().zip([2..4, 0..2]) {
        let ended = run.wait();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let expected: Vec<_> = ranks
            .map(|rank| {
                (
                    format!("note-0-{rank}"),
                    format!("{} of 4 sum 10", rank % 2),
                )
            })
            .collect();
        assert_eq!(ended.notes(), expected);
        ended.says(&["--master-addr 127.0.0.1 means each machine itself"]);
    }
}

#[test]
fn both_machines_start_again_after_a_failure_on_one() {
    let port = free_port();
    let runs = ["0", "1"].map(|rank| node(rank, port, &["--max-restarts", "2"], "dies-once"));
    for run in runs {
        let ended = run.wait();
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let notes = ended.notes();
        assert_eq!(notes.len(), 4, "{ended:#?}");
        assert!(notes.iter().all(|(_, note)| note.ends_with("of 4 sum 10")));
        ended.says(&["restart 1 of 2, generation 1"]);
    }
}

/// A machine is lost with its launcher; another one takes its place, without knowing how often the job has been restarted.
#[test]
fn a_machine_that_comes_back_joins_the_generation_of_the_others() {
    for lost in ["1", "0"] {
        let port = free_port();
        let restarts = ["--max-restarts", "3"];
        let stays = if lost == "1" { "0" } else { "1" };
        let [lost_run, stays_run] = [lost, stays].map(|rank| node(rank, port, &restarts, "waits"));
        let notes = |rank: &str| match rank {
            "0" => ["note-0-0", "note-0-1"],
            _ => ["note-0-2", "note-0-3"],
        };
        lost_run.wait_for(&notes(lost));
        stays_run.wait_for(&notes(stays));
        lost_run.0.signal(Signal::KILL);
        assert_eq!(lost_run.wait().code, None);
        // It is in the next generation, or will be; the one that comes is not.
        let comes = node(lost, port, &restarts, "");
        for ended in [comes.wait(), stays_run.wait()] {
            assert_eq!(ended.code, Some(0), "{ended:#?}");
            ended.says(&["generation 1"]);
            let last: Vec<_> = ended.notes().into_iter().rev().take(2).collect();
            assert!(
                last.iter().all(|(name, _)| name.starts_with("note-1-")),
                "{ended:#?}"
            );
        }
    }
}

/// Three ranks, of which one ignores polite signals and has a child that does too.
const STUBBORN: &str =
    "touch ready-$RANK; [ $RANK = 1 ] && { trap '' TERM INT HUP; sleep 1000 & }; sleep 1000; wait";

fn stopped_by(signal: Signal) -> Ended {
    let run = Run::script(&["--nproc", "3", "--max-restarts", "5"], STUBBORN, &[]);
    run.wait_for(&["ready-0", "ready-1", "ready-2"]);
    // The child of rank 1 too: with it there are the launcher, its guard, three shells and four that sleep.
    while run.0.alive().len() < 9 {
        run.0.check_limit("the start of the sleepers");
    }
    match signal {
        // As a terminal does.
        Signal::INT => {
            kill_process_group(Pid::from_child(&run.0.program), signal).unwrap();
        }
        _ => run.0.signal(signal),
    }
    run.wait()
}

#[test]
fn ddp_15_signals_to_the_launcher_end_everything() {
    for (signal, code, name) in [
        (Signal::INT, 130, "SIGINT"),
        (Signal::TERM, 143, "SIGTERM"),
        (Signal::HUP, 129, "SIGHUP"),
    ] {
        let ended = stopped_by(signal);
        assert_eq!(ended.code, Some(code), "{ended:#?}");
        ended.says(&[name]);
        assert!(!ended.stderr.contains("restart"), "{ended:#?}");
    }
}

#[test]
fn ddp_15_a_killed_launcher_takes_along_what_never_heard_of_it() {
    assert_eq!(stopped_by(Signal::KILL).code, None);
}

#[test]
fn ddp_15_a_second_signal_skips_the_grace_period() {
    // The grace period is longer than this test's limit.
    let options = ["--nproc", "2", "--grace", "100"];
    let run = Run::script(&options, STUBBORN, &[]);
    run.wait_for(&["ready-0", "ready-1"]);
    // The command, its guard, two shells and three that sleep.
    while run.0.alive().len() < 7 {
        run.0.check_limit("the start of the sleepers");
    }
    run.0.signal(Signal::TERM);
    while run.0.alive().len() == 7 {
        run.0.check_limit("the first signal");
    }
    run.0.signal(Signal::INT);
    assert_eq!(run.wait().code, Some(143));
}

#[test]
fn help_says_what_there_is() {
    let help = Command::new(env!("CARGO_BIN_EXE_burn-ddp"))
        .args(["run", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    for word in [
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--master-addr",
        "--master-port",
        "--max-restarts",
        "--log-dir",
        "BURN_DDP_SECRET",
        "Exit code",
    ] {
        assert!(help.contains(word), "no {word}: {help}");
    }
    assert!(!help.contains("__guard"));
}
