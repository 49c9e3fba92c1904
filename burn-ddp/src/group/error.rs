//! Why a collective failed.

use super::OpDescriptor;
use serde::{Deserialize, Serialize};
use std::time::Duration;

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
        "rank {rank}: {operation} timed out after {elapsed:.1?}: no answer from rank(s) {missing:?}. \
         Either they are slower than the limit (raise the operation time-out: BURN_DDP_TIMEOUT, in seconds) or they left \
         the loop or took another branch than this rank"
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
    },
    /// A peer's process ended or its connection closed without the closing handshake.
    #[error(
        "rank {rank}: lost rank {peer} ({cause}) while {operation}. Look at the output of rank {peer} for the first error"
    )]
    PeerLost {
        /// The rank that reports.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// How it was noticed.
        cause: String,
        /// What the reporting rank was doing.
        operation: String,
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
    #[error("rank {rank}: stopped because rank {origin} failed: {reason}")]
    Aborted {
        /// The rank that reports.
        rank: usize,
        /// The rank that failed first.
        origin: usize,
        /// That rank's error text.
        reason: String,
    },
    /// A peer left in good order (shut down, or dropped its `Ddp`) while this rank still waits for it.
    #[error(
        "rank {rank}: rank {peer} has finished and left while this rank is still {operation}. \
         The ranks ran different numbers of steps, or rank {peer} ended early: look at its output"
    )]
    PeerLeft {
        /// The rank that reports.
        rank: usize,
        /// The rank that left.
        peer: usize,
        /// What the reporting rank was doing.
        operation: String,
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
