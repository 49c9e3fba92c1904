//! A test that is a program which launches its own ranks.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Set in the launcher and its ranks: a path of the run's own, which marks its processes.
const MARK: &str = "BURN_DDP_TEST_LAUNCHED";
const VARIANT: &str = "BURN_DDP_TEST_VARIANT";
const LIMIT: Duration = Duration::from_secs(60);

/// How a launch ended.
#[derive(Debug)]
pub struct Launched {
    /// The launcher's exit code.
    pub code: Option<i32>,
    /// What the launcher and its ranks wrote to stderr.
    pub stderr: String,
    /// The processes of the launch that were still there after the launcher's end.
    pub left: Vec<u32>,
}

/// Runs `program(variant)`, which launches ranks and never returns, in a process of its own for each of `variants`, all at once.
///
/// `test` is the path of the test function in its file.
pub fn launched(test: &str, variants: &[&str], program: impl FnOnce(&str)) -> Vec<Launched> {
    if std::env::var_os(MARK).is_some() {
        program(&std::env::var(VARIANT).unwrap());
        unreachable!("the program ends its process");
    }
    let directory = tempfile::tempdir().unwrap();
    let start = |(i, variant): (usize, &&str)| {
        let mark = directory.path().join(i.to_string());
        let stderr = fs::File::create(&mark).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(MARK, &mark)
            .env(VARIANT, variant)
            .env("BURN_DDP_TIMEOUT", "20")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn();
        (mark, child.unwrap())
    };
    let mut launchers: Vec<_> = variants.iter().enumerate().map(start).collect();
    let end = Instant::now() + LIMIT;
    let ended = launchers.iter_mut().map(|(mark, launcher)| {
        let code = wait(launcher, end);
        let marked = format!("{MARK}={}", mark.display());
        Launched {
            code,
            stderr: fs::read_to_string(mark).unwrap(),
            left: processes_with(&marked),
        }
    });
    ended.collect()
}

/// A launcher that has to be killed takes its ranks along.
fn wait(launcher: &mut Child, end: Instant) -> Option<i32> {
    loop {
        if let Some(status) = launcher.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > end {
            let _ = launcher.kill();
            let _ = launcher.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The processes, other than zombies, that were started with this variable (`NAME=value`).
pub fn processes_with(variable: &str) -> Vec<u32> {
    let pids = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let marked = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|entry| entry == variable.as_bytes())
    };
    pids.filter(marked).collect()
}
