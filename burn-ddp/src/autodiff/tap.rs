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
    /// The parameter's value in this use, known once the steps are recorded. A clone of the model that has been stepped has
    /// another one.
    pub(super) leaf: Option<NodeId>,
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
    pub(super) fn give_back<B: Backend>(&self, grads: &mut Gradients) {
        if let (Some(session), Some(leaf)) = (self.session.upgrade(), self.leaf)
            && let Err(error) = session.give_back::<B>(self.occurrence, leaf, grads)
        {
            session.fail(error);
        }
    }
}

impl Drop for Tap {
    /// The steps of a backward pass that a panic leaves are dropped while the stack unwinds.
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(session) = self.session.upgrade()
        {
            session.interrupted();
        }
    }
}
