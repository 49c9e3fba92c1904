//! Which parameters are trained: freezing and unfreezing between steps, agreed over the ranks.
//!
//! Every float parameter has a hook, frozen or not, and each use of one shows what it is now. A rank that trains a parameter without a
//! place in the buckets says so in the round; then all compare what they have seen, make new buckets, and reduce what had no place in
//! a round of its own. Steps without a change cost nothing.

use super::session::{Session, State};
use crate::{
    config::Reduction,
    group::objects,
    reducer::{Outcome, Reducer, ReducerError},
};

/// What this rank has seen of a parameter since the last synchronised pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Seen {
    #[default]
    Unused,
    /// In frozen uses only. A frozen copy of a model (a teacher, the other player of a game) may be used beside the one that is trained.
    Frozen,
    Trained,
}

impl Seen {
    fn read(byte: u8) -> Self {
        match byte {
            0 => Seen::Unused,
            1 => Seen::Frozen,
            _ => Seen::Trained,
        }
    }
}

/// Synchronised passes in a row in which a parameter is only seen frozen, before it loses its place in the buckets. Until
/// then it travels as zeros: those who freeze in turns should not make buckets in turns.
const PASSES_UNTIL_FROZEN: u32 = 8;

/// What is known of one parameter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Trainable {
    pub(super) seen: Seen,
    frozen_passes: u32,
}

impl Session {
    /// Whether this rank has something to say of what is trained.
    pub(super) fn trainable_changed(&self, state: &State, reducer: &Reducer) -> bool {
        let slots = state.trainable.iter().zip(reducer.members());
        slots.into_iter().any(|(slot, member)| match member {
            false => slot.seen == Seen::Trained,
            true => slot.seen == Seen::Frozen && slot.frozen_passes >= PASSES_UNTIL_FROZEN,
        })
    }

    /// Ends a round: if a rank has met a change, compares what is trained, and reduces what had no place in a second round, for which `pack` packs
    /// this rank's. All ranks are here.
    pub(super) fn settle(
        &self,
        state: &mut State,
        reducer: &mut Reducer,
        mut outcome: Outcome,
        mut pack: impl FnMut(&mut State, &mut Reducer, usize) -> Result<(), ReducerError>,
    ) -> Result<Outcome, ReducerError> {
        if outcome.contributions.iter().any(|rank| rank.changed) {
            let added = self.agree_on_trainable(state, reducer)?;
            if !added.is_empty() {
                reducer.begin_again()?;
                for slot in &added {
                    pack(state, reducer, *slot)?;
                }
                reducer.launch_rest()?;
                let mut second = reducer.wait()?;
                for slot in added {
                    outcome.gradients[slot] = second.gradients[slot].take();
                }
                outcome.finding.unite(second.finding);
            }
        }
        let used: Vec<bool> = outcome.gradients.iter().map(Option::is_some).collect();
        self.pass_ends(state, &used)?;
        for (ever, used) in state.ever_used.iter_mut().zip(used) {
            *ever |= used;
        }
        state.synchronised += 1;
        state.counted = self.counted(&outcome);
        let samples = outcome.contributions.iter().map(|rank| rank.samples);
        self.set_weight_unit(state, samples.max().unwrap_or(0));
        Ok(outcome)
    }

    /// The ranks whose data is in the outcome: not those that have run out of it or have no sample, nor those whose gradients are not finite. All that
    /// took part if that leaves none.
    fn counted(&self, outcome: &Outcome) -> Vec<bool> {
        let weighted = self.rule.reduction == Reduction::WeightedMean;
        let ranks = outcome.contributions.iter().enumerate();
        let counts = ranks.map(|(rank, own)| {
            own.active && (!weighted || own.samples > 0) && !outcome.finding.ranks.contains(&rank)
        });
        let counted: Vec<bool> = counts.collect();
        match counted.contains(&true) {
            true => counted,
            false => outcome.contributions.iter().map(|own| own.active).collect(),
        }
    }

    /// New buckets for what the ranks have seen; the slots that had no place before. Collective.
    fn agree_on_trainable(
        &self,
        state: &State,
        reducer: &mut Reducer,
    ) -> Result<Vec<usize>, ReducerError> {
        let ours: Vec<u8> = state.trainable.iter().map(|slot| slot.seen as u8).collect();
        let all = objects::gather(&**reducer.group(), &ours)?;
        let seen = |slot: usize, what: Seen| -> Vec<usize> {
            let sees =
                |rank: &usize| all[*rank].get(slot).map(|byte| Seen::read(*byte)) == Some(what);
            (0..all.len()).filter(sees).collect()
        };
        let mut members = reducer.members().to_vec();
        let mut added = Vec::new();
        for (slot, member) in members.iter_mut().enumerate() {
            let (trained, frozen) = (seen(slot, Seen::Trained), seen(slot, Seen::Frozen));
            if !trained.is_empty() && !frozen.is_empty() {
                return Err(self.differs(slot, trained, frozen));
            }
            if !trained.is_empty() && !std::mem::replace(member, true) {
                added.push(slot);
            }
            if !frozen.is_empty() {
                *member = false;
            }
        }
        reducer.set_members(members)?;
        self.set_rungs(reducer.order());
        Ok(added)
    }

    /// A gradient of what is frozen here comes from a rank that trains it.
    fn pass_ends(&self, state: &mut State, reduced: &[bool]) -> Result<(), ReducerError> {
        for (slot, (trainable, reduced)) in state.trainable.iter_mut().zip(reduced).enumerate() {
            match std::mem::take(&mut trainable.seen) {
                Seen::Frozen if *reduced => {
                    return Err(self.differs(slot, Vec::new(), vec![self.rank]));
                }
                Seen::Frozen => trainable.frozen_passes += 1,
                Seen::Trained => trainable.frozen_passes = 0,
                Seen::Unused => {}
            }
        }
        Ok(())
    }

    fn differs(&self, slot: usize, trained: Vec<usize>, frozen: Vec<usize>) -> ReducerError {
        ReducerError::TrainableDiffers {
            rank: self.rank,
            path: self.layout.params[slot].path.clone(),
            trained,
            frozen,
        }
    }

    /// A parameter of which no hook is left, while others are: it is no longer in the model.
    pub(super) fn check_replaced(&self) -> Result<(), ReducerError> {
        let hooked = || {
            self.occurrences
                .iter()
                .filter_map(|o| Some((o, o.hooks.get()?)))
        };
        let gone = hooked()
            .find(|(o, hooks)| self.layout.params[o.slot].trainable && hooks.strong_count() == 0);
        match gone {
            Some((occurrence, _)) if hooked().any(|(_, hooks)| hooks.strong_count() > 0) => {
                Err(ReducerError::Replaced {
                    rank: self.rank,
                    path: self.layout.params[occurrence.slot].path.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}
