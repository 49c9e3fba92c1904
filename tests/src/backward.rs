//! Something that happens in the middle of a backward pass.

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
use burn::prelude::*;
use std::fmt;

#[derive(Clone)]
struct Act(fn());

impl fmt::Debug for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Act")
    }
}

#[backend_extension(Flex, Autodiff)]
trait TestOps: Backend {
    fn act(x: FloatTensor<Self>, act: Act) -> FloatTensor<Self> {
        let _ = act;
        x
    }
}

impl TestOps for Flex {}

#[derive(Debug)]
struct Step;

impl<B: Backend> Backward<B, 1> for Step {
    type State = Act;

    fn backward(self, ops: Ops<Act, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        (ops.state.0)();
        let gradient = grads.consume::<B>(&ops.node);
        if let [Some(parent)] = &ops.parents {
            grads.register::<B>(parent.id, gradient);
        }
    }
}

impl<B: Backend + TestOps, C: CheckpointStrategy> TestOps for Autodiff<B, C> {
    fn act(x: FloatTensor<Self>, act: Act) -> FloatTensor<Self> {
        let (value, node) = x.into_parts();
        match Backward::<B, 1>::prepare::<C>(Step, [node]).compute_bound().stateful() {
            OpsKind::Tracked(ops) => ops.finish(act, value),
            OpsKind::UnTracked(ops) => ops.finish(value),
        }
    }
}

/// `x`; `act` runs when a backward pass comes to this place.
pub fn when_backward_comes<const D: usize>(x: Tensor<D>, act: fn()) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as TestOps>::act(x.into_dispatch(), Act(act)))
}
