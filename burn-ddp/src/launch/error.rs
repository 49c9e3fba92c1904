//! Why a launch failed, as the user reads it.

use std::fmt;

/// Why a launch failed. `Display`, and `Debug` as well so that `fn main() -> Result<…>` prints it, is the
/// whole report.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// Not a number of ranks.
    #[error(
        "{given} is no number of ranks: give a whole number from 1 to 65536, one per device or group of cores"
    )]
    Nproc {
        /// What was given, and where.
        given: String,
    },
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
        eprintln!("{self}");
        std::process::exit(self.exit_code())
    }
}

impl fmt::Debug for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
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
        } = self;
        let RankFailure {
            rank, pid, outcome, ..
        } = first;
        write!(
            f,
            "rank {rank} of {world_size} failed first (host {host}, pid {pid}, {outcome})"
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
        if !first.stderr.is_empty() {
            write!(f, "\n  last lines of its stderr:")?;
            for line in &first.stderr {
                write!(f, "\n    | {line}")?;
            }
        }
        for other in others {
            write!(f, "\n  then rank {} ({})", other.rank, other.outcome)?;
            if let Some(cause) = &other.cause {
                write!(f, ": {cause}")?;
            }
        }
        Ok(())
    }
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
