//! What travels on a control connection.

use crate::group::GroupError;
use serde::{Deserialize, Serialize};

/// Bound of one rank's contribution to an exchange.
pub(super) const EXCHANGE_LIMIT: usize = 64 << 10;

/// Bound of a frame: one contribution from every rank, or an error text.
pub(super) fn limit(world_size: usize) -> usize {
    world_size.saturating_mul(EXCHANGE_LIMIT + 16) + (64 << 10)
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Frame {
    /// The sender is alive.
    Heartbeat,
    /// The sender leaves in good order; nothing comes after it.
    Bye,
    /// From rank 0: another rank has left in good order.
    Left { peer: usize },
    /// The job has failed.
    Failed(Failure),
    /// To rank 0: one contribution to the exchange `sequence` of `tag`.
    Give {
        tag: u64,
        sequence: u64,
        data: Vec<u8>,
    },
    /// From rank 0: all contributions.
    All {
        tag: u64,
        sequence: u64,
        parts: Vec<Vec<u8>>,
    },
}

/// Why the job failed, in the form that every rank can turn into its own error.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Failure {
    Lost { peer: usize, cause: String },
    Left { peer: usize },
    Other { origin: usize, error: GroupError },
}

/// Longer texts are cut, so that a failure always fits its frame.
const TEXT_LIMIT: usize = 16 << 10;

impl Failure {
    pub(super) fn from_error(rank: usize, error: GroupError) -> Self {
        match error {
            GroupError::PeerLost { peer, cause, .. } => Failure::Lost {
                peer,
                cause: cut(cause),
            },
            GroupError::PeerLeft { peer, .. } => Failure::Left { peer },
            GroupError::Aborted {
                rank,
                origin,
                reason,
            } => Failure::Other {
                origin,
                error: GroupError::Aborted {
                    rank,
                    origin,
                    reason: cut(reason),
                },
            },
            error => Failure::Other {
                origin: rank,
                error,
            },
        }
    }

    /// This rank's view of it, while it is in `operation`.
    pub(super) fn seen_by(&self, rank: usize, operation: &dyn Fn() -> String) -> GroupError {
        match self {
            Failure::Lost { peer, cause } => GroupError::PeerLost {
                rank,
                peer: *peer,
                cause: cause.clone(),
                operation: operation(),
            },
            Failure::Left { peer } => GroupError::PeerLeft {
                rank,
                peer: *peer,
                operation: operation(),
            },
            Failure::Other { origin, error } if *origin == rank => error.clone(),
            Failure::Other {
                origin,
                error:
                    GroupError::Mismatch {
                        peer, ours, theirs, ..
                    },
            } if *peer == rank => GroupError::Mismatch {
                rank,
                peer: *origin,
                ours: theirs.clone(),
                theirs: ours.clone(),
            },
            // As the origin saw it: a third rank's transport replaces it by its own comparison.
            Failure::Other {
                error: error @ GroupError::Mismatch { .. },
                ..
            } => error.clone(),
            Failure::Other { origin, error } => {
                let reason = match error {
                    GroupError::Aborted { reason, .. } => reason.clone(),
                    other => other.to_string(),
                };
                GroupError::Aborted {
                    rank,
                    origin: *origin,
                    reason,
                }
            }
        }
    }
}

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_LIMIT));
    text
}
