//! Untracked tensors of growing depth.

use super::ops;
use burn::tensor::{Device, Tensor};
use std::sync::Arc;

/// Depth between two rungs. Burn allocates a list for every depth of a tape, so a rung costs time in each backward pass; where
/// more operations than this lie between the uses of two parameters, a gradient is only taken somewhat later than it could be.
const SPACING: usize = 8;

/// One untracked tensor per parameter, each [`SPACING`] deeper than the one before.
///
/// The order of a node is one more than the highest order among *all* its parents, but an
/// untracked parent is no part of the graph: given as a second parent, a rung lifts a step
/// to a depth and does nothing else.
#[derive(Clone, Debug)]
pub(super) struct Ladder(Arc<[Tensor<1>]>);

impl Ladder {
    /// A ladder of `rungs` rungs on `device`, which has autodiff.
    pub(super) fn new(rungs: usize, device: &Device) -> Self {
        let mut top = Tensor::<1>::zeros([1], device);
        let rung = |_| {
            for _ in 0..SPACING {
                top = ops::lift(top.clone());
            }
            top.clone()
        };
        Self((0..rungs).map(rung).collect())
    }

    /// A new tracked leaf, the parent of return steps.
    ///
    /// Burn keeps every node whose parents no live graph knows in a graph of its own and merges graphs where they meet, which
    /// costs more than all else that the hooks do. Return steps below one anchor are in one graph from the start, and need
    /// no parent more: the leaf that they register a gradient at takes no part in the graph. One that a backward pass has
    /// consumed is still a valid parent, as any leaf is, but gathers nothing.
    pub(super) fn anchor(&self) -> Tensor<1> {
        self.0[0].clone().detach().require_grad()
    }

    pub(super) fn rung(&self, position: usize) -> Tensor<1> {
        self.0[position].clone()
    }
}
