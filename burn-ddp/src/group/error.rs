//! Why a collective failed.

use super::OpDescriptor;
use serde::{Deserialize, Serialize};
use std::{fmt, time::Duration};

/// Result of a group operation.
pub type Result<T, E = GroupError> = std::result::Result<T, E>;

/// Why a collective failed, on which rank, and what to do about it.
///
/// After any of these except [`InvalidArgument`](GroupError::InvalidArgument) the whole job's
/// groups are poisoned: every later operation on every rank returns an error at once.
#[derive(Clone, Debug, PartialEq, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum GroupError {
    /// Not all ranks came to the operation within the limit.
    #[error(
        "rank {rank}: {operation} timed out after {elapsed:.1?}: no answer from {}. \
         Either {} slower than the limit (raise the operation time-out: BURN_DDP_TIMEOUT, in seconds) or {} left \
         the loop or took another branch than this rank",
        Ranks(missing, hosts),
        if missing.len() == 1 { "it is" } else { "they are" },
        if missing.len() == 1 { "it" } else { "they" }
    )]
    Timeout {
        /// The rank that reports.
        rank: usize,
        /// The operation it waited in.
        operation: String,
        /// How long it waited.
        elapsed: Duration,
        /// The ranks that had not arrived.
        missing: Vec<usize>,
        /// The machine of each of them; empty where the group does not know.
        hosts: Vec<String>,
    },
    /// A peer's process ended or its connection closed without the closing handshake.
    #[error(
        "rank {rank}: lost rank {peer} ({cause}){}, {}. Look at the output of rank {peer} for the first error",
        On(host),
        During(operation, *elapsed)
    )]
    PeerLost {
        /// The rank that reports.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// The machine it ran on; empty where the group does not know.
        host: String,
        /// How it was noticed.
        cause: String,
        /// What the reporting rank was doing.
        operation: String,
        /// For how long it had been doing it.
        elapsed: Duration,
    },
    /// Two ranks met in different operations.
    #[error(
        "rank {rank}: collectives do not match: rank {rank} is in {ours}, rank {peer} is in {theirs}. \
         All ranks must call the same operations in the same order with the same sizes"
    )]
    Mismatch {
        /// The rank that reports.
        rank: usize,
        /// The rank it differs from.
        peer: usize,
        /// What the reporting rank is in.
        ours: Box<OpDescriptor>,
        /// What the peer is in.
        theirs: Box<OpDescriptor>,
    },
    /// Another rank failed first and told this one.
    #[error(
        "rank {rank}: stopped {} because rank {origin}{} failed: {reason}",
        During(operation, *elapsed),
        On(host)
    )]
    Aborted {
        /// The rank that reports.
        rank: usize,
        /// The rank that failed first.
        origin: usize,
        /// The machine it runs on; empty where the group does not know.
        host: String,
        /// That rank's error text.
        reason: String,
        /// What the reporting rank was doing.
        operation: String,
        /// For how long it had been doing it.
        elapsed: Duration,
    },
    /// A peer left in good order (shut down, or dropped its `Ddp`) while this rank still waits for it.
    #[error(
        "rank {rank}: rank {peer}{} has finished and left while this rank is still {}. \
         The ranks ran different numbers of steps, or rank {peer} ended early: look at its output",
        On(host),
        During(operation, *elapsed)
    )]
    PeerLeft {
        /// The rank that reports.
        rank: usize,
        /// The rank that left.
        peer: usize,
        /// The machine it ran on; empty where the group does not know.
        host: String,
        /// What the reporting rank was doing.
        operation: String,
        /// For how long it had been doing it.
        elapsed: Duration,
    },
    /// The operating system refused something.
    #[error("rank {rank}: {operation} failed: {cause}")]
    Transport {
        /// The rank that reports.
        rank: usize,
        /// What was tried.
        operation: String,
        /// The system's words.
        cause: String,
    },
    /// This rank's own arguments are wrong; no peer was involved and the group is still usable
    /// if the peers made the same call.
    #[error("rank {rank}: {operation}: {cause}")]
    InvalidArgument {
        /// The rank that reports.
        rank: usize,
        /// The call.
        operation: String,
        /// What is wrong with it.
        cause: String,
    },
}

impl GroupError {
    /// `origin` failed, as `rank` sees it outside of any operation.
    pub(crate) fn aborted(rank: usize, origin: usize, reason: impl Into<String>) -> Self {
        GroupError::Aborted {
            rank,
            origin,
            host: String::new(),
            reason: reason.into(),
            operation: String::new(),
            elapsed: Duration::ZERO,
        }
    }

    /// With the time that the operation had taken, where whoever noticed the failure did not know it.
    pub(crate) fn after(mut self, time: Duration) -> Self {
        if let GroupError::PeerLost { elapsed, .. }
        | GroupError::PeerLeft { elapsed, .. }
        | GroupError::Aborted { elapsed, .. } = &mut self
            && elapsed.is_zero()
        {
            *elapsed = time;
        }
        self
    }

    /// Whether this is the consequence of another rank's failure: the cause is in that rank's output.
    pub fn is_secondary(&self) -> bool {
        match self {
            GroupError::PeerLost { .. } | GroupError::PeerLeft { .. } => true,
            GroupError::Aborted { rank, origin, .. } => rank != origin,
            _ => false,
        }
    }

    /// The ranks that did not answer, as far as this rank knows.
    pub(crate) fn silent(&self) -> &[usize] {
        match self {
            GroupError::PeerLost { peer, .. } => std::slice::from_ref(peer),
            GroupError::Timeout { missing, .. } => missing,
            _ => &[],
        }
    }
}

/// ` on NAME`, or nothing for a machine without a name.
struct On<'a>(&'a str);

impl fmt::Display for On<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            "" => Ok(()),
            host => write!(f, " on {host}"),
        }
    }
}

/// What a rank was doing, and for how long.
struct During<'a>(&'a str, Duration);

impl fmt::Display for During<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            During("", _) => f.write_str("between operations"),
            During(operation, Duration::ZERO) => write!(f, "in {operation}"),
            During(operation, elapsed) => write!(f, "{elapsed:.1?} into {operation}"),
        }
    }
}

/// Ranks, each with its machine where that is known.
pub(crate) struct Ranks<'a>(pub(crate) &'a [usize], pub(crate) &'a [String]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, rank) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            let host = self.1.get(i).map_or("", String::as_str);
            write!(f, "{comma}rank {rank}{}", On(host))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_rank_machine_operation_and_time() {
        let lost = GroupError::PeerLost {
            rank: 1,
            peer: 2,
            host: "node7".into(),
            cause: "it panicked".into(),
            operation: "barrier".into(),
            elapsed: Duration::ZERO,
        };
        let end = "Look at the output of rank 2 for the first error";
        assert_eq!(
            lost.to_string(),
            format!("rank 1: lost rank 2 (it panicked) on node7, in barrier. {end}")
        );
        let lost = lost.after(Duration::from_millis(1500));
        assert_eq!(
            lost.to_string(),
            format!("rank 1: lost rank 2 (it panicked) on node7, 1.5s into barrier. {end}")
        );
        // The first to know is right.
        assert_eq!(lost.clone().after(Duration::from_secs(9)), lost);
        assert_eq!(
            GroupError::aborted(1, 0, "the disk is full").to_string(),
            "rank 1: stopped between operations because rank 0 failed: the disk is full"
        );
        let late = GroupError::Timeout {
            rank: 0,
            operation: "barrier".into(),
            elapsed: Duration::from_secs(20),
            missing: vec![1, 3],
            hosts: vec!["node7".into(), "node8".into()],
        };
        assert!(late.to_string().starts_with(
            "rank 0: barrier timed out after 20.0s: no answer from rank 1 on node7, rank 3 on node8. \
             Either they are slower than the limit"
        ));
        let late = GroupError::Timeout {
            rank: 0,
            operation: "barrier".into(),
            elapsed: Duration::from_secs(20),
            missing: vec![1],
            hosts: Vec::new(),
        };
        assert_eq!(
            late.to_string(),
            "rank 0: barrier timed out after 20.0s: no answer from rank 1. Either it is slower than the limit (raise the operation \
             time-out: BURN_DDP_TIMEOUT, in seconds) or it left the loop or took another branch than this rank"
        );
    }
}
