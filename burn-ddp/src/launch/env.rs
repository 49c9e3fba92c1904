//! The environment between launcher and ranks.

use super::LaunchError;
pub use crate::group::host::{LISTEN_FD, SECRET};
use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    num::NonZeroUsize,
};

/// Global rank of a process, `0..WORLD_SIZE`. The names without prefix are torchrun's and Kubeflow's.
pub const RANK: &str = "RANK";
/// Number of processes of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Rank within the machine.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of the job's processes on the machine.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Where rank 0 can be reached.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of rank 0's rendezvous.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// Process id of the launcher; its presence makes a process a rank.
pub const LAUNCHER_PID: &str = "BURN_DDP_LAUNCHER_PID";
/// Number of ranks, where the program does not say.
pub const NPROC: &str = "BURN_DDP_NPROC";

/// Read end of a pipe that closes when the launcher ends, however it ends.
#[cfg(unix)]
pub(super) const LIFELINE_FD: &str = "BURN_DDP_LIFELINE_FD";
/// Write end of the pipe on which a rank tells the launcher why it failed.
pub(super) const REPORT_FD: &str = "BURN_DDP_REPORT_FD";

/// Sizes of the thread pools that a training process commonly has: Burn's own CPU work (rayon), and BLAS
/// libraries behind it.
pub const THREAD_VARIABLES: [&str; 5] = [
    "RAYON_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
];

/// What this process is to the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Nobody has started us as a rank.
    Launcher,
    /// This crate's launcher has.
    Rank,
    /// Another launcher has: it looks after its processes itself.
    Foreign,
}

pub(super) fn role() -> Role {
    if env::var_os(LAUNCHER_PID).is_some() {
        Role::Rank
    } else if env::var_os(RANK).is_some() || env::var_os(WORLD_SIZE).is_some() {
        Role::Foreign
    } else {
        Role::Launcher
    }
}

/// The program's number of ranks, else the environment's, else one.
pub(super) fn nproc(program: Option<usize>) -> Result<usize, LaunchError> {
    let (nproc, source) = match (program, env::var_os(NPROC)) {
        (Some(nproc), _) => (Some(nproc), nproc.to_string()),
        (None, None) => (Some(1), String::new()),
        (None, Some(text)) => {
            let text = text.to_string_lossy().into_owned();
            (text.trim().parse().ok(), format!("{text:?} in {NPROC}"))
        }
    };
    match nproc {
        // Ranks are numbered in 32 bits in several places of the field's tools; no machine has this many cores.
        Some(nproc @ 1..=65_536) => Ok(nproc),
        _ => Err(LaunchError::Nproc { given: source }),
    }
}

/// Each rank's share of the cores: the variables to set and, for the log, the share.
pub(super) fn threads(nproc: usize) -> (usize, usize, Vec<&'static str>) {
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let unset = THREAD_VARIABLES
        .into_iter()
        .filter(|name| env::var_os(name).is_none())
        .collect();
    (cores, (cores / nproc).max(1), unset)
}

/// The number in a variable that the launcher has set.
pub(super) fn number(name: &str) -> Option<u32> {
    env::var(name).ok()?.parse().ok()
}

pub(super) fn secret() -> io::Result<String> {
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret).map_err(io::Error::other)?;
    Ok(secret.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// This machine's own name, for reports.
pub(super) fn host() -> String {
    let name = |text: &OsStr| {
        Some(text.to_string_lossy().trim().to_owned()).filter(|name| !name.is_empty())
    };
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .map(OsString::from)
        .or_else(|| env::var_os("HOSTNAME"))
        .or_else(|| env::var_os("COMPUTERNAME"))
        .and_then(|text| name(&text))
        .unwrap_or_else(|| "localhost".to_owned())
}
