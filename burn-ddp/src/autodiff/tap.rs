//! What a backward step knows of its use.

use super::session::Session;
use crate::reducer::Use;
use burn::backend::{
    Backend,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};
use std::sync::Weak;

/// The state of one use, carried by its two backward steps.
///
/// Weak, because Burn's graph is global to the process and may keep steps of a graph that was never run backward: they
/// must not keep the job's connections open. The gradient of a model that is gone has nobody who could collect it.
#[derive(Clone, Debug)]
pub(crate) struct Tap {
    pub(super) session: Weak<Session>,
    pub(super) occurrence: usize,
    pub(super) use_: Use,
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
