//! A started program, and a mark by which it and all that it starts are known, wherever they are in the process tree.

use rustix::process::{Pid, Signal, kill_process};
use std::{
    fs,
    path::Path,
    process::{self, Child, Command, ExitStatus},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

const MARK: &str = "BURN_DDP_TEST_MARK";
/// A folder of its own, for whatever the program's processes tell the test.
pub(crate) const SCRATCH: &str = "BURN_DDP_TEST_SCRATCH";

/// A running program.
pub(crate) struct Marked {
    pub(crate) program: Child,
    pub(crate) scratch: tempfile::TempDir,
    mark: String,
    started: Instant,
    pub(crate) limit: Duration,
}

impl Marked {
    /// Starts what `command` makes of its scratch folder. After `limit` everything is killed and the test fails.
    pub(crate) fn start(limit: Duration, command: impl FnOnce(&Path) -> Command) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let value = format!("{}-{count}", process::id());
        let scratch = tempfile::tempdir().unwrap();
        let program = command(scratch.path())
            .env(MARK, &value)
            .env(SCRATCH, scratch.path())
            .spawn()
            .unwrap();
        Self {
            program,
            scratch,
            mark: format!("{MARK}={value}"),
            started: Instant::now(),
            limit,
        }
    }

    /// The program and all its descendants that have not ended.
    pub(crate) fn alive(&self) -> Vec<Pid> {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        let ours = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|variable| variable == self.mark.as_bytes())
        };
        pids.filter(ours).filter_map(Pid::from_raw).collect()
    }

    /// For a loop that waits for `what`: pauses, or ends the test once the limit has passed.
    #[track_caller]
    pub(crate) fn check_limit(&self, what: &str) {
        if self.started.elapsed() > self.limit {
            for pid in self.alive() {
                let _ = kill_process(pid, Signal::KILL);
            }
            // Of programs that write it there.
            let stderr = fs::read_to_string(self.scratch.path().join("stderr"));
            let (limit, stderr) = (self.limit, stderr.unwrap_or_default());
            panic!("{what} took longer than {limit:?}: {stderr}");
        }
        thread::sleep(Duration::from_millis(20));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.program), signal).unwrap();
    }

    /// Waits for the end of the program and of all that it has started.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let status = loop {
            match self.program.try_wait().unwrap() {
                Some(status) => break status,
                None => self.check_limit("the run"),
            }
        };
        // What outlives a killed program needs a moment; after one that ended by itself nothing may be left.
        if status.code().is_some() {
            assert_eq!(self.alive(), [], "processes are left");
        }
        while !self.alive().is_empty() {
            self.check_limit("the end of the ranks");
        }
        status
    }
}
