//! A point in a graph at which a test can look around while backward passes by.

use burn::backend::{
    Autodiff, Backend, Dispatch, Flex,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;
use std::{fmt, sync::Arc};

/// The identity; `passed` runs in backward after everything that follows `x` in forward and before
/// everything that comes before it.
pub fn mark<const D: usize>(x: Tensor<D>, passed: impl Fn() + Send + Sync + 'static) -> Tensor<D> {
    let watch = Watch(Arc::new(passed));
    Tensor::from_dispatch(<Dispatch as MarkOps>::mark(x.into_dispatch(), watch))
}

#[derive(Clone)]
pub(crate) struct Watch(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

#[backend_extension(Flex, Autodiff)]
pub(crate) trait MarkOps: Backend {
    fn mark(x: FloatTensor<Self>, watch: Watch) -> FloatTensor<Self>;
}

impl MarkOps for Flex {
    fn mark(x: FloatTensor<Self>, _: Watch) -> FloatTensor<Self> {
        x
    }
}

impl<B: Backend + MarkOps, C: CheckpointStrategy> MarkOps for Autodiff<B, C> {
    fn mark(x: FloatTensor<Self>, watch: Watch) -> FloatTensor<Self> {
        let (value, node) = x.into_parts();
        match Backward::<B, 1>::prepare::<C>(Mark, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish(watch, value),
            OpsKind::UnTracked(ops) => ops.finish(value),
        }
    }
}

#[derive(Debug)]
struct Mark;

impl<B: Backend> Backward<B, 1> for Mark {
    type State = Watch;

    fn backward(self, ops: Ops<Watch, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        (ops.state.0)();
        if let [Some(parent)] = &ops.parents {
            grads.register::<B>(parent.id, gradient);
        }
    }
}
