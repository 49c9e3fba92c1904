//! What travels on a control connection.

use crate::group::{GroupError, recorder::Tail};
use serde::{Deserialize, Serialize};
use std::time::Duration;

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
    /// To rank 0, once, after a failure: what the sender did last.
    Tail(Tail),
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
                ..
            } => Failure::Other {
                origin,
                error: GroupError::aborted(rank, origin, cut(reason)),
            },
            error => Failure::Other {
                origin: rank,
                error,
            },
        }
    }

    /// Whether the ranks' last operations say more than the failure itself does. The reason of an abort is the caller's own.
    pub(super) fn deserves_report(&self) -> bool {
        let aborted = |error: &GroupError| matches!(error, GroupError::Aborted { .. });
        !matches!(self, Failure::Other { error, .. } if aborted(error))
    }

    /// Whether some rank has waited in vain.
    pub(super) fn is_timeout(&self) -> bool {
        matches!(
            self,
            Failure::Other {
                error: GroupError::Timeout { .. },
                ..
            }
        )
    }

    /// This rank's view of it, while it is in `operation`. The operation's error learns the time that it took from whoever ran it.
    pub(super) fn seen_by(
        &self,
        rank: usize,
        hosts: &[String],
        operation: &dyn Fn() -> String,
    ) -> GroupError {
        let host = |peer: usize| hosts.get(peer).cloned().unwrap_or_default();
        let elapsed = Duration::ZERO;
        match self {
            Failure::Lost { peer, cause } => GroupError::PeerLost {
                rank,
                peer: *peer,
                host: host(*peer),
                cause: cause.clone(),
                operation: operation(),
                elapsed,
            },
            Failure::Left { peer } => GroupError::PeerLeft {
                rank,
                peer: *peer,
                host: host(*peer),
                operation: operation(),
                elapsed,
            },
            Failure::Other { origin, error } if *origin == rank && self.deserves_report() => {
                error.clone()
            }
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
                    host: host(*origin),
                    reason,
                    operation: operation(),
                    elapsed,
                }
            }
        }
    }
}

fn cut(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(TEXT_LIMIT));
    text
}
