//! Burn's door to the training loop.

use super::{
    board::Metrics,
    output::GatherOutput,
    run::{Plan, Run},
};
use crate::{Ddp, WrapConfig};
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerModel, LearningResult,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
    TrainingComponents, ValidLoader,
};

/// The strategy of [`Ddp::strategy`].
pub(super) struct Strategy {
    pub(super) ddp: Ddp,
    pub(super) config: WrapConfig,
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Strategy
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn train(
        &self,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        if self.ddp.is_main() {
            return Main(self).train(learner, dataloader_train, dataloader_valid, components);
        }
        // Nothing is shown or written here: no event reaches this rank's dashboard, metric files or summary.
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let interrupter = components.interrupter.clone();
        let (model, processor) = self.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        );
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        let interrupter = components.interrupter.clone();
        let rank = self.ddp.rank();
        let device = match learner.model().devices().into_iter().next() {
            Some(device) if device.is_autodiff() => device,
            other => other.unwrap_or_default().autodiff(),
        };
        let inner = device.clone().inner();
        let mut run = Run {
            ddp: &self.ddp,
            learner,
            train: dataloader_train.to_device(&device),
            valid: dataloader_valid.to_device(&inner),
            metrics: Metrics {
                processor: components.event_processor,
                device: inner,
                totals: [0; 2],
            },
            window: components.grad_accumulation.unwrap_or(1),
        };
        run.learner.fork(&device);
        let plan = Plan {
            config: self.config.clone(),
            epochs: (starting_epoch, components.num_epochs),
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
            store: components.event_store,
        };
        if let Err(error) = run.epochs(plan, interrupter.clone()) {
            interrupter.fail(error.into_training(rank));
        }
        (run.learner.model(), run.metrics.processor)
    }
}

/// Rank 0, with Burn's own beginning and end of a training.
struct Main<'a>(&'a Strategy);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for Main<'_>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        dataloader_train: TrainLoader<M>,
        dataloader_valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> (M, SupervisedTrainingEventProcessor<M>) {
        self.0.fit(
            components,
            learner,
            dataloader_train,
            dataloader_valid,
            starting_epoch,
        )
    }
}
