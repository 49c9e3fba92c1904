//! A test that is started again under mpirun, where the same test function is a rank's program.

use std::{
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

const PROGRAM: &str = "BURN_DDP_TEST_MPI";
const LIMIT: Duration = Duration::from_secs(150);

/// What this process is to run as a rank; `None` in the test itself.
pub(crate) fn program() -> Option<String> {
    std::env::var(PROGRAM).ok()
}

/// How the ranks ended.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) success: bool,
    /// What they and mpirun wrote, stdout first.
    pub(crate) text: String,
}

/// Runs the test function `test` (its path in its file) on `ranks` ranks. `None`, and a word on stderr, where there is no mpirun.
pub(crate) fn mpirun(ranks: usize, test: &str, program: &str) -> Option<Run> {
    mpirun_with(ranks, test, program, &[])
}

/// As [`mpirun`], with variables for the ranks.
pub(crate) fn mpirun_with(
    ranks: usize,
    test: &str,
    program: &str,
    variables: &[(&str, &str)],
) -> Option<Run> {
    let mut command = Command::new("mpirun");
    // Open MPI's words for: as root, on fewer cores than ranks, and not bound to one core each. MPICH needs none.
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .env("OMPI_MCA_hwloc_base_binding_policy", "none")
        .env(PROGRAM, program)
        .envs(variables.iter().copied())
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    match command.spawn() {
        Ok(child) => Some(run_within(child, LIMIT)),
        Err(error) => {
            eprintln!("skipped {test}: mpirun cannot be started ({error})");
            None
        }
    }
}

fn run_within(child: Child, limit: Duration) -> Run {
    let id = rustix::process::Pid::from_child(&child);
    let output = thread::spawn(move || child.wait_with_output().unwrap());
    let end = Instant::now() + limit;
    while !output.is_finished() {
        if Instant::now() > end {
            // mpirun takes its ranks along.
            let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
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
        text: String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned(),
    }
}
