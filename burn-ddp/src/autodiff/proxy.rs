//! Stand-ins for leaves that a backward pass did not reach.

use super::ops;
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};
use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// A tiny tensor that requires gradients and carries the id of a parameter, so that whoever collects
/// gradients by visiting parameters collects the one registered at [`node`](Self::node) for that parameter.
#[derive(Clone, Debug)]
pub(super) struct Proxy {
    /// A `Param<Tensor<D>>` for the `D` in `rank`.
    param: Arc<dyn Any + Send + Sync>,
    rank: usize,
    node: NodeId,
    /// A gradient is registered at `node` and has not been taken.
    pending: Arc<AtomicBool>,
}

impl Proxy {
    /// For the parameter `id` of rank `D` on `device`, which has autodiff.
    pub(super) fn new<const D: usize>(id: ParamId, device: &Device) -> Option<Self> {
        let leaf = Tensor::<D>::zeros([1; D], device).require_grad();
        let node = ops::node(&leaf)?;
        let pending = Arc::new(AtomicBool::new(false));
        let mark = TakenMark {
            pending: pending.clone(),
        };
        let param = Param::initialized(id, leaf).apply_reparameterization(Attach(mark));
        Some(Self {
            param: Arc::new(param),
            rank: D,
            node,
            pending,
        })
    }

    pub(super) fn node(&self) -> NodeId {
        self.node
    }

    pub(super) fn set_pending(&self, pending: bool) {
        self.pending.store(pending, Ordering::Relaxed);
    }

    pub(super) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    pub(super) fn show<V: ModuleVisitor>(&self, visitor: &mut V) {
        macro_rules! show {
            ($($rank:literal)*) => {
                match self.rank {
                    $($rank => {
                        if let Some(param) = self.param.downcast_ref::<Param<Tensor<$rank>>>() {
                            visitor.visit_float(param);
                        }
                    })*
                    _ => {}
                }
            };
        }
        show!(0 1 2 3 4 5 6 7 8);
    }
}

/// Notices that the value of a proxy is taken.
#[derive(Module, Debug)]
struct TakenMark {
    #[module(skip)]
    pending: Arc<AtomicBool>,
}

impl Reparameterization for TakenMark {
    const NAME: &'static str = "ddp";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        self.pending.store(false, Ordering::Relaxed);
        base
    }
}

struct Attach(TakenMark);

impl Reparameterizer for Attach {
    type Reparam = TakenMark;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<TakenMark>) {
        (param, Some(self.0.clone()))
    }
}
