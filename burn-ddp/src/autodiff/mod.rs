//! How gradients leave Burn's backward pass and come back averaged.
//!
//! Models have no backend parameter, so the decorator cannot be a type that the model is generic
//! over. Two public doors of Burn are enough:
//!
//! 1. A [`Reparameterization`](burn::module::Reparameterization), the [hook](hook), is attached to
//!    every trainable parameter. `Param::val()`, which every layer calls in forward, passes the
//!    parameter through it; the stored base stays the leaf that optimizer and record see.
//! 2. A [backend extension](ops) whose implementation for `Autodiff` records two backward steps per
//!    use of a parameter:
//!
//! ```text
//! anchor ──[return step]──[ready step]── the leaf's value, that the layer computes with
//! ```
//!
//! Backward runs the tape by depth, deepest first. The **ready step** takes the gradient of its
//! use and hands it to the [session](session). The **return step** sits at depth 1, above an [anchor](ladder) only,
//! after every ready step of the pass: the first one to run closes the round (the last buckets are launched, all are
//! awaited), then each registers the reduced gradient at its leaf. So `loss.backward()` returns averaged
//! gradients.
//!
//! A ready step would have depth 2 and run last of all, without overlap. Its second parent, an untracked tensor of
//! the [ladder](ladder), lifts it to just below its consumer.

pub(crate) mod attach;
mod buffers;
mod closing;
pub(crate) mod exchange;
mod hook;
pub(crate) mod join;
mod ladder;
pub(crate) mod layers;
mod lost;
pub(crate) mod normalize;
mod ops;
mod passes;
mod proxy;
pub(crate) mod session;
pub(crate) mod sessions;
mod static_graph;
mod store;
mod tap;
mod trainable;

pub(crate) use hook::ParamHook;

#[cfg(test)]
pub(crate) mod tests;
