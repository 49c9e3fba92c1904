//! The reparameterization that every float parameter of a wrapped model carries.

use super::{ladder::Ladder, ops, session::Session};
use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Reparameterization,
};
use burn::tensor::{Device, Tensor};
use std::{cell::RefCell, sync::Arc};

/// Identity on the parameter's value; in a training forward it records the steps that take the
/// gradient and give the averaged one back.
///
/// As a [`Module`] it has no parameters, except for a moment: see [`visit`](Module::visit).
#[derive(Clone, Debug)]
pub(crate) struct ParamHook {
    pub(super) session: Arc<Session>,
    pub(super) ladder: Ladder,
    /// Which parameter of the model this is, counted over all fields (tied ones too).
    pub(super) occurrence: usize,
    /// Shared by all clones, which are counted by it.
    pub(super) _alive: Arc<()>,
}

thread_local! {
    /// Who looks for hooks on this thread, and the one that its traversal has met last. A visitor is shown parameters without
    /// their reparameterizations, and a hook does not know what kind of visitor it is shown to.
    static MET: RefCell<Option<Vec<ParamHook>>> = const { RefCell::new(None) };
}

/// The hooks of `model` in the order of a traversal by `visitor`, which may ask for the one it has just met.
pub(super) fn traverse<M: Module, V: ModuleVisitor>(model: &M, visitor: &mut V) {
    MET.set(Some(Vec::new()));
    model.visit(visitor);
    MET.set(None);
}

/// The hook that [`traverse`] has just met.
pub(super) fn last_met() -> Option<ParamHook> {
    MET.with_borrow_mut(|met| met.as_mut()?.pop())
}

impl Reparameterization for ParamHook {
    const NAME: &'static str = "ddp";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        // Evaluation and frozen parameters: nothing is recorded, nothing is sent.
        if !base.is_autodiff() {
            return base;
        }
        if !base.is_require_grad() {
            self.session.saw_frozen(self.occurrence);
            return base;
        }
        let Some((tap, anchor)) = self.session.tap(self.occurrence, &self.ladder) else {
            return base;
        };
        let rung = self.ladder.rung(self.session.rung(self.occurrence));
        ops::tap(base, anchor, rung, tap)
    }
}

impl Module for ParamHook {
    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn fork(self, _: &Device) -> Self {
        self
    }

    fn to_device(self, _: &Device) -> Self {
        self
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    /// Shows the visitor a gradient that has no leaf in this rank's graph.
    ///
    /// A parameter that only other ranks used in the last backward has a reduced gradient here, but no return
    /// step ran that could register it at the parameter's leaf (after an optimizer step the leaf is a new
    /// node that this rank has not seen). It was registered at a [proxy](super::proxy) instead, which is
    /// shown here under the parameter's own id until its value is taken, which is what `GradientsParams::from_grads` does,
    /// or until the next backward pass ends.
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.session.saw_hook(self.occurrence);
        MET.with_borrow_mut(|met| met.iter_mut().for_each(|met| met.push(self.clone())));
        if let Some(proxy) = self.session.pending_proxy(self.occurrence) {
            proxy.show(visitor);
        }
    }

    fn map<M: ModuleMapper>(self, _: &mut M) -> Self {
        self
    }
}

impl ModuleDisplayDefault for ParamHook {
    fn content(&self, content: Content) -> Option<Content> {
        content.optional()
    }
}

impl ModuleDisplay for ParamHook {}
