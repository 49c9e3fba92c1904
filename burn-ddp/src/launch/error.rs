//! Why a launch failed, as the user reads it.

use crate::{group::host::SettingsError, notice::HELP};
use std::{
    fmt,
    io::{self, IsTerminal},
};

/// Why a launch failed. `Display` is the whole report; `Debug`, which `fn main() -> Result<…>` prints, also says where to read on.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Not a number of ranks.
    #[error(
        "{given} is no number of ranks: give a whole number from 1, one per device or group of cores"
    )]
    Nproc {
        /// What was given, and where.
        given: String,
    },
    /// More ranks than the machine can be meant to run.
    #[error(
        "{nproc} ranks on a machine with {cores} core(s) is more than the {limit} that a launcher starts without being told to. If it is meant, \
         set BURN_DDP_MAX_RANKS={nproc}; else give BURN_DDP_NPROC, `--nproc` or `Launcher::nproc` one rank per device or group of cores"
    )]
    TooManyRanks {
        /// What was asked for.
        nproc: usize,
        /// Cores of this machine.
        cores: usize,
        /// The most that are started.
        limit: usize,
    },
    /// A variable that the ranks would read is wrong.
    #[error(transparent)]
    Environment(#[from] SettingsError),
    /// The operating system refused something that a launch needs.
    #[error("could not prepare the launch: {what}: {cause}")]
    Setup {
        /// What was tried.
        what: &'static str,
        /// The system's words.
        cause: String,
    },
    /// A rank's process could not be started; those before it have been ended again.
    #[error("could not start rank {rank} ({program}): {cause}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The executable.
        program: String,
        /// The system's words.
        cause: String,
    },
    /// The file for a rank's output cannot be made.
    #[error("cannot write the log {path}: {cause}. Choose another --log-dir")]
    Log {
        /// The file or its folder.
        path: String,
        /// The system's words.
        cause: String,
    },
    /// A rank failed; all others have ended.
    #[error("{0}")]
    Failed(Box<FailureReport>),
    /// The launcher was told to stop, and all ranks have ended.
    #[error("stopped by signal {signal} ({}); all ranks have ended", signal_name(*signal))]
    Signalled {
        /// The signal's number.
        signal: i32,
    },
}

impl LaunchError {
    /// What the launcher's process should exit with: the first failing rank's exit code, 128 + the number of
    /// the signal that ended it or the launcher, else 1. Never 0.
    pub fn exit_code(&self) -> i32 {
        match self {
            LaunchError::Failed(report) => match report.first.outcome {
                Outcome::Exit(code) if code != 0 => code,
                Outcome::Signal(signal) => 128 + signal,
                _ => 1,
            },
            LaunchError::Signalled { signal } => 128 + signal,
            _ => 1,
        }
    }

    /// Prints the report to stderr and ends the process with [`exit_code`](Self::exit_code).
    pub fn exit(&self) -> ! {
        if io::stderr().is_terminal() {
            // Rank 0 may have ended in the middle of a progress bar.
            eprint!("\r\x1b[2K");
        }
        eprintln!("{self:?}");
        std::process::exit(self.exit_code())
    }
}

impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LaunchError::Signalled { .. } => write!(f, "{self}"),
            _ => write!(f, "{self}{HELP}"),
        }
    }
}

/// How the ranks of a failed launch ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailureReport {
    /// Name of the machine.
    pub host: String,
    /// Number of ranks.
    pub world_size: usize,
    /// The failure to look at: the first in time that is not the consequence of another rank's.
    pub first: RankFailure,
    /// The other ranks that failed, in order of time.
    pub others: Vec<RankFailure>,
    /// The latest generation of the job that these ranks have met, if it was not their own.
    pub(super) generation: Option<u32>,
}

/// How one rank failed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankFailure {
    /// The rank.
    pub rank: usize,
    /// Its process.
    pub pid: u32,
    /// How the process ended.
    pub outcome: Outcome,
    /// Panic message with its place, or the text of the error that the training function returned.
    pub cause: Option<String>,
    /// The cause is that another rank failed.
    pub secondary: bool,
    /// The last lines of its stderr. Empty for rank 0, whose output is not piped.
    pub stderr: Vec<String>,
}

/// How a rank's process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// With an exit code.
    Exit(i32),
    /// By a signal, or a crash that raised one.
    Signal(i32),
    /// The launcher ended it because another rank had failed or it did not end by itself.
    Stopped,
    /// It did not answer its peers any more, and the launcher ended it.
    Unresponsive,
    /// Not even SIGKILL has ended it within the launcher's patience.
    Unkillable,
    /// Another part of the program has waited for the launcher's children and has the status.
    Unknown,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Exit(code) => write!(f, "exit code {code}"),
            Outcome::Signal(signal) => write!(f, "signal {signal} ({})", signal_name(*signal)),
            Outcome::Stopped => f.write_str("ended by the launcher"),
            Outcome::Unresponsive => f.write_str("still running until the launcher ended it"),
            Outcome::Unknown => {
                f.write_str("its exit status was taken by another wait in the launching program")
            }
            Outcome::Unkillable => f.write_str("still there after SIGKILL"),
        }
    }
}

impl fmt::Display for FailureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            world_size,
            first,
            others,
            ..
        } = self;
        let RankFailure {
            rank, pid, outcome, ..
        } = first;
        let what = if first.secondary {
            "ended after the failure of another rank"
        } else {
            "failed first"
        };
        write!(
            f,
            "rank {rank} of {world_size} {what} (host {host}, pid {pid}, {outcome})"
        )?;
        match &first.cause {
            Some(cause) => write!(f, ": {cause}")?,
            None if *outcome == Outcome::Signal(SIGKILL) => {
                write!(
                    f,
                    ": killed from outside, most often because memory ran out (see the kernel's log)"
                )?;
            }
            None => {}
        }
        let news = |line: &&String| {
            let cause = first.cause.as_deref().unwrap_or_default();
            !cause.contains(line.trim())
        };
        let mut lines = first.stderr.iter().filter(news).peekable();
        if lines.peek().is_some() {
            write!(f, "\n  last lines of its stderr:")?;
        }
        for line in lines {
            write!(f, "\n    | {line}")?;
        }
        for alike in group(others) {
            let mut ranks: Vec<_> = alike.iter().map(|other| other.rank).collect();
            ranks.sort_unstable();
            let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
            let s = if ranks.len() == 1 { "" } else { "s" };
            let outcome = alike[0].outcome;
            write!(f, "\n  then rank{s} {} ({outcome})", ranks.join(", "))?;
            if let Some(cause) = &alike[0].cause {
                write!(f, ": {cause}")?;
            }
        }
        Ok(())
    }
}

/// Failures that say nothing new are told once: consequences, and ends without a word.
fn group(others: &[RankFailure]) -> Vec<Vec<&RankFailure>> {
    let mut groups: Vec<Vec<&RankFailure>> = Vec::new();
    for other in others {
        let nothing_new = |first: &RankFailure| {
            other.outcome == first.outcome
                && other.secondary == first.secondary
                && (other.secondary || other.cause == first.cause)
        };
        match groups.iter_mut().find(|group| nothing_new(group[0])) {
            Some(group) => group.push(other),
            None => groups.push(vec![other]),
        }
    }
    groups
}

const SIGKILL: i32 = 9;

#[cfg(unix)]
pub(super) fn signal_name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("unnamed")
}

#[cfg(not(unix))]
pub(super) fn signal_name(_: i32) -> &'static str {
    "unnamed"
}
