//! A rank that has run out of data answers the others' rounds until all have.

use super::{
    hook::{ParamHook, last_met, traverse},
    session::{Round, Session, State},
    sessions::lock,
};
use crate::reducer::{Contribution, Reducer, ReducerError};
use burn::{
    module::{Module, ModuleVisitor, Param, Reparameterization},
    optim::GradientsParams,
    tensor::{Tensor, TensorData},
};
use std::sync::Arc;

/// Answers one round of `model`'s reduction without data of this rank's own. Collective. The gradients of the ranks that have data;
/// `None` once no rank has any, or if the model has nobody to wait for.
pub(crate) fn answer<M: Module>(model: &M) -> Result<Option<GradientsParams>, ReducerError> {
    let mut collect = Collect::default();
    traverse(model, &mut collect);
    let Some(session) = collect.session else {
        return Ok(None);
    };
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
            self.session.get_or_insert(hook.session);
        }
    }
}

impl Session {
    /// This rank's part in a round to which it contributes nothing.
    fn answer(&self) -> Result<Option<Vec<Option<TensorData>>>, ReducerError> {
        let Some(reducer) = &self.reducer else {
            return Ok(None);
        };
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
        state.round = Round::Idle;
        let outcome = {
            let mut reducer = lock(reducer);
            reducer.begin(Contribution::default());
            reducer.launch_rest()?;
            let outcome = reducer.wait()?;
            let none = |_: &mut State, _: &mut Reducer, _| Ok(());
            self.settle(state, &mut reducer, outcome, Contribution::default(), none)?
        };
        // All have run out: not a round of the model's.
        if !outcome.contributions.iter().any(|rank| rank.active) {
            return Ok(None);
        }
        let gradients = self.judge(state, outcome);
        self.after_sync(state, gradients.iter().map(Option::is_some))?;
        Ok(Some(gradients))
    }
}
