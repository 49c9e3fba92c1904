//! One wrapped model: what its hooks share.

use super::{
    buffers::Buffers,
    closing::{Closing, Reduced},
    exchange::Exchange,
    ladder::Ladder,
    ops::DeviceCell,
    passes::{self, Mark},
    proxy::Proxy,
    sessions::{Sessions, SyncSwitch, lock},
    store::{BackendChanged, GradientStore},
    tap::Tap,
    trainable::{Seen, Trainable},
};
use crate::{
    config::{BufferPolicy, Reduction, WrapConfig},
    error::BackwardPanic,
    reducer::{
        Contribution, Fired, Layout, NonFinite, Reducer, ReducerError, RoundTrace, Rule, Totals,
        UseCounter,
    },
};
use burn::backend::{Backend, autodiff::NodeId, tensor::FloatTensor};
use burn::module::ParamId;
use burn::tensor::{Tensor, TensorData};
use std::{
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

type Result<T, E = ReducerError> = std::result::Result<T, E>;

/// [`State::weight_unit`] of the first window, before the ranks know each other's numbers.
const FIRST_WEIGHT_UNIT: f64 = 256.0;

/// One field of the model that holds a float parameter.
#[derive(Debug)]
pub(super) struct Occurrence {
    /// The distinct parameter; tied fields share one.
    pub(super) slot: usize,
    /// The field's parameter id in the wrapped model.
    pub(super) id: ParamId,
    pub(super) proxy: Proxy,
    /// Where the parameter was at `wrap`.
    pub(super) device: DeviceCell,
    /// A traversal met the hook (see [`Session::saw_hook`]).
    pub(super) seen: AtomicBool,
    /// The field was loaded from a record, whose parameter id it has now.
    pub(super) reloaded: AtomicBool,
    /// Counts the hooks of this field in the model and its clones; never set where none could be attached.
    pub(super) hooks: OnceLock<Weak<()>>,
}

/// Where the model stands between forward and the end of backward.
#[derive(Debug)]
pub(super) enum Round {
    /// No backward is running.
    Idle,
    /// Ready steps are running.
    Open {
        thread: ThreadId,
        /// Decided by the switch when backward began.
        sync: bool,
        /// Samples behind this pass, which its gradients are multiplied by; 1 unless the mean is one over samples.
        samples: u64,
        /// The leaf of each occurrence that has a return step in this graph.
        fired: Vec<Option<NodeId>>,
        closing: Closing,
        flushed: bool,
    },
    /// Return steps are running.
    Closed {
        thread: ThreadId,
        /// Occurrences that are still to be given theirs. Another thread must not begin before there are none.
        unserved: usize,
        gradients: Reduced,
        /// Which occurrences have been given theirs: a leaf has a return step for each use.
        served: Vec<bool>,
    },
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) uses: UseCounter,
    /// When the uses began that `uses` counts.
    pub(super) first_use: Option<Mark>,
    pub(super) store: GradientStore,
    pub(super) round: Round,
    /// Parent of the return steps that this thread records until the next pass ends (see [`Ladder::anchor`]). Not one for all
    /// threads: what they record would wait for one another in Burn's graph.
    pub(super) anchor: Option<(ThreadId, Tensor<1>)>,
    /// Backward passes accumulated since the last synchronised one, and the samples behind them.
    pub(super) accumulated: u32,
    pub(super) samples: u64,
    /// So many samples have a weight of 1: a power of two near the largest number of the last round, so that 16-bit gradients stay
    /// in their range. Equal on all ranks, and the same for a whole window.
    pub(super) weight_unit: f64,
    pub(super) synchronised: u64,
    /// Ranks whose data is in the result of the last synchronised pass.
    pub(super) counted: Vec<bool>,
    /// What each slot is at present.
    pub(super) trainable: Vec<Trainable>,
    /// Slots that some rank has used.
    pub(super) ever_used: Vec<bool>,
    pub(super) failure: Option<ReducerError>,
}

impl State {
    /// What a gradient of so many samples is multiplied by.
    pub(super) fn weight(&self, samples: u64) -> f64 {
        samples as f64 / self.weight_unit
    }
}

/// What a session is made of.
pub(super) struct Parts {
    pub(super) layout: Layout,
    pub(super) occurrences: Vec<Occurrence>,
    pub(super) several_devices: bool,
    pub(super) reducer: Option<Reducer>,
    pub(super) exchange: Option<Arc<Exchange>>,
}

/// The state of one wrapped model on this rank. Its hooks and the backward steps they record
/// share it; nothing here outlives the model and its graphs.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) rank: usize,
    pub(super) layout: Layout,
    pub(super) occurrences: Vec<Occurrence>,
    /// Fields that share each slot.
    pub(super) fields: Vec<usize>,
    /// Position of each slot on the ladder.
    pub(super) rungs: Vec<AtomicUsize>,
    /// `None` in a world of one: gradients then stay tensors and nothing is copied.
    pub(super) reducer: Option<Mutex<Reducer>>,
    pub(super) rule: Rule,
    pub(super) buffer_policy: BufferPolicy,
    /// Set once the model is known to have any.
    pub(super) buffers: OnceLock<Mutex<Box<dyn Buffers>>>,
    /// What the ranks have last agreed on of them.
    pub(super) last_buffers: Mutex<Vec<f64>>,
    /// The verdict of the last synchronised pass. Not in the state, which a rank that waits in `join` holds.
    pub(super) not_finite: Mutex<Option<NonFinite>>,
    /// Set if the model has synchronised layers, and more than one rank.
    pub(super) exchange: Option<Arc<Exchange>>,
    /// The model is spread over devices.
    pub(super) several_devices: bool,
    /// Every pass is as the first one.
    pub(super) static_graph: bool,
    switch: Arc<SyncSwitch>,
    pub(super) sessions: Arc<Sessions>,
    pub(super) state: Mutex<State>,
}

impl Session {
    pub(super) fn new(
        rank: usize,
        parts: Parts,
        config: &WrapConfig,
        switch: Arc<SyncSwitch>,
        sessions: Arc<Sessions>,
    ) -> Arc<Self> {
        let Parts {
            layout,
            occurrences,
            several_devices,
            reducer,
            exchange,
        } = parts;
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
            rule: config.rule(),
            buffer_policy: config.buffers,
            buffers: OnceLock::new(),
            exchange,
            last_buffers: Mutex::default(),
            not_finite: Mutex::default(),
            several_devices,
            static_graph: config.static_graph,
            switch,
            sessions: sessions.clone(),
            state: Mutex::new(State {
                uses: UseCounter::new(slots, config.expect()),
                first_use: None,
                store: GradientStore::new(slots),
                round: Round::Idle,
                anchor: None,
                accumulated: 0,
                samples: 0,
                weight_unit: if config.rule().reduction == Reduction::WeightedMean {
                    FIRST_WEIGHT_UNIT
                } else {
                    1.0
                },
                synchronised: 0,
                counted: Vec::new(),
                trainable: vec![Trainable::default(); slots],
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

    /// The verdict of the last synchronised pass.
    pub(crate) fn not_finite(&self) -> Option<NonFinite> {
        lock(&self.not_finite).clone()
    }

    /// Rungs that the ladder of this model needs.
    pub(super) fn rungs(&self) -> usize {
        self.rungs.len()
    }

    pub(super) fn id(&self, occurrence: usize) -> ParamId {
        self.occurrences[occurrence].id
    }

    /// A forward pass uses a parameter: the state of its steps and the parent of its return step. `None` inside a backward
    /// pass, where nothing can be recorded.
    pub(super) fn tap(
        self: &Arc<Self>,
        occurrence: usize,
        ladder: &Ladder,
    ) -> Option<(Tap, Tensor<1>)> {
        let current = thread::current().id();
        let mut state = lock(&self.state);
        if matches!(&state.round, Round::Open { thread, .. } if *thread == current) {
            return None;
        }
        let ours = state.anchor.iter().find(|(thread, _)| *thread == current);
        let anchor = match ours.map(|(_, anchor)| anchor.clone()) {
            Some(anchor) => anchor,
            None => {
                // Burn's own lock is taken in here, and backward passes take them in the other order.
                drop(state);
                let anchor = ladder.anchor();
                state = lock(&self.state);
                state.anchor = Some((current, anchor.clone()));
                anchor
            }
        };
        passes::end();
        state.first_use.get_or_insert_with(Mark::now);
        let slot = self.occurrences[occurrence].slot;
        state.trainable[slot].seen = Seen::Trained;
        let tap = Tap {
            session: Arc::downgrade(self),
            occurrence,
            leaf: None,
            use_: state.uses.used(slot),
        };
        Some((tap, anchor))
    }

    /// A forward pass uses a parameter that is frozen.
    pub(super) fn saw_frozen(&self, occurrence: usize) {
        let slot = self.occurrences[occurrence].slot;
        let seen = &mut lock(&self.state).trainable[slot].seen;
        *seen = Seen::Frozen.max(*seen);
    }

    /// The ladder position of an occurrence's parameter.
    pub(super) fn rung(&self, occurrence: usize) -> usize {
        self.rungs[self.occurrences[occurrence].slot].load(Ordering::Relaxed)
    }

    /// A traversal of the model met the hook of this occurrence.
    pub(super) fn saw_hook(&self, occurrence: usize) {
        passes::end();
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

    /// The first occurrence of a trainable parameter whose hook no traversal has met.
    pub(super) fn first_unseen(&self) -> Option<usize> {
        let unseen = |o: &Occurrence| !o.seen.load(Ordering::Relaxed);
        self.occurrences
            .iter()
            .position(|o| self.layout.params[o.slot].trainable && unseen(o))
    }

    pub(super) fn pending_proxy(&self, occurrence: usize) -> Option<&Proxy> {
        Some(&self.occurrences[occurrence].proxy).filter(|p| p.is_pending())
    }

    /// A panic has left the backward pass that is open on this thread.
    pub(super) fn interrupted(&self) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let current = thread::current().id();
        let sync = match &state.round {
            Round::Open { thread, sync, .. } if *thread == current => *sync,
            Round::Closed { thread, .. } if *thread == current => {
                state.round = Round::Idle;
                return;
            }
            _ => return,
        };
        state.round = Round::Idle;
        state.anchor = None;
        state.first_use = None;
        state.uses.abandon();
        state.store.discard_pass();
        let Some(reducer) = self.reducer.as_ref().filter(|_| sync) else {
            return;
        };
        let mut reducer = lock(reducer);
        // What was packed may contain an accumulated window, which cannot be taken out again.
        if reducer.has_launched() || state.accumulated > 0 {
            // The peers are told by the end of this process, or, if the panic is caught, by the next backward pass.
            let interrupted = ReducerError::Interrupted { rank: self.rank };
            state.failure.get_or_insert(interrupted);
        } else {
            reducer.discard();
        }
    }

    /// For the next window, after a round in which a rank had `most` samples.
    pub(super) fn set_weight_unit(&self, state: &mut State, most: u64) {
        if self.rule.reduction == Reduction::WeightedMean {
            state.weight_unit = f64::from(most.max(1).ilog2()).exp2();
        }
    }

    /// A ready step: one use's gradient is there.
    pub(super) fn ready<B: Backend>(&self, tap: &Tap, gradient: FloatTensor<B>) -> Result<()> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let (sync, samples) = self.open::<B>(state, tap)?;
        let slot = tap.use_.slot;
        let fired = state.uses.fired(tap.use_);
        self.check_static(state, slot, fired)?;
        let gradient = match samples {
            // The mean over no sample is no number.
            0 => {
                state.store.locate::<B>(slot, &gradient);
                None
            }
            samples => match state.weight(samples) {
                1.0 => Some(gradient),
                weight => Some(B::float_mul_scalar(gradient, weight.into())),
            },
        };
        if let Some(gradient) = gradient {
            let added = state.store.add::<B>(slot, gradient);
            added.map_err(|e| self.changed(slot, e))?;
        }
        let Some(reducer) = self.reducer.as_ref().filter(|_| sync) else {
            return Ok(());
        };
        match fired {
            Fired::Unexpected(_) | Fired::Partial => Ok(()),
            Fired::Complete | Fired::Late => self.pack::<B>(state, &mut lock(reducer), slot),
        }
    }

    /// Opens the round if this is its first gradient; whether it synchronises, and the samples behind it.
    fn open<B: Backend>(&self, state: &mut State, tap: &Tap) -> Result<(bool, u64)> {
        let path = || self.layout.params[tap.use_.slot].path.clone();
        let rank = self.rank;
        let current = thread::current().id();
        if let Round::Open {
            thread,
            sync,
            samples,
            fired,
            ..
        } = &mut state.round
        {
            if *thread != current {
                return Err(ReducerError::Concurrent { rank, path: path() });
            }
            let leaf = fired[tap.occurrence].or(tap.leaf);
            fired[tap.occurrence] = leaf;
            if leaf != tap.leaf {
                return Err(ReducerError::TwoLeaves { rank, path: path() });
            }
            return Ok((*sync, *samples));
        }
        if let Round::Closed {
            thread, unserved, ..
        } = &state.round
            && *thread != current
            && *unserved > 0
        {
            return Err(ReducerError::Concurrent { rank, path: path() });
        }
        let sync = self.switch.is_on();
        let weighted = self.rule.reduction == Reduction::WeightedMean;
        let samples = match (self.switch.samples(), weighted) {
            (Some(samples), true) => samples,
            (None, false) => 1,
            (None, true) => return Err(ReducerError::NoWeight { rank, path: path() }),
            (Some(_), false) => return Err(ReducerError::UnexpectedWeight { rank, path: path() }),
        };
        let mut fired = vec![None; self.occurrences.len()];
        fired[tap.occurrence] = tap.leaf;
        passes::begin();
        state.round = Round::Open {
            thread: current,
            sync,
            samples,
            fired,
            closing: Closing::of::<B>(),
            flushed: false,
        };
        if let Some(reducer) = self.reducer.as_ref().filter(|_| sync) {
            let mut reducer = lock(reducer);
            let own = Contribution {
                active: true,
                changed: !self.is_static(state) && self.trainable_changed(state, &reducer),
                window: state.accumulated + 1,
                samples: state.samples + samples,
            };
            reducer.begin(own, state.weight_unit)?;
        }
        Ok((sync, samples))
    }

    pub(super) fn pack<B: Backend>(
        &self,
        state: &mut State,
        reducer: &mut Reducer,
        slot: usize,
    ) -> Result<()> {
        if !reducer.has_place(slot) {
            return Ok(());
        }
        let gradient = state
            .store
            .take::<B>(slot)
            .map_err(|e| self.changed(slot, e))?;
        let Some(gradient) = gradient else {
            return Ok(());
        };
        reducer.pack(slot, self.read::<B>(slot, gradient)?)
    }

    pub(super) fn read<B: Backend>(
        &self,
        slot: usize,
        gradient: FloatTensor<B>,
    ) -> Result<TensorData> {
        let data = burn::tensor::try_read_sync(B::float_into_data(gradient));
        let data = data.ok_or("the device cannot be read synchronously".to_string());
        let data = data.and_then(|d| d.map_err(|e| e.to_string()));
        data.map_err(|cause| ReducerError::Read {
            rank: self.rank,
            path: self.layout.params[slot].path.clone(),
            cause,
        })
    }

    pub(super) fn changed(&self, slot: usize, _: BackendChanged) -> ReducerError {
        ReducerError::WrongType {
            rank: self.rank,
            path: self.layout.params[slot].path.clone(),
            expected: self.layout.params[slot].dtype,
            actual: "on another kind of device than the gradients accumulated before it".into(),
        }
    }

    /// Burn's `backward` cannot return an error: poison the model, tell the peers, panic with
    /// a payload that [`try_backward`](crate::try_backward) turns back into the error.
    pub(super) fn fail(&self, error: ReducerError) -> ! {
        self.poison(&error);
        BackwardPanic::raise(error)
    }

    /// No later pass can succeed, here or on a peer.
    pub(super) fn poison(&self, error: &ReducerError) {
        lock(&self.state).failure.get_or_insert(error.clone());
        if let Some(reducer) = &self.reducer {
            let group = lock(reducer).group().clone();
            group.abort(&error.to_string());
        }
    }
}
