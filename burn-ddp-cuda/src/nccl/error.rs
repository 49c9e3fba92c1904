//! Why NCCL cannot be used, or why an operation failed.

use super::Version;
use std::{ffi::c_int, fmt, path::PathBuf, time::Duration};

/// Result of a call of this module.
pub type Result<T, E = NcclError> = std::result::Result<T, E>;

/// What happened, on which rank, in which operation, and what to do about it.
///
/// After [`Failed`](NcclError::Failed), [`TimedOut`](NcclError::TimedOut) and [`Aborted`](NcclError::Aborted) the communicator is
/// aborted: every later call on it returns `Aborted` at once. The other kinds leave it as it was.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// The library is not on this machine, or not where the loader looks.
    #[error(
        "NCCL's library was not found: {}. Install it: the pip wheel nvidia-nccl-cu12 or nvidia-nccl-cu13 (CUDA 12 or 13), or Debian's \
         libnccl2; or set BURN_DDP_NCCL_LIB to the path of libnccl.so.2",
        tried.join("; ")
    )]
    LibraryNotFound {
        /// Each name that was tried, with the loader's words.
        tried: Vec<String>,
    },
    /// There is a library, but it is not NCCL's, or not a whole one.
    #[error(
        "{} has no function {symbol}: it is not NCCL {}, or later. Set BURN_DDP_NCCL_LIB to the path of libnccl.so.2",
        library.display(), super::version::MINIMUM
    )]
    SymbolMissing {
        /// What was loaded.
        library: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The library is older than what this crate can work with.
    #[error(
        "{} is NCCL {found}; {} or later is needed. Install a newer one (the pip wheel nvidia-nccl-cu12 or nvidia-nccl-cu13, or Debian's \
         libnccl2) and set BURN_DDP_NCCL_LIB to its libnccl.so.2",
        library.display(), super::version::MINIMUM
    )]
    TooOld {
        /// What was loaded.
        library: PathBuf,
        /// Its version.
        found: Version,
    },
    /// The environment makes NCCL block, and then no deadline can be kept and nothing can be aborted.
    #[error(
        "NCCL_COMM_BLOCKING={value} makes every call of NCCL block, without a limit. Remove it from the environment: \
         this program needs communicators that do not block"
    )]
    Blocking {
        /// What the variable is.
        value: String,
    },
    /// A call that belongs to no communicator.
    #[error("{function} failed: {code}{}. {}", Message(message), code.advice())]
    Call {
        /// NCCL's name of it.
        function: &'static str,
        /// What it returned.
        code: ResultCode,
        /// NCCL's last message.
        message: String,
    },
    /// NCCL reported an error, at once or later.
    #[error(
        "rank {rank} of {world_size}: {operation} failed after {elapsed:.1?}: {code}{}. {}",
        Message(message), code.advice()
    )]
    Failed {
        /// The rank that reports.
        rank: usize,
        /// Number of ranks of the communicator.
        world_size: usize,
        /// What it was doing.
        operation: String,
        /// For how long.
        elapsed: Duration,
        /// What NCCL reported.
        code: ResultCode,
        /// NCCL's last message; may be empty, or of an earlier problem.
        message: String,
    },
    /// The time of an operation was over.
    #[error(
        "rank {rank} of {world_size}: {operation} did not end within {limit:.1?} (waited {elapsed:.1?}){}. A rank that died, left the loop or \
         took another branch does not come: look at the output of the other ranks. NCCL_DEBUG=INFO shows what NCCL waits for",
        Message(message)
    )]
    TimedOut {
        /// The rank that reports.
        rank: usize,
        /// Number of ranks of the communicator.
        world_size: usize,
        /// What it was doing.
        operation: String,
        /// For how long.
        elapsed: Duration,
        /// How long it was allowed to take.
        limit: Duration,
        /// NCCL's last message; may be empty, or of an earlier problem.
        message: String,
    },
    /// The communicator was aborted, by the program or because something else on it failed.
    #[error(
        "rank {rank} of {world_size}: {operation} ended after {elapsed:.1?} because the communicator was aborted: {reason}"
    )]
    Aborted {
        /// The rank that reports.
        rank: usize,
        /// Number of ranks of the communicator.
        world_size: usize,
        /// What it was doing.
        operation: String,
        /// For how long.
        elapsed: Duration,
        /// What the caller of abort gave, or the first error.
        reason: String,
    },
    /// The communicator has been closed in good order.
    #[error(
        "rank {rank} of {world_size}: {operation} was called after the communicator was closed"
    )]
    Closed {
        /// The rank that reports.
        rank: usize,
        /// Number of ranks of the communicator.
        world_size: usize,
        /// What was called.
        operation: String,
    },
    /// This rank's own arguments are wrong. NCCL was not called.
    #[error("rank {rank} of {world_size}: {operation}: {cause}")]
    InvalidArgument {
        /// The rank that reports.
        rank: usize,
        /// Number of ranks of the communicator.
        world_size: usize,
        /// The call.
        operation: String,
        /// What is wrong.
        cause: String,
    },
}

/// `ncclResult_t`: a number that may be newer than this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ResultCode(pub c_int);

impl ResultCode {
    /// NCCL's name of it.
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "ncclSuccess",
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            8 => "ncclTimeout",
            _ => "an unknown result",
        }
    }

    /// What to do about it.
    const fn advice(self) -> &'static str {
        match self.0 {
            1 => {
                "A call of CUDA failed: check the driver (nvidia-smi), the free memory of the GPU and that every rank has a GPU of its own; \
                 NCCL_DEBUG=INFO says which call"
            }
            2 => {
                "A call of the operating system failed, most often in the network: check that the ranks reach each other \
                 (NCCL_SOCKET_IFNAME chooses the interface) and the size of /dev/shm; NCCL_DEBUG=INFO says which call"
            }
            5 => {
                "All ranks need the same version of NCCL, a GPU each, and the same calls in the same order; NCCL_DEBUG=WARN says what differs"
            }
            6 => {
                "Another rank has gone or failed: look at the output of the other ranks for the first error"
            }
            8 => "A rank did not come in time: look at the output of the other ranks",
            _ => "NCCL_DEBUG=INFO makes NCCL say more",
        }
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name(), self.0)
    }
}

/// NCCL's last message, or nothing.
struct Message<'a>(&'a str);

impl fmt::Display for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.trim() {
            "" => Ok(()),
            message => write!(f, "; NCCL's last message: {message}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_where_and_what_to_do() {
        let failed = NcclError::Failed {
            rank: 1,
            world_size: 4,
            operation: "all_reduce of 8 f32 (sum)".into(),
            elapsed: Duration::from_millis(1500),
            code: ResultCode(6),
            message: "socket closed\n".into(),
        };
        assert_eq!(
            failed.to_string(),
            "rank 1 of 4: all_reduce of 8 f32 (sum) failed after 1.5s: ncclRemoteError (6); NCCL's last message: socket closed. \
             Another rank has gone or failed: look at the output of the other ranks for the first error"
        );
        let late = NcclError::TimedOut {
            rank: 0,
            world_size: 2,
            operation: "init".into(),
            elapsed: Duration::from_millis(20_100),
            limit: Duration::from_secs(20),
            message: String::new(),
        };
        assert!(late.to_string().starts_with(
            "rank 0 of 2: init did not end within 20.0s (waited 20.1s). A rank that died"
        ));
        // A code of a later NCCL.
        assert_eq!(ResultCode(99).to_string(), "an unknown result (99)");
    }
}
