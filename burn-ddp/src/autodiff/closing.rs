//! The end of a backward pass: the last buckets leave, all come back, every leaf gets its gradient.

use super::{
    session::{Round, Session, State},
    sessions::{Sessions, lock},
    store::{BackendChanged, Erased, downcast},
};
use crate::{
    config::Reduction,
    reducer::{Finding, NonFinite, Outcome, Reducer, ReducerError, all_finite},
};
use burn::backend::{
    Backend,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::TensorData;
use std::{
    sync::{Arc, atomic::Ordering},
    thread::{self, ThreadId},
};

type Result<T, E = ReducerError> = std::result::Result<T, E>;

/// How a round is ended, for the backend of its pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Closing {
    flush: fn(&Session) -> Result<()>,
    close: fn(&Session, &mut Gradients) -> Result<()>,
}

impl Closing {
    pub(super) fn of<B: Backend>() -> Self {
        Self {
            flush: Session::flush::<B>,
            close: Session::close::<B>,
        }
    }
}

/// The reduced gradient of each slot, as `FloatTensor<B>`; `None` where no rank has one.
pub(super) type Reduced = Vec<Option<Erased>>;

/// Rounds after which a parameter that no rank has used is reported.
const ROUNDS_BEFORE_UNUSED_WARNING: u64 = 3;

impl Sessions {
    /// Ends every round that `thread` has opened. All send what they have left before any waits, and they are closed in
    /// the order of `wrap`, which is the same on all ranks: the order of return steps is not, and a close contains
    /// collectives.
    fn close_pass(&self, thread: ThreadId, grads: &mut Gradients) -> Result<()> {
        let open = |session: Arc<Session>| Some((session.open_round(thread)?, session));
        let live = self.live();
        for session in &live {
            // The verdict is one on the last pass.
            *lock(&session.not_finite) = None;
        }
        let open: Vec<_> = live.into_iter().filter_map(open).collect();
        for (closing, session) in &open {
            (closing.flush)(session)?;
        }
        for (closing, session) in &open {
            (closing.close)(session, grads)?;
        }
        Ok(())
    }
}

impl Session {
    /// Sends what is left of a round, without waiting.
    fn flush<B: Backend>(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        self.check_lost(state)?;
        self.check_static_pass(state)?;
        let Round::Open {
            sync: true,
            flushed,
            ..
        } = &mut state.round
        else {
            return Ok(());
        };
        if std::mem::replace(flushed, true) {
            return Ok(());
        }
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        let mut reducer = lock(reducer);
        for slot in 0..self.layout.len() {
            self.pack::<B>(state, &mut reducer, slot)?;
        }
        reducer.launch_rest()
    }

    /// How to end the round that `thread` has opened here, if any.
    fn open_round(&self, thread: ThreadId) -> Option<Closing> {
        match &lock(&self.state).round {
            Round::Open {
                thread: t, closing, ..
            } if *t == thread => Some(*closing),
            _ => None,
        }
    }

    /// A return step: gives the reduced gradient to its leaf. The first one of a pass closes the rounds of all models in it.
    pub(super) fn give_back<B: Backend>(
        &self,
        occurrence: usize,
        leaf: NodeId,
        grads: &mut Gradients,
    ) -> Result<()> {
        let thread = thread::current().id();
        if self.open_round(thread).is_some() {
            self.sessions.close_pass(thread, grads)?;
        }
        let slot = self.occurrences[occurrence].slot;
        let mut state = lock(&self.state);
        let Round::Closed {
            thread: owner,
            unserved,
            gradients,
            served,
        } = &mut state.round
        else {
            return Ok(());
        };
        if *owner != thread || std::mem::replace(&mut served[occurrence], true) {
            return Ok(());
        }
        let gradient = hand_out::<B>(&mut gradients[slot], self.fields[slot]);
        if let Some(gradient) = gradient.map_err(|e| self.changed(slot, e))? {
            grads.register::<B>(leaf, gradient);
        }
        *unserved -= 1;
        if *unserved == 0 {
            state.round = Round::Idle;
        }
        Ok(())
    }

    fn close<B: Backend>(&self, grads: &mut Gradients) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let (thread, sync, samples, fired) = match std::mem::replace(&mut state.round, Round::Idle)
        {
            Round::Open {
                thread,
                sync,
                samples,
                fired,
                ..
            } => (thread, sync, samples, fired),
            other => {
                state.round = other;
                return Ok(());
            }
        };
        state.samples += samples;
        let gradients = if sync {
            let gradients = self.reduced::<B>(state)?;
            (state.accumulated, state.samples) = (0, 0);
            gradients
        } else {
            state.store.keep::<B>().map_err(|e| self.changed(0, e))?;
            state.accumulated += 1;
            self.layout.params.iter().map(|_| None).collect()
        };
        let mut gradients = gradients;
        state.uses.close();
        state.first_use = None;
        state.anchor = None;
        self.check_identities(&fired, &gradients)?;
        self.give_to_proxies::<B>(&fired, &mut gradients, grads)?;
        if sync {
            self.after_sync(state)?;
        }
        state.round = Round::Closed {
            thread,
            unserved: fired.iter().flatten().count(),
            gradients,
            served: vec![false; self.occurrences.len()],
        };
        Ok(())
    }

    /// The reduced gradient of each slot, where any rank has one.
    fn reduced<B: Backend>(&self, state: &mut State) -> Result<Reduced> {
        let Some(reducer) = &self.reducer else {
            return self.reduced_alone::<B>(state);
        };
        let mut reducer = lock(reducer);
        let outcome = reducer.wait()?;
        let pack =
            |state: &mut State, reducer: &mut Reducer, slot| self.pack::<B>(state, reducer, slot);
        let outcome = self.settle(state, &mut reducer, outcome, pack)?;
        drop(reducer);
        self.check_replaced()?;
        self.check_lost_first(state, &outcome.gradients)?;
        let data = self.judge(state, outcome);
        let upload = |(slot, data): (usize, Option<TensorData>)| {
            let Some(data) = data else { return Ok(None) };
            let device = self.device_of::<B>(state, slot);
            let device = device.ok_or_else(|| self.changed(slot, BackendChanged))?;
            Ok(Some(Box::new(B::float_from_data(data, &device)) as Erased))
        };
        data.into_iter().enumerate().map(upload).collect()
    }

    /// Where the reduced gradient of a slot belongs. The model may have been moved since `wrap`, which the last gradient tells. A model that is spread over
    /// several devices stays where it was wrapped.
    fn device_of<B: Backend>(&self, state: &State, slot: usize) -> Option<B::Device> {
        let at_wrap = || {
            let mut fields = self.occurrences.iter().filter(|o| o.slot == slot);
            let device = fields.next()?.device.get()?;
            device.downcast_ref::<B::Device>().cloned()
        };
        match self.several_devices {
            true => state.store.device::<B>(slot).or_else(at_wrap),
            false => state.store.last_device::<B>(),
        }
    }

    /// The same in a world of one, where no reducer is needed.
    fn reduced_alone<B: Backend>(&self, state: &mut State) -> Result<Reduced> {
        let weighted = self.rule.reduction == Reduction::WeightedMean;
        let samples = state.weight(state.samples);
        state.synchronised += 1;
        self.set_weight_unit(state, state.samples);
        let mut take = |slot| -> Result<Option<Erased>> {
            let changed = |e| self.changed(slot, e);
            if !weighted {
                return state.store.take_erased::<B>(slot).map_err(changed);
            }
            let sum = state.store.take::<B>(slot).map_err(changed)?;
            let mean = |sum| -> Erased { Box::new(B::float_div_scalar(sum, samples.into())) };
            Ok(sum.map(mean))
        };
        let gradients: Reduced = (0..self.layout.len())
            .map(&mut take)
            .collect::<Result<_>>()?;
        let mut finding = Finding::default();
        if self.rule.check_finite {
            for (slot, gradient) in gradients.iter().enumerate() {
                let gradient = gradient
                    .as_ref()
                    .and_then(|g| g.downcast_ref::<FloatTensor<B>>());
                let Some(gradient) = gradient.cloned() else {
                    continue;
                };
                if !all_finite(&self.read::<B>(slot, gradient)?) {
                    finding.path = Some(self.layout.params[slot].path.clone());
                    finding.ranks.insert(self.rank);
                    break;
                }
            }
        }
        match self.verdict(state, finding) {
            true => Ok(self.layout.params.iter().map(|_| None).collect()),
            false => Ok(gradients),
        }
    }

    /// Gradients that are not all numbers are withheld, if that is the rule; every rank comes to the same verdict.
    pub(super) fn judge(&self, state: &State, outcome: Outcome) -> Vec<Option<TensorData>> {
        match self.verdict(state, outcome.finding) {
            true => vec![None; self.layout.len()],
            false => outcome.gradients,
        }
    }

    /// Notes what the check has found in the pass that has just been counted; whether it is to be skipped.
    fn verdict(&self, state: &State, finding: Finding) -> bool {
        let Some(path) = finding.path else {
            *lock(&self.not_finite) = None;
            return false;
        };
        let found = NonFinite {
            step: state.synchronised,
            ranks: finding.ranks.into_iter().collect(),
            path,
        };
        if self.rank == 0 {
            tracing::warn!("{found}; no rank makes this step");
        }
        *lock(&self.not_finite) = Some(found);
        true
    }

    /// A gradient that goes through a proxy, and the fields of a tied parameter, need the ids of `wrap`. Burn gives
    /// a loaded parameter the id of the record and tells nobody.
    fn check_identities(&self, fired: &[Option<NodeId>], gradients: &Reduced) -> Result<()> {
        let lost = self.occurrences.iter().zip(fired).find(|(o, fired)| {
            let by_id = fired.is_none() || self.fields[o.slot] > 1;
            by_id && gradients[o.slot].is_some() && o.reloaded.load(Ordering::Relaxed)
        });
        match lost {
            None => Ok(()),
            Some((occurrence, _)) => Err(ReducerError::Reloaded {
                rank: self.rank,
                path: self.layout.params[occurrence.slot].path.clone(),
            }),
        }
    }

    /// Registers the gradients of parameters that have no return step in this graph.
    fn give_to_proxies<B: Backend>(
        &self,
        fired: &[Option<NodeId>],
        gradients: &mut Reduced,
        grads: &mut Gradients,
    ) -> Result<()> {
        for (occurrence, fired) in self.occurrences.iter().zip(fired) {
            let slot = occurrence.slot;
            let gradient = if fired.is_some() {
                None
            } else {
                hand_out::<B>(&mut gradients[slot], self.fields[slot])
                    .map_err(|e| self.changed(slot, e))?
            };
            occurrence.proxy.set_pending(gradient.is_some());
            if let Some(gradient) = gradient {
                grads.register::<B>(occurrence.proxy.node(), gradient);
            }
        }
        Ok(())
    }

    /// Learns from the first rounds: rank 0's order of first use, and what nobody uses.
    pub(super) fn after_sync(&self, state: &mut State) -> Result<()> {
        if state.synchronised == 1
            && let Some(reducer) = &self.reducer
        {
            let mut reducer = lock(reducer);
            reducer.rebuild(&state.uses.first_use_order())?;
            self.set_rungs(reducer.order());
            if self.static_graph {
                self.leave_out_unused(state, &mut reducer)?;
            }
        }
        if let (Some(buffers), Some(reducer)) = (self.buffers.get(), &self.reducer) {
            self.sync_buffers(&mut **lock(buffers), &lock(reducer), &state.counted)?;
        }
        if state.synchronised == ROUNDS_BEFORE_UNUSED_WARNING {
            self.warn_of_unused(state);
        }
        Ok(())
    }

    pub(super) fn set_rungs(&self, order: impl Iterator<Item = usize>) {
        for (rung, slot) in order.enumerate() {
            self.rungs[slot].store(rung, Ordering::Relaxed);
        }
    }

    fn warn_of_unused(&self, state: &State) {
        let params = self.layout.params.iter().zip(&state.ever_used);
        let unused: Vec<&str> = params
            .filter(|(param, used)| param.trainable && !**used)
            .map(|(p, _)| p.path.as_str())
            .collect();
        if !unused.is_empty() && self.rank == 0 {
            tracing::warn!(
                "no rank has used these parameters in the first {ROUNDS_BEFORE_UNUSED_WARNING} backward passes: {}. If the model \
                 does use them, it reads them around `Param::val()` (by deref or `base()`) and their gradients are not averaged",
                unused.join(", ")
            );
        }
    }
}

/// Takes the gradient of a slot, or a clone of it when several fields share the slot.
fn hand_out<B: Backend>(
    gradient: &mut Option<Erased>,
    fields: usize,
) -> Result<Option<FloatTensor<B>>, BackendChanged> {
    if fields > 1 {
        let shared = gradient
            .as_ref()
            .map(|g| g.downcast_ref::<FloatTensor<B>>());
        return shared.map(|g| g.cloned().ok_or(BackendChanged)).transpose();
    }
    gradient.take().map(downcast::<B>).transpose()
}
