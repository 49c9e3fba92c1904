//! A rank that has run out of data answers the others' rounds until all have.

use super::{
    exchange::Exchange,
    hook::{ParamHook, last_met, traverse},
    session::{Round, Session, State},
    sessions::lock,
    trainable::Seen,
};
use crate::{
    group::GroupError,
    reducer::{Contribution, Reducer, ReducerError},
};
use burn::{
    module::{Module, ModuleVisitor, Param, Reparameterization},
    optim::GradientsParams,
    tensor::{Tensor, TensorData},
};
use std::{
    panic,
    sync::Arc,
    thread::{self, JoinHandle},
};

type Thread = JoinHandle<Result<(), ReducerError>>;

/// Answers the exchanges of a model's synchronised layers, on a thread of its own: what a rank with data does in a step between two rounds of the
/// reduction is nothing that this one could know.
#[derive(Debug)]
pub(crate) struct Answering(
    /// `None` if there is nothing to answer.
    Option<(Arc<Exchange>, Thread)>,
);

impl Answering {
    /// Begins, if `model` has such layers. Collective in the end.
    pub(crate) fn begin<M: Module>(model: &M, rank: usize) -> Result<Self, ReducerError> {
        let mut collect = Collect::default();
        traverse(model, &mut collect);
        let exchange = collect.session.and_then(|s| s.exchange.clone());
        let Some(exchange) = exchange.filter(|_| !collect.several) else {
            return Ok(Self(None));
        };
        let answering = exchange.clone();
        let answer = move || {
            let answered = answering.answer();
            answered.inspect_err(|error| answering.abort(error))
        };
        let thread = thread::Builder::new().name("ddp-join".into()).spawn(answer);
        let thread = thread.map_err(|error| GroupError::Transport {
            rank,
            operation: "starting the thread that answers for layers".into(),
            cause: error.to_string(),
        })?;
        Ok(Self(Some((exchange, thread))))
    }

    /// Returns once all ranks have come here.
    pub(crate) fn end(mut self) -> Result<(), ReducerError> {
        match self.0.take().map(|(_, thread)| thread.join()) {
            None => Ok(()),
            Some(Ok(answered)) => answered,
            Some(Err(panicked)) => panic::resume_unwind(panicked),
        }
    }
}

impl Drop for Answering {
    /// This rank leaves without the others, with an error or a panic.
    fn drop(&mut self) {
        if let Some((exchange, _)) = &self.0 {
            exchange.abort(&"a rank has left `join` before the others");
        }
    }
}

/// Answers one round of `model`'s reduction without data of this rank's own. Collective. The gradients of the ranks that have data;
/// `None` once no rank has any, or if the model has nobody to wait for.
pub(crate) fn answer<M: Module>(
    model: &M,
    rank: usize,
) -> Result<Option<GradientsParams>, ReducerError> {
    let mut collect = Collect::default();
    traverse(model, &mut collect);
    let refused = |found| ReducerError::NotOneModel { rank, found };
    let Some(session) = collect.session else {
        return Err(refused("is not wrapped"));
    };
    if collect.several {
        return Err(refused("has several of them in it"));
    }
    let answered = session.answer().inspect_err(|error| session.poison(error));
    let Some(gradients) = answered? else {
        return Ok(None);
    };
    let mut collected = GradientsParams::new();
    for (slot, register) in collect.parameters {
        if let Some(gradient) = &gradients[slot] {
            register(&mut collected, gradient.clone());
        }
    }
    Ok(Some(collected))
}

type Register = Box<dyn FnOnce(&mut GradientsParams, TensorData)>;

/// The hooked parameters of a model, as an optimizer knows them.
#[derive(Default)]
struct Collect {
    session: Option<Arc<Session>>,
    /// Hooks of more than one session.
    several: bool,
    /// The parameter that came last, whose hook comes next.
    last: Option<Register>,
    parameters: Vec<(usize, Register)>,
}

impl ModuleVisitor for Collect {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, like) = (param.id, param.base().inner());
        self.last = Some(Box::new(move |grads, gradient| {
            let gradient = Tensor::<D>::from_data(gradient, (&like.device(), like.dtype()));
            grads.register(id, gradient);
        }));
    }

    fn enter_module(&mut self, name: &str, container: &str) {
        // What a hook shows is a stand-in for its parameter.
        if name == ParamHook::NAME
            && container == "Reparameterization"
            && let Some(register) = self.last.take()
        {
            self.parameters.push((usize::MAX, register));
        }
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        if let Some(hook) = last_met()
            && let Some((slot, _)) = self.parameters.last_mut()
        {
            *slot = hook.session.occurrences[hook.occurrence].slot;
            let session = self.session.get_or_insert(hook.session.clone());
            self.several |= !Arc::ptr_eq(session, &hook.session);
        }
    }
}

impl Session {
    /// This rank's part in a round to which it contributes nothing.
    fn answer(&self) -> Result<Option<Vec<Option<TensorData>>>, ReducerError> {
        let mut state = lock(&self.state);
        let state = &mut *state;
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if state.accumulated > 0 {
            return Err(ReducerError::JoinedInWindow {
                rank: self.rank,
                passes: state.accumulated,
            });
        }
        let Some(reducer) = &self.reducer else {
            return Ok(None);
        };
        match &state.round {
            Round::Open { thread, .. } | Round::Closed { thread, .. }
                if *thread != thread::current().id() =>
            {
                let path = self.layout.params[0].path.clone();
                let rank = self.rank;
                return Err(ReducerError::Concurrent { rank, path });
            }
            _ => state.round = Round::Idle,
        }
        // What forward passes without a backward pass have shown says nothing of the others' step.
        for trainable in &mut state.trainable {
            trainable.seen = Seen::Unused;
        }
        let outcome = {
            let mut reducer = lock(reducer);
            reducer.begin(Contribution::default(), state.weight_unit)?;
            reducer.launch_rest()?;
            let outcome = reducer.wait()?;
            // All have run out: not a round of the model's.
            if !outcome.contributions.iter().any(|rank| rank.active) {
                return Ok(None);
            }
            let none = |_: &mut State, _: &mut Reducer, _| Ok(());
            self.settle(state, &mut reducer, outcome, none)?
        };
        let gradients = self.judge(state, outcome);
        self.after_sync(state)?;
        Ok(Some(gradients))
    }
}
