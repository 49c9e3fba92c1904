//! What the ranks say to each other before each step: whether they go on, and the outputs of the steps before.

use super::{error::LearnerError, output::Pack};
use crate::{
    Error, encoding,
    group::{ProcessGroup, objects},
};
use burn::train::Interrupter;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::sync::Arc;

const OPERATION: &str = "exchanging the outputs of a step";

/// Where a rank stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    /// It has batches for an optimizer step.
    Ready { batches: usize },
    /// Its split is through.
    Ended,
    /// Someone has called [`Interrupter::stop`].
    Stopped(Option<String>),
    /// An error has stopped it.
    Failed(String),
}

/// What all ranks do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Step,
    /// The split is through on all ranks.
    End,
    /// The training is over; every rank's interrupter says why.
    Stop,
}

/// Whether ranks may have different numbers of batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lengths {
    Equal,
    Any,
}

/// An output, and how many items of the split its rank has processed with it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Output {
    pub(super) processed: usize,
    pub(super) pack: Pack,
}

#[derive(Serialize, Deserialize)]
struct Message<'a> {
    state: State,
    /// Encoded [`Output`]s, which only rank 0 reads.
    outputs: &'a [u8],
}

/// The outputs of each rank since the last exchange; none on ranks other than 0.
pub(super) type Outputs = Vec<Vec<Output>>;

pub(super) struct Exchange {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) interrupter: Interrupter,
}

impl Exchange {
    pub(super) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(super) fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// Why this rank cannot go on, if it cannot.
    pub(super) fn stopped(&self) -> Option<State> {
        match self.interrupter.error() {
            Some(error) => Some(State::Failed(error.to_string())),
            None if self.interrupter.should_stop() => {
                Some(State::Stopped(self.interrupter.get_message()))
            }
            None => None,
        }
    }

    /// Stops this rank, and the others at the next exchange.
    pub(super) fn fail(&self, error: LearnerError) {
        self.interrupter.fail(error.into_training(self.rank()));
    }

    /// Tells the others where this rank stands, and hears where they do. Collective.
    pub(super) fn agree(
        &self,
        state: State,
        outputs: &[Output],
        lengths: Lengths,
    ) -> Result<(Verdict, Outputs), LearnerError> {
        let outputs = match outputs {
            [] => Vec::new(),
            some => encoding::encode(&*self.group, OPERATION, &some)?,
        };
        let outputs = &outputs[..];
        let message = encoding::encode(&*self.group, OPERATION, &Message { state, outputs })?;
        let mut states = Vec::new();
        let mut gathered = Vec::new();
        for bytes in objects::gather(&*self.group, &message).map_err(Error::from)? {
            let message: Message = encoding::decode(&*self.group, OPERATION, &bytes)?;
            states.push(message.state);
            if self.is_main() {
                gathered.push(match message.outputs {
                    [] => Vec::new(),
                    some => encoding::decode(&*self.group, OPERATION, some)?,
                });
            }
        }
        Ok((self.judge(&states, lengths), gathered))
    }

    /// Comes to the same verdict on every rank.
    fn judge(&self, states: &[State], lengths: Lengths) -> Verdict {
        let failed = states.iter().enumerate().find_map(|(peer, state)| {
            let State::Failed(cause) = state else {
                return None;
            };
            let cause = cause.clone();
            Some((peer, LearnerError::Peer { peer, cause }))
        });
        if let Some((_, error)) = failed {
            // The rank's own error, if it has one, says more.
            if self.interrupter.error().is_none() {
                self.fail(error);
            }
            return Verdict::Stop;
        }
        let stopped = states.iter().enumerate().find_map(|(peer, state)| {
            let State::Stopped(reason) = state else {
                return None;
            };
            Some((peer, reason))
        });
        if let Some((peer, reason)) = stopped {
            if !self.interrupter.should_stop() {
                let reason = reason.as_deref().unwrap_or("reason unknown");
                self.interrupter
                    .stop(Some(&format!("rank {peer}: {reason}")));
            }
            return Verdict::Stop;
        }
        let ended = |state: &State| *state == State::Ended;
        if states.iter().all(ended) {
            return Verdict::End;
        }
        let other = states.iter().position(|state| *state != states[0]);
        if let (Some(peer), Lengths::Equal) = (other, lengths) {
            let describe = |state: &State| match state {
                State::Ready { batches } => format!("{batches} more for this step"),
                _ => "none left".to_owned(),
            };
            self.fail(LearnerError::Uneven {
                rank: self.rank(),
                peer,
                theirs: describe(&states[peer]),
                reference: describe(&states[0]),
            });
            return Verdict::Stop;
        }
        Verdict::Step
    }

    /// Every rank's `value`, in rank order. Collective.
    pub(super) fn all<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
    ) -> Result<Vec<T>, LearnerError> {
        Ok(encoding::all_gather(&*self.group, OPERATION, value)?)
    }

    /// Waits for rank 0, however long it works, and hears its verdict. Collective.
    pub(super) fn of_main(&self, verdict: bool) -> Result<bool, LearnerError> {
        self.wait()?;
        Ok(self.all(&verdict)?[0])
    }

    /// Waits as long as the others live. Collective.
    pub(super) fn wait(&self) -> Result<(), LearnerError> {
        Ok(self.group.monitored_barrier().map_err(Error::from)?)
    }
}
