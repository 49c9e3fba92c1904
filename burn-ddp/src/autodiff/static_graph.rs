//! The promise that all backward passes are alike, and what follows from it.

use super::{
    session::{Session, State},
    sessions::lock,
};
use crate::{
    group::objects,
    reducer::{Broken, Fired, Reducer, ReducerError},
};
use std::sync::Mutex;

impl Session {
    /// The promise was given, and the first synchronised pass is over.
    pub(super) fn is_static(&self, state: &State) -> bool {
        self.static_graph && state.synchronised > 0
    }

    /// A use of `slot` has fired.
    pub(super) fn check_static(
        &self,
        state: &State,
        slot: usize,
        fired: Fired,
    ) -> Result<(), ReducerError> {
        if let Fired::Unexpected(broken) = fired {
            return Err(self.not_static(broken));
        }
        // A rank that had no data in the first synchronised pass may use what no other has used in it.
        let has_place = |reducer: &Mutex<Reducer>| lock(reducer).has_place(slot);
        if self.is_static(state) && !self.reducer.as_ref().is_none_or(has_place) {
            return Err(self.not_static(Broken {
                slot,
                expected: 0,
                fired: 1,
            }));
        }
        Ok(())
    }

    /// A pass has run through: it must have been like the first.
    pub(super) fn check_static_pass(&self, state: &State) -> Result<(), ReducerError> {
        match state.uses.broken() {
            Some(broken) => Err(self.not_static(broken)),
            None => Ok(()),
        }
    }

    fn not_static(&self, broken: Broken) -> ReducerError {
        ReducerError::StaticGraph {
            rank: self.rank,
            path: self.layout.params[broken.slot].path.clone(),
            expected: broken.expected,
            fired: broken.fired,
        }
    }

    /// Only what some rank has used in its first pass has a place from now on. Collective.
    pub(super) fn leave_out_unused(
        &self,
        state: &State,
        reducer: &mut Reducer,
    ) -> Result<(), ReducerError> {
        let fired = state.uses.fixed().iter().map(|n| u8::from(*n > 0));
        let all = objects::gather(&**reducer.group(), &fired.collect::<Vec<_>>())?;
        // A rank that has had no data yet says nothing.
        let used = |slot: usize| all.iter().any(|rank| rank.get(slot) == Some(&1));
        reducer.set_members((0..self.layout.len()).map(used).collect())?;
        self.set_rungs(reducer.order());
        Ok(())
    }
}
