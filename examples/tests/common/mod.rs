//! Runs an example as a user does: its own processes, with a time limit.

use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// No run here takes longer, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(300);

/// How a run has ended, and what it wrote.
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs the example `name` to its end.
pub(crate) fn run(name: &str, arguments: &[&str], out: &Path) -> Run {
    let test = std::env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples").join(name);
    let program = program.with_extension(std::env::consts::EXE_EXTENSION);
    // Files, as a pipe that nobody reads would stop the program when it is full.
    let [stdout, stderr] = [(); 2].map(|()| tempfile::tempfile().unwrap());
    let mut child = Command::new(&program)
        .args(arguments)
        .arg("--out")
        .arg(out)
        .stdout(stdout.try_clone().unwrap())
        .stderr(stderr.try_clone().unwrap())
        .spawn()
        .unwrap_or_else(|e| panic!("{}: {e}; build the examples first", program.display()));
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap(); // its ranks end with it
            child.wait().unwrap();
            panic!("{name} {arguments:?} takes too long: {}", text(stderr));
        }
        thread::sleep(Duration::from_millis(20));
    };
    Run {
        status,
        stdout: text(stdout),
        stderr: text(stderr),
    }
}

fn text(mut file: File) -> String {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[allow(dead_code)] // each file of tests uses some
impl Run {
    /// Itself, if it has ended well.
    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert!(self.status.success(), "{}", self.stderr);
        self
    }

    /// The report of a run with `--json` that must have ended well.
    #[track_caller]
    pub(crate) fn report(self) -> Value {
        let run = self.succeeded();
        serde_json::from_str(run.stdout.lines().next_back().unwrap()).unwrap()
    }

    /// The one line of a run that was refused.
    #[track_caller]
    pub(crate) fn mistake(self) -> String {
        assert_eq!(self.status.code(), Some(1), "{}", self.stderr);
        let line = self.stderr.strip_suffix('\n').unwrap();
        assert_eq!(line.lines().count(), 1, "{line}");
        line.to_owned()
    }
}
