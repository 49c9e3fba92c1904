//! A test that is started again under mpirun, where the same test function is a rank's program.

use rustix::process::{Pid, Signal, kill_process};
use std::{
    env,
    io::ErrorKind,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Set in the ranks: what the test function is to run there.
const PROGRAM: &str = "BURN_DDP_TEST_MPI";
/// The mpirun to use, where it is not the one in the path: that of the MPI that the tests are built with.
const MPIRUN: &str = "BURN_DDP_TEST_MPIRUN";
const LIMIT: Duration = Duration::from_secs(150);

/// What this process is to run as a rank; `None` in the test itself.
pub(crate) fn program() -> Option<String> {
    env::var(PROGRAM).ok()
}

/// How the ranks ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) success: bool,
    /// What they and mpirun wrote, stdout first.
    pub(crate) text: String,
    #[allow(dead_code, reason = "not in every test program")]
    pub(crate) stderr: String,
}

/// A test function to start on some ranks.
#[derive(Debug)]
pub(crate) struct Mpirun {
    command: Command,
    test: String,
}

impl Mpirun {
    /// The test function `test` (its path in its file) on `ranks` ranks.
    pub(crate) fn new(ranks: usize, test: &str, program: &str) -> Self {
        let arguments = ["--exact", test, "--nocapture", "--test-threads=1"];
        let mut this = Self::of(ranks, env::current_exe().unwrap(), &arguments);
        this.command.env(PROGRAM, program);
        this
    }

    /// Any program.
    pub(crate) fn of(
        ranks: usize,
        program: impl AsRef<std::ffi::OsStr>,
        arguments: &[&str],
    ) -> Self {
        let mpirun = env::var_os(MPIRUN).unwrap_or_else(|| "mpirun".into());
        let mut command = Command::new(mpirun);
        // Open MPI's words for: as root, on fewer cores than ranks, and not bound to one core each. MPICH needs none.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
            .env("OMPI_MCA_hwloc_base_binding_policy", "none")
            .args(["-n", &ranks.to_string()])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let test = arguments.get(1).map_or("", |test| test).to_owned();
        Self { command, test }
    }

    /// With a variable for the ranks.
    #[allow(dead_code, reason = "not in every test program")]
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// `None`, and a word on stderr, where there is no mpirun.
    pub(crate) fn start(mut self) -> Option<Child> {
        match self.command.spawn() {
            Ok(child) => Some(child),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("skipped {}: there is no mpirun", self.test);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`start`](Self::start), and waits for the end.
    pub(crate) fn run(self) -> Option<Run> {
        self.start().map(end_of)
    }
}

/// What has become of a started mpirun, which is ended at the limit.
pub(crate) fn end_of(child: Child) -> Run {
    let id = Pid::from_child(&child);
    let output = thread::spawn(move || child.wait_with_output().unwrap());
    let end = Instant::now() + LIMIT;
    while !output.is_finished() {
        if Instant::now() > end {
            // mpirun takes its ranks along.
            let _ = kill_process(id, Signal::TERM);
        }
        thread::sleep(Duration::from_millis(10));
    }
    let Output {
        status,
        stdout,
        stderr,
    } = output.join().unwrap();
    Run {
        success: status.success(),
        text: String::from_utf8_lossy(&[&stdout[..], &stderr].concat()).into_owned(),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}
