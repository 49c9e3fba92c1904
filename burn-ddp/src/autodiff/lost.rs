//! Gradients that Burn has lost to another thread's pass.
//!
//! A use that does not fire is legal by itself: not every one reaches the loss. It is taken for lost when another thread of this process was in
//! a backward pass meanwhile and either the pass before had it, with as many uses, or there is no such pass and other ranks have the gradient.

use super::session::{Session, State};
use crate::reducer::{Broken, ReducerError};
use burn::tensor::TensorData;

impl Session {
    /// All steps of a pass have run, and what is incomplete has not been sent: a peer cannot have averaged it yet.
    pub(super) fn check_lost(&self, state: &State) -> Result<(), ReducerError> {
        if !others_meanwhile(state) {
            return Ok(());
        }
        match state.uses.fewer() {
            Some(fewer) => Err(self.lost(fewer)),
            None => Ok(()),
        }
    }

    /// The same of parameters that have no pass to be compared with, once it is known what the ranks have.
    pub(super) fn check_lost_first(
        &self,
        state: &State,
        reduced: &[Option<TensorData>],
    ) -> Result<(), ReducerError> {
        if !others_meanwhile(state) {
            return Ok(());
        }
        let elsewhere = (0..reduced.len()).filter(|slot| reduced[*slot].is_some());
        match elsewhere.filter_map(|slot| state.uses.silent(slot)).next() {
            Some(silent) => Err(self.lost(silent)),
            None => Ok(()),
        }
    }

    fn lost(&self, uses: Broken) -> ReducerError {
        ReducerError::LostGradient {
            rank: self.rank,
            path: self.layout.params[uses.slot].path.clone(),
            expected: uses.expected,
            fired: uses.fired,
        }
    }
}

fn others_meanwhile(state: &State) -> bool {
    state.first_use.is_some_and(|mark| mark.others_since())
}
