//! The backend extension: identities that record backward steps.

use super::tap::Tap;
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;
use std::{
    any::Any,
    sync::{Arc, OnceLock},
};

/// Receives a node's identifier from the backend extension.
pub(crate) type NodeCell = Arc<OnceLock<NodeId>>;

/// Receives the `B::Device` of a tensor.
pub(crate) type DeviceCell = Arc<OnceLock<Box<dyn Any + Send + Sync>>>;

/// Identity operations; on `Autodiff` each records (or reports) something.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(any(feature = "wgpu", feature = "cuda")), Autodiff)]
pub(crate) trait DdpOps: Backend {
    /// One rung higher: an untracked tensor whose order is one more than that of `x`.
    fn ddp_lift(x: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }

    /// Tells the node of `x`.
    fn ddp_node(x: FloatTensor<Self>, cell: NodeCell) -> FloatTensor<Self> {
        let _ = cell;
        x
    }

    /// Tells the device of `x`.
    fn ddp_device(x: FloatTensor<Self>, cell: DeviceCell) -> FloatTensor<Self> {
        let _ = cell.set(Box::new(x.device()));
        x
    }

    /// Records the return step, whose parent is `anchor`, and the ready step, as deep as `rung`, of one use of the leaf `x`.
    fn ddp_tap(
        x: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rung: FloatTensor<Self>,
        tap: Tap,
    ) -> FloatTensor<Self> {
        let _ = (anchor, rung, tap);
        x
    }
}

#[cfg(feature = "flex")]
impl DdpOps for burn::backend::Flex {}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl DdpOps for burn::backend::Cube {}

#[derive(Debug)]
struct Lift;

impl<B: Backend> Backward<B, 1> for Lift {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        // Rungs are untracked: no tape ever holds this step.
    }
}

#[derive(Debug)]
struct Return;

impl<B: Backend> Backward<B, 1> for Return {
    type State = Tap;

    fn backward(self, ops: Ops<Tap, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        ops.state.give_back::<B>(grads);
    }
}

#[derive(Debug)]
struct Ready;

impl<B: Backend> Backward<B, 2> for Ready {
    type State = Tap;

    fn backward(self, ops: Ops<Tap, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        ops.state.take::<B>(gradient);
    }
}

impl<B: Backend + DdpOps, C: CheckpointStrategy> DdpOps for Autodiff<B, C> {
    fn ddp_lift(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let (value, node) = x.into_parts();
        match Backward::<B, 1>::prepare::<C>(Lift, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish((), value),
            OpsKind::UnTracked(ops) => ops.finish(value),
        }
    }

    fn ddp_node(x: FloatTensor<Self>, cell: NodeCell) -> FloatTensor<Self> {
        // A cell that is filled already keeps its first node.
        let _ = cell.set(x.id());
        x
    }

    fn ddp_tap(
        x: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rung: FloatTensor<Self>,
        mut tap: Tap,
    ) -> FloatTensor<Self> {
        tap.leaf = Some(x.id());
        let value = x.into_primitive();
        let (_, node) = anchor.into_parts();
        let x = match Backward::<B, 1>::prepare::<C>(Return, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish(tap.clone(), value),
            OpsKind::UnTracked(ops) => ops.finish(value),
        };
        let (value, node) = x.into_parts();
        let (_, rung) = rung.into_parts();
        match Backward::<B, 2>::prepare::<C>(Ready, [node, rung])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish(tap, value),
            OpsKind::UnTracked(ops) => ops.finish(value),
        }
    }
}

/// [`DdpOps::ddp_lift`] on a tensor.
pub(super) fn lift(x: Tensor<1>) -> Tensor<1> {
    Tensor::from_dispatch(<Dispatch as DdpOps>::ddp_lift(x.into_dispatch()))
}

/// The autodiff node of a tensor; `None` without autodiff.
pub(super) fn node<const D: usize>(x: &Tensor<D>) -> Option<NodeId> {
    let cell = NodeCell::default();
    let _ = <Dispatch as DdpOps>::ddp_node(x.clone().into_dispatch(), cell.clone());
    cell.get().copied()
}

/// The device of a tensor, as its backend knows it.
pub(super) fn device<const D: usize>(x: &Tensor<D>) -> DeviceCell {
    let cell = DeviceCell::default();
    let _ = <Dispatch as DdpOps>::ddp_device(x.clone().into_dispatch(), cell.clone());
    cell
}

/// Records the two steps of one use of a leaf and returns the value to compute with.
pub(super) fn tap<const D: usize>(
    leaf: Tensor<D>,
    anchor: Tensor<1>,
    rung: Tensor<1>,
    tap: Tap,
) -> Tensor<D> {
    let (leaf, anchor, rung) = (
        leaf.into_dispatch(),
        anchor.into_dispatch(),
        rung.into_dispatch(),
    );
    Tensor::from_dispatch(<Dispatch as DdpOps>::ddp_tap(leaf, anchor, rung, tap))
}
