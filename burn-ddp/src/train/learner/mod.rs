//! Burn's own learner (burn-train) on several ranks.
//!
//! ```
//! # use burn::{data::{dataloader::DataLoader, dataset::Dataset, dataloader::batcher::Batcher}, optim::{ModuleOptimizer}, tensor::Tensor};
//! # use burn::train::{Learner, LearnerModel, LearningResult, SupervisedTraining, TrainStep, InferenceStep};
//! # use burn_ddp::{Ddp, train::learner::GatherOutput};
//! # use std::sync::Arc;
//! # fn train<M: LearnerModel>(
//! #     ddp: &Ddp, model: M, optimizer: ModuleOptimizer, lr: f64, artifacts: &str,
//! #     train: Arc<dyn DataLoader<<M as TrainStep>::Input>>, valid: Arc<dyn DataLoader<<M as InferenceStep>::Input>>,
//! # ) -> LearningResult<M>
//! # where <M as TrainStep>::Output: GatherOutput, <M as InferenceStep>::Output: GatherOutput {
//! SupervisedTraining::new(artifacts, train, valid) // loaders of `ddp.loader`
//!     .num_epochs(10)
//!     .with_default_checkpointers()
//!     .with_training_strategy(ddp.strategy()) // the one line
//!     .launch(Learner::new(model, optimizer, lr))
//! # }
//! ```
//!
//! Every rank builds the same training and launches it. The strategy wraps the model; rank 0 has the dashboard, the metric files, the
//! summary, checkpoints and early stopping, and the others follow it.
//!
//! # Metrics
//!
//! The outputs of a step, of which metrics are made, go to rank 0 with the agreement that opens the next step. There they become one output:
//! that of one process on the global batch ([`GatherOutput`]). So every metric is exact, whatever it computes,
//! with the samples of padding left out. A loss that the model has averaged over its batch is averaged again, by samples; one sample of
//! padding in it cannot be taken out, so validate with [`Tail::Exact`](crate::data::Tail::Exact), or return losses per sample.
//!
//! It costs two small collectives for each optimizer step and validation batch, which carry the outputs, and reading these from the device: return in them what
//! metrics need (`[batch, classes]` for a classifier), not activations.
//!
//! # Agreement
//!
//! An interrupted rank, a loader's error, a failed metric and early stopping stop all ranks at the same step. Burn panics over a checkpoint that cannot be
//! written: that ends rank 0, and the others hear of its loss.
//! [`LearningResult::error`](burn::train::LearningResult::error) is then the cause on each.
//!
//! # Checkpoints
//!
//! Rank 0 writes them. `checkpoint(n)` is read by Burn before the strategy begins, on every rank, so resuming needs a directory that all ranks see. Loaders
//! continue with the epoch that follows.

mod board;
mod error;
mod exchange;
mod feed;
mod output;
mod run;
mod strategy;

pub use output::{GatherOutput, Pack, Unpack, UnpackError};

use crate::{Ddp, WrapConfig};
use burn::train::{InferenceStep, LearnerModel, TrainStep, TrainingStrategy};
use std::sync::Arc;

impl Ddp {
    /// Trains with Burn's own `SupervisedTraining` on all ranks: `.with_training_strategy(ddp.strategy())`. Local; the `launch` that
    /// it is for is collective, and wraps the model by itself.
    ///
    /// See [`train::learner`](crate::train::learner).
    pub fn strategy<M: LearnerModel>(&self) -> TrainingStrategy<M>
    where
        <M as TrainStep>::Output: GatherOutput,
        <M as InferenceStep>::Output: GatherOutput,
    {
        self.strategy_with(WrapConfig::default())
    }

    /// [`strategy`](Self::strategy) with options of the wrapped model. Local.
    pub fn strategy_with<M: LearnerModel>(&self, config: WrapConfig) -> TrainingStrategy<M>
    where
        <M as TrainStep>::Output: GatherOutput,
        <M as InferenceStep>::Output: GatherOutput,
    {
        TrainingStrategy::Custom(Arc::new(strategy::Strategy {
            ddp: self.clone(),
            config,
        }))
    }
}
