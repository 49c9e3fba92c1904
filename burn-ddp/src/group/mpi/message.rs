//! What the ranks of a job tell each other beside the data.

use crate::group::GroupError;
use serde::{Deserialize, Serialize};

/// Bytes of an encoded message at most.
pub(super) const LONGEST: usize = 4096;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender has failed. The first such message is the job's failure.
    Failed(GroupError),
    /// The sender's group was dropped by a panic.
    Panicked,
    /// The sender's process exits in the middle of the job.
    Exits,
    /// The sender knows that the job has failed.
    Known,
    /// Answer if you have come to this operation.
    Where { group: u32, sequence: u64 },
    /// The sender has.
    Here { group: u32, sequence: u64 },
    /// The sender has dropped the group, and never comes to this operation.
    Left { group: u32, sequence: u64 },
    /// Nothing more will come from the sender: it has dropped the last group of the job in good order, or the job has failed and
    /// it is about to exit.
    Done,
}

impl Message {
    /// `LONGEST` bytes at most: an error that is longer becomes its text, cut.
    pub(super) fn encode(&self, rank: usize) -> Vec<u8> {
        let encoded = postcard::to_stdvec(self);
        match (encoded, self) {
            (Ok(bytes), _) if bytes.len() <= LONGEST => bytes,
            (_, Message::Failed(error)) => {
                let mut reason = match error {
                    GroupError::Aborted { reason, .. } => reason.clone(),
                    other => other.to_string(),
                };
                reason.truncate(reason.floor_char_boundary(LONGEST / 2));
                let cut = Message::Failed(GroupError::aborted(rank, rank, reason));
                postcard::to_stdvec(&cut).unwrap_or_default()
            }
            // Numbers alone; an empty message decodes as none.
            _ => Vec::new(),
        }
    }

    /// `None` for what no rank sends.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        postcard::from_bytes(bytes).ok()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way() {
        let (group, sequence) = (u32::MAX, u64::MAX);
        let error = GroupError::PeerLeft {
            rank: 1,
            peer: 2,
            host: "node7".into(),
            operation: "barrier".into(),
            elapsed: std::time::Duration::from_secs(1),
        };
        for message in [
            Message::Failed(error),
            Message::Panicked,
            Message::Exits,
            Message::Known,
            Message::Done,
            Message::Where { group, sequence },
            Message::Here { group, sequence },
            Message::Left { group, sequence },
        ] {
            assert_eq!(Message::decode(&message.encode(1)), Some(message));
        }
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let aborted = |reason: String| Message::Failed(GroupError::aborted(3, 3, reason));
        // 'ü' has two bytes; the odd first byte moves the limit into one.
        let long = format!("x{}", "ü".repeat(5000));
        let bytes = aborted(long).encode(3);
        assert!(bytes.len() <= LONGEST);
        let short = format!("x{}", "ü".repeat(1023));
        assert_eq!(Message::decode(&bytes), Some(aborted(short)));
    }

    #[test]
    fn nonsense_is_no_message() {
        assert_eq!(Message::decode(&[]), None);
        assert_eq!(Message::decode(&[200, 1, 1]), None);
    }
}
