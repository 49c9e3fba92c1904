//! Whose failure a rank's error is.

use crate::{Error, group::GroupError};

/// Whose failure an error is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Blame {
    /// The consequence of another rank's failure.
    pub(super) secondary: bool,
    /// Ranks that did not answer. If such a rank says nothing itself and its process is still there, it hangs, and that is the cause.
    pub(super) silent: Vec<usize>,
    /// A later generation than its own, which the rank has met.
    pub(super) generation: Option<u32>,
}

impl Blame {
    pub(super) fn secondary(secondary: bool) -> Self {
        Self {
            secondary,
            ..Self::default()
        }
    }

    /// Of an error that a rank met before it was in the job.
    pub(super) fn of(error: &Error) -> Self {
        Self {
            secondary: error.is_secondary(),
            generation: match error {
                Error::Rendezvous(error) => error.later_generation(),
                _ => None,
            },
            ..error.group_error().map(Self::of_group).unwrap_or_default()
        }
    }

    pub(super) fn of_group(error: &GroupError) -> Self {
        Self {
            secondary: error.is_secondary(),
            silent: error.silent().to_vec(),
            generation: None,
        }
    }
}
