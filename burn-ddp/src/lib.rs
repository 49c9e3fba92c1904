//! Data-parallel training for [Burn](https://burn.dev): one process per device, gradients averaged
//! while backward is still running.
//!
//! ```
//! use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, prelude::*};
//! use burn_ddp::Ddp;
//!
//! fn main() -> Result<(), burn_ddp::Error> {
//!     burn_ddp::launch(train) // starts BURN_DDP_NPROC processes, or joins those that something else started
//! }
//!
//! fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
//!     let device = ddp.device(Device::flex())?.autodiff();
//!     let mut model = ddp.wrap(LinearConfig::new(4, 2).init(&device))?; // the one line
//!     let mut optim = SgdConfig::new().init();
//!     for _ in 0..3 {
//!         let x = Tensor::<2>::ones([8, 4], &device); // this rank's share of the batch
//!         let loss = model.forward(x).powf_scalar(2.0).mean();
//!         let grads = GradientsParams::from_grads(loss.backward(), &model); // averaged over ranks
//!         model = optim.step(0.1, model, grads);
//!     }
//!     ddp.check_replicas(&model) // every rank holds the same bits
//! }
//! ```
//!
//! The model's type does not change, its code does not change, the loop does not change. Every rank ends every step with the
//! same bits, and with the weights that one process would have reached on the concatenated batch (dropout aside, and
//! batch normalization unless it is [synchronised](train::SyncBatchNorm), which see each rank's own part of it).
//!
//! # Where things are
//!
//! - [`launch()`] and [`Launcher`] start the ranks of one machine; [`Ddp`] is what a rank holds.
//! - [`Ddp::wrap`] makes a model data-parallel, [`Ddp::no_sync`] accumulates, [`try_backward`] turns a failed reduction into an error.
//! - [`data`] shards data sets over ranks.
//! - [`train`] has what surrounds the gradient.
//! - [`group`] has the collectives underneath, usable by themselves.
//!
//! Data flows one way: the hooks catch gradients, the reducer puts them into buckets, a process group reduces the buckets.
//!
//! # One process per rank
//!
//! Ranks are processes. Several threads of one process that run backward at the same time can lose gradients inside Burn's autodiff
//! (tracel-ai/burn#5573). A gradient that is missed while they do is an error, [`ReducerError::LostGradient`].

mod autodiff;
mod config;
pub mod data;
mod ddp;
mod dtype;
mod encoding;
mod error;
pub mod group;
pub mod launch;
mod notice;
mod reducer;
mod replica;
mod step;
pub mod train;

pub use config::{BufferPolicy, NonFinitePolicy, Reduction, WrapConfig};
pub use ddp::{Ddp, NoSync, Stats};
pub use error::{BackwardPanic, Error, try_backward};
pub use group::ReduceOp;
pub use launch::{Launcher, launch};
pub use reducer::{
    BucketParam, BucketTrace, CommHook, CompressHook, GradBucket, NonFinite, PowerSgdHook,
    PowerSgdState, ReducerError, RoundTrace,
};
