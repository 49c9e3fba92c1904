//! The environment between launcher and ranks.

use super::{LaunchError, spawn::setup};
pub use crate::group::host::{
    GENERATION, LISTEN_FD, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RANK, SECRET,
    WORLD_SIZE,
};
use crate::{
    group::host::{SettingsError, started},
    notice,
};
use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    num::NonZeroUsize,
};

/// Number of the machine in the job.
#[cfg(feature = "cli")]
pub(super) const GROUP_RANK: &str = "GROUP_RANK";
/// Number of machines of the job.
#[cfg(feature = "cli")]
pub(super) const GROUP_WORLD_SIZE: &str = "GROUP_WORLD_SIZE";
/// Process id of the launcher; its presence makes a process a rank.
pub const LAUNCHER_PID: &str = "BURN_DDP_LAUNCHER_PID";
/// Number of ranks, where the program does not say.
pub const NPROC: &str = "BURN_DDP_NPROC";
/// Most ranks that a launcher starts on one machine, in the place of 64 or 16 per core.
pub const MAX_RANKS: &str = "BURN_DDP_MAX_RANKS";

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
    } else if started().is_some() || mpi_rank() {
        Role::Foreign
    } else {
        Role::Launcher
    }
}

/// Says so where the program asks for ranks and another launcher has started others.
pub(super) fn check_foreign(nproc: Option<usize>) {
    if let (Some(nproc), Some((variables, Some(0), Some(world_size)))) = (nproc, started())
        && nproc != world_size
    {
        notice::warn(format_args!(
            "by {variables}, another launcher has started this process as rank 0 of {world_size}, so no {nproc} ranks are started here; unset \
             the variables to have that"
        ));
    }
}

fn mpi_rank() -> bool {
    #[cfg(feature = "mpi")]
    return crate::group::mpi::chosen().is_some();
    #[cfg(not(feature = "mpi"))]
    false
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
        None | Some(0) => Err(LaunchError::Nproc { given: source }),
        Some(nproc) => within_machine(nproc, cores(), env::var(MAX_RANKS).ok()),
    }
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// A number with a digit too many would take all of the machine's processes and threads before anything failed.
fn within_machine(
    nproc: usize,
    cores: usize,
    max_ranks: Option<String>,
) -> Result<usize, LaunchError> {
    let limit = match max_ranks {
        None => (16 * cores).max(64),
        Some(text) => text.trim().parse().map_err(|_| {
            LaunchError::Environment(SettingsError::Invalid {
                variable: MAX_RANKS,
                value: text,
                expected: "a whole number",
            })
        })?,
    };
    if nproc > limit {
        return Err(LaunchError::TooManyRanks {
            nproc,
            cores,
            limit,
        });
    }
    if nproc > cores {
        notice::warn(format_args!(
            "{nproc} ranks on {cores} core(s): they take turns, which is no faster than one rank per core"
        ));
    }
    Ok(nproc)
}

/// Each rank's share of the cores: the variables to set and, for the log, the share.
pub(super) fn threads(nproc: usize) -> (usize, usize, Vec<&'static str>) {
    let cores = cores();
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

/// A job's secret.
pub(super) fn secret() -> Result<String, LaunchError> {
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret)
        .map_err(io::Error::other)
        .map_err(setup("random bytes for the job's secret"))?;
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
