//! One wrapped model: what its hooks share.

use super::{
    proxy::Proxy,
    store::{BackendChanged, GradientStore},
};
use crate::{
    error::BackwardPanic,
    reducer::{Fired, Layout, Reducer, ReducerError, RoundTrace, Totals, Use, UseCounter},
};
use burn::backend::{
    Backend,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use burn::module::ParamId;
use std::{
    any::Any,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

type Result<T, E = ReducerError> = std::result::Result<T, E>;

/// Rounds after which a parameter that no rank has used is reported.
const ROUNDS_BEFORE_UNUSED_WARNING: u64 = 3;

/// Whether backward passes synchronise: off while any `no_sync` guard lives.
#[derive(Debug, Default)]
pub(crate) struct SyncSwitch(AtomicUsize);

impl SyncSwitch {
    pub(crate) fn hold(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn release(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

/// All wrapped models of a process.
///
/// A graph may run through several of them. The first return step of a pass launches what is left
/// of *every* round that this pass opened before it waits for its own: two ranks that close
/// two models in different orders would otherwise wait for each other.
#[derive(Debug, Default)]
pub(crate) struct Sessions(Mutex<Vec<Weak<Session>>>);

impl Sessions {
    pub(crate) fn add(&self, session: &Arc<Session>) {
        let mut sessions = lock(&self.0);
        sessions.retain(|s| s.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
    }

    pub(crate) fn live(&self) -> Vec<Arc<Session>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }
}

/// One field of the model that holds a trainable parameter.
#[derive(Debug)]
pub(super) struct Occurrence {
    /// The distinct parameter; tied fields share one.
    pub(super) slot: usize,
    /// The field's parameter id in the wrapped model.
    pub(super) id: ParamId,
    pub(super) proxy: Proxy,
    /// A traversal met the hook (see [`Session::saw_hook`]).
    pub(super) seen: AtomicBool,
    /// The field was loaded from a record, whose parameter id it has now.
    pub(super) reloaded: AtomicBool,
}

type Flush = fn(&Session) -> Result<()>;

/// Where the model stands between forward and the end of backward.
#[derive(Debug)]
enum Round {
    /// No backward is running.
    Idle,
    /// Ready steps are running.
    Open {
        thread: ThreadId,
        /// Decided by the switch when backward began.
        sync: bool,
        /// Which occurrences have a return step in this graph.
        fired: Vec<bool>,
        /// [`Session::flush`] for the backend of this pass.
        flush: Flush,
        flushed: bool,
    },
    /// Return steps are running: the reduced gradient of each slot, as `FloatTensor<B>`.
    Closed(Vec<Option<Box<dyn Any + Send>>>),
}

#[derive(Debug)]
struct State {
    uses: UseCounter,
    store: GradientStore,
    round: Round,
    /// Backward passes accumulated since the last synchronised one.
    accumulated: u32,
    synchronised: u64,
    /// Slots that some rank has used.
    ever_used: Vec<bool>,
    failure: Option<ReducerError>,
}

/// The state of one wrapped model on this rank. Its hooks and the backward steps they record
/// share it; nothing here outlives the model and its graphs.
#[derive(Debug)]
pub(crate) struct Session {
    rank: usize,
    layout: Layout,
    occurrences: Vec<Occurrence>,
    /// Fields that share each slot.
    fields: Vec<usize>,
    /// Position of each slot on the ladder.
    rungs: Vec<AtomicUsize>,
    /// `None` in a world of one: gradients then stay tensors and nothing is copied.
    reducer: Option<Mutex<Reducer>>,
    switch: Arc<SyncSwitch>,
    sessions: Arc<Sessions>,
    state: Mutex<State>,
}

impl Session {
    pub(super) fn new(
        rank: usize,
        layout: Layout,
        occurrences: Vec<Occurrence>,
        reducer: Option<Reducer>,
        learn_uses: bool,
        switch: Arc<SyncSwitch>,
        sessions: Arc<Sessions>,
    ) -> Arc<Self> {
        let slots = layout.len();
        let mut fields = vec![0; slots];
        for occurrence in &occurrences {
            fields[occurrence.slot] += 1;
        }
        let session = Arc::new(Self {
            rank,
            layout,
            occurrences,
            fields,
            rungs: (0..slots).map(AtomicUsize::new).collect(),
            reducer: reducer.map(Mutex::new),
            switch,
            sessions: sessions.clone(),
            state: Mutex::new(State {
                uses: UseCounter::new(slots, learn_uses),
                store: GradientStore::new(slots),
                round: Round::Idle,
                accumulated: 0,
                synchronised: 0,
                ever_used: vec![false; slots],
                failure: None,
            }),
        });
        sessions.add(&session);
        session
    }

    pub(crate) fn totals(&self) -> Totals {
        self.reducer
            .as_ref()
            .map(|r| lock(r).totals())
            .unwrap_or_default()
    }

    pub(crate) fn trace(&self) -> Option<RoundTrace> {
        self.reducer.as_ref().map(|r| lock(r).trace().clone())
    }

    /// Rungs that the ladder of this model needs.
    pub(super) fn rungs(&self) -> usize {
        self.rungs.len()
    }

    pub(super) fn id(&self, occurrence: usize) -> ParamId {
        self.occurrences[occurrence].id
    }

    /// A forward pass uses a parameter.
    pub(super) fn tap(self: &Arc<Self>, occurrence: usize) -> Tap {
        let mut state = lock(&self.state);
        self.recover(&mut state);
        Tap {
            session: Arc::downgrade(self),
            occurrence,
            use_: state.uses.used(self.occurrences[occurrence].slot),
        }
    }

    /// The ladder position of an occurrence's parameter.
    pub(super) fn rung(&self, occurrence: usize) -> usize {
        self.rungs[self.occurrences[occurrence].slot].load(Ordering::Relaxed)
    }

    /// A traversal of the model met the hook of this occurrence.
    pub(super) fn saw_hook(&self, occurrence: usize) {
        self.occurrences[occurrence]
            .seen
            .store(true, Ordering::Relaxed);
    }

    /// The field of this occurrence was loaded from a record.
    pub(super) fn reloaded(&self, occurrence: usize) {
        self.occurrences[occurrence]
            .reloaded
            .store(true, Ordering::Relaxed);
    }

    /// The first occurrence whose hook no traversal has met.
    pub(super) fn first_unseen(&self) -> Option<usize> {
        self.occurrences
            .iter()
            .position(|o| !o.seen.load(Ordering::Relaxed))
    }

    pub(super) fn pending_proxy(&self, occurrence: usize) -> Option<&Proxy> {
        Some(&self.occurrences[occurrence].proxy).filter(|p| p.is_pending())
    }

    pub(super) fn drop_proxy(&self, occurrence: usize) {
        self.occurrences[occurrence].proxy.set_pending(false);
    }

    /// A forward pass while a round is open on the same thread means that the backward pass before
    /// it was left by a panic.
    fn recover(&self, state: &mut State) {
        match &state.round {
            Round::Open { thread, .. } if *thread == thread::current().id() => {}
            _ => return,
        }
        state.round = Round::Idle;
        state.store.discard_pass();
        state.uses.close();
        if let Some(reducer) = &self.reducer {
            let mut reducer = lock(reducer);
            if reducer.has_launched() {
                let interrupted = ReducerError::Interrupted { rank: self.rank };
                state.failure.get_or_insert(interrupted);
            } else {
                reducer.discard();
            }
        }
    }

    /// A ready step: one use's gradient is there.
    fn ready<B: Backend>(&self, tap: &Tap, gradient: FloatTensor<B>) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let sync = self.open::<B>(state, tap.occurrence);
        let slot = tap.use_.slot;
        let fired = state.uses.fired(tap.use_);
        state
            .store
            .add::<B>(slot, gradient)
            .map_err(|e| self.changed(slot, e))?;
        let Some(reducer) = self.reducer.as_ref().filter(|_| sync) else {
            return Ok(());
        };
        match fired {
            Fired::Partial => Ok(()),
            Fired::Complete | Fired::Late => self.pack::<B>(state, &mut lock(reducer), slot),
        }
    }

    /// Opens the round if this is its first gradient; whether it synchronises.
    fn open<B: Backend>(&self, state: &mut State, occurrence: usize) -> bool {
        if let Round::Open { sync, fired, .. } = &mut state.round {
            fired[occurrence] = true;
            return *sync;
        }
        let sync = self.switch.is_on();
        let mut fired = vec![false; self.occurrences.len()];
        fired[occurrence] = true;
        state.round = Round::Open {
            thread: thread::current().id(),
            sync,
            fired,
            flush: Self::flush::<B>,
            flushed: false,
        };
        if let Some(reducer) = self.reducer.as_ref().filter(|_| sync) {
            lock(reducer).begin(state.accumulated + 1);
        }
        sync
    }

    fn pack<B: Backend>(
        &self,
        state: &mut State,
        reducer: &mut Reducer,
        slot: usize,
    ) -> Result<()> {
        let gradient = state
            .store
            .take::<B>(slot)
            .map_err(|e| self.changed(slot, e))?;
        let Some(gradient) = gradient else {
            return Ok(());
        };
        let data = burn::tensor::try_read_sync(B::float_into_data(gradient));
        let data = data.ok_or("the device cannot be read synchronously".to_string());
        let data = data.and_then(|d| d.map_err(|e| e.to_string()));
        let data = data.map_err(|cause| ReducerError::Read {
            rank: self.rank,
            path: self.layout.params[slot].path.clone(),
            cause,
        })?;
        reducer.pack(slot, data)
    }

    /// Sends what is left of a round, without waiting.
    fn flush<B: Backend>(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
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

    /// What `flush` to call when `thread` closes a pass, if it opened a round here.
    fn open_flush(&self, thread: ThreadId) -> Option<Flush> {
        match &lock(&self.state).round {
            Round::Open {
                thread: t, flush, ..
            } if *t == thread => Some(*flush),
            _ => None,
        }
    }

    /// A return step: gives the reduced gradient to its leaf. The first one closes the round.
    fn give_back<B: Backend>(
        &self,
        occurrence: usize,
        leaf: NodeId,
        grads: &mut Gradients,
    ) -> Result<()> {
        let thread = thread::current().id();
        if self.open_flush(thread).is_some() {
            for session in self.sessions.live() {
                if let Some(flush) = session.open_flush(thread) {
                    flush(&session)?;
                }
            }
            self.close::<B>(grads)?;
        }
        let slot = self.occurrences[occurrence].slot;
        if let Round::Closed(gradients) = &mut lock(&self.state).round
            && let Some(gradient) = hand_out::<B>(&mut gradients[slot], self.fields[slot])
        {
            grads.register::<B>(leaf, gradient);
        }
        Ok(())
    }

    fn close<B: Backend>(&self, grads: &mut Gradients) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let (sync, fired) = match std::mem::replace(&mut state.round, Round::Idle) {
            Round::Open { sync, fired, .. } => (sync, fired),
            other => {
                state.round = other;
                return Ok(());
            }
        };
        let mut gradients = if sync {
            self.reduced::<B>(state)?
        } else {
            Vec::new()
        };
        if sync {
            state.accumulated = 0;
        } else {
            state.store.keep::<B>().map_err(|e| self.changed(0, e))?;
            state.accumulated += 1;
            gradients.resize_with(self.layout.len(), || None);
        }
        state.uses.close();
        self.check_identities(&fired, &gradients)?;
        self.give_to_proxies::<B>(&fired, &mut gradients, grads);
        if sync {
            self.after_sync(state, &gradients)?;
        }
        state.round = Round::Closed(gradients);
        Ok(())
    }

    /// The reduced gradient of each slot, where any rank has one.
    fn reduced<B: Backend>(&self, state: &mut State) -> Result<Vec<Option<Box<dyn Any + Send>>>> {
        let erase = |gradient: FloatTensor<B>| -> Box<dyn Any + Send> { Box::new(gradient) };
        let Some(reducer) = &self.reducer else {
            let slots = 0..self.layout.len();
            let take = |slot| {
                state
                    .store
                    .take::<B>(slot)
                    .map_err(|e| self.changed(slot, e))
            };
            return slots.map(take).map(|g| Ok(g?.map(erase))).collect();
        };
        let data = lock(reducer).wait()?;
        let Some(device) = state.store.device::<B>() else {
            return Err(self.changed(0, BackendChanged));
        };
        let upload = |data| erase(B::float_from_data(data, &device));
        Ok(data.into_iter().map(|d| d.map(upload)).collect())
    }

    /// A gradient that goes through a proxy, and the fields of a tied parameter, need the ids of `wrap`. Burn gives
    /// a loaded parameter the id of the record and tells nobody.
    fn check_identities(
        &self,
        fired: &[bool],
        gradients: &[Option<Box<dyn Any + Send>>],
    ) -> Result<()> {
        let lost = self.occurrences.iter().zip(fired).find(|(o, fired)| {
            let by_id = !**fired || self.fields[o.slot] > 1;
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
        fired: &[bool],
        gradients: &mut [Option<Box<dyn Any + Send>>],
        grads: &mut Gradients,
    ) {
        for (occurrence, _) in self
            .occurrences
            .iter()
            .zip(fired)
            .filter(|(_, fired)| !**fired)
        {
            let gradient = hand_out::<B>(
                &mut gradients[occurrence.slot],
                self.fields[occurrence.slot],
            );
            occurrence.proxy.set_pending(gradient.is_some());
            if let Some(gradient) = gradient {
                grads.register::<B>(occurrence.proxy.node(), gradient);
            }
        }
        for (occurrence, _) in self
            .occurrences
            .iter()
            .zip(fired)
            .filter(|(_, fired)| **fired)
        {
            occurrence.proxy.set_pending(false);
        }
    }

    /// Learns from the first rounds: rank 0's order of first use, and what nobody uses.
    fn after_sync(
        &self,
        state: &mut State,
        gradients: &[Option<Box<dyn Any + Send>>],
    ) -> Result<()> {
        state.synchronised += 1;
        for (used, gradient) in state.ever_used.iter_mut().zip(gradients) {
            *used |= gradient.is_some();
        }
        if state.synchronised == 1
            && let Some(reducer) = &self.reducer
        {
            let order = lock(reducer).rebuild(&state.uses.first_use_order())?;
            self.set_rungs(&order);
        }
        if state.synchronised == ROUNDS_BEFORE_UNUSED_WARNING {
            self.warn_of_unused(state);
        }
        Ok(())
    }

    fn set_rungs(&self, order: &[usize]) {
        for (rung, &slot) in order.iter().enumerate() {
            self.rungs[slot].store(rung, Ordering::Relaxed);
        }
    }

    fn warn_of_unused(&self, state: &State) {
        let params = self.layout.params.iter().zip(&state.ever_used);
        let unused: Vec<&str> = params
            .filter(|(_, used)| !**used)
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

    fn changed(&self, slot: usize, _: BackendChanged) -> ReducerError {
        ReducerError::WrongType {
            rank: self.rank,
            path: self.layout.params[slot].path.clone(),
            expected: self.layout.params[slot].dtype,
            actual: "on another kind of device than the gradients accumulated before it".into(),
        }
    }

    /// Burn's `backward` cannot return an error: poison the model, tell the peers, panic with
    /// a payload that [`try_backward`](crate::try_backward) turns back into the error.
    fn fail(&self, error: ReducerError) -> ! {
        lock(&self.state).failure.get_or_insert(error.clone());
        if let Some(reducer) = &self.reducer {
            let group = lock(reducer).group().clone();
            group.abort(&error.to_string());
        }
        BackwardPanic::raise(error)
    }
}

/// Takes the gradient of a slot, or a clone of it when several fields share the slot.
fn hand_out<B: Backend>(
    gradient: &mut Option<Box<dyn Any + Send>>,
    fields: usize,
) -> Option<FloatTensor<B>> {
    if fields > 1 {
        return gradient.as_ref()?.downcast_ref::<FloatTensor<B>>().cloned();
    }
    gradient
        .take()?
        .downcast::<FloatTensor<B>>()
        .ok()
        .map(|g| *g)
}

/// The state of one use, carried by its two backward steps.
///
/// Weak, because Burn's graph is global to the process and may keep steps of a graph that was never run backward: they
/// must not keep the job's connections open. The gradient of a model that is gone has nobody who could collect it.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    session: Weak<Session>,
    occurrence: usize,
    use_: Use,
}

impl Tap {
    /// The ready step's work.
    pub(super) fn take<B: Backend>(&self, gradient: FloatTensor<B>) {
        if let Some(session) = self.session.upgrade()
            && let Err(error) = session.ready::<B>(self, gradient)
        {
            session.fail(error);
        }
    }

    /// The return step's work.
    pub(super) fn give_back<B: Backend>(&self, leaf: NodeId, grads: &mut Gradients) {
        if let Some(session) = self.session.upgrade()
            && let Err(error) = session.give_back::<B>(self.occurrence, leaf, grads)
        {
            session.fail(error);
        }
    }
}

/// A panic while the lock was held left no half-made state that the next holder could not see.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
