//! Rank 0's side: metrics, dashboard and files. Silent on the others.

use super::{
    exchange::{Exchange, Output, Outputs},
    output::{GatherOutput, Pack, UnpackError},
};
use burn::data::dataloader::Progress;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
    metric::store::Split,
    train::{MultiDeviceStepError, WorkerFailure},
};

/// A split under way, as the dashboard shows it.
pub(super) struct Board {
    split: Split,
    /// Items of all ranks.
    total: usize,
    /// Items that each rank has processed.
    processed: Vec<usize>,
    iteration: usize,
}

impl Board {
    pub(super) fn new(split: Split, total: usize, ranks: usize) -> Self {
        Self {
            split,
            total,
            processed: vec![0; ranks],
            iteration: 0,
        }
    }
}

/// Where outputs become metrics.
pub(super) struct Metrics<M: LearnerModel> {
    pub(super) processor: SupervisedTrainingEventProcessor<M>,
    /// Of the outputs' tensors, without autodiff.
    pub(super) device: Device,
    /// Items of a whole training and validation split, of all ranks.
    pub(super) totals: [usize; 2],
}

impl<M: LearnerModel> Metrics<M>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    pub(super) fn begin(&mut self, exchange: &Exchange, split: Split, epoch: usize) -> Board {
        let train = split == Split::Train;
        let total = self.totals[usize::from(!train)];
        if exchange.is_main() {
            let (epoch_number, total_items) = (epoch, total);
            let result = if train {
                self.processor.process_train(LearnerEvent::StartSplit {
                    epoch_number,
                    total_items,
                })
            } else {
                self.processor.process_valid(LearnerEvent::StartSplit {
                    epoch_number,
                    total_items,
                })
            };
            exchange.interrupter.fail_on_error(result);
        }
        Board::new(split, total, exchange.group.world_size())
    }

    /// Shows the outputs of some steps. `rates` are the learning rates of these steps, if they have any.
    pub(super) fn show(
        &mut self,
        exchange: &Exchange,
        board: &mut Board,
        outputs: Outputs,
        rates: &[ModuleLearningRate],
    ) {
        let steps = outputs.iter().map(Vec::len).max().unwrap_or(0);
        let mut ranks: Vec<_> = outputs.into_iter().map(Vec::into_iter).collect();
        for step in 0..steps {
            let mut packs = Vec::new();
            for (rank, outputs) in ranks.iter_mut().enumerate() {
                if let Some(Output { processed, pack }) = outputs.next() {
                    board.processed[rank] = processed;
                    packs.push(pack);
                }
            }
            board.iteration += 1;
            let rate = rates.get(step).cloned();
            match Pack::merge(packs) {
                Ok(packs) => {
                    for pack in packs {
                        self.show_one(exchange, board, pack, rate.clone());
                    }
                }
                Err(error) => refuse(exchange, error),
            }
        }
    }

    fn show_one(
        &mut self,
        exchange: &Exchange,
        board: &Board,
        pack: Pack,
        rate: Option<ModuleLearningRate>,
    ) {
        let processed = board.processed.iter().sum();
        let progress = Progress::new(processed, board.total, Some("items".to_owned()));
        let (iteration, device) = (Some(board.iteration), &self.device);
        let result = match board.split {
            Split::Train => pack.open(device).map(|item| {
                let item = TrainingItem::new(item, progress, iteration, rate);
                self.processor
                    .process_train(LearnerEvent::ProcessedItem(item))
            }),
            _ => pack.open(device).map(|item| {
                let item = TrainingItem::new(item, progress, iteration, None);
                self.processor
                    .process_valid(LearnerEvent::ProcessedItem(item))
            }),
        };
        match result {
            Ok(result) => exchange.interrupter.fail_on_error(result),
            Err(error) => refuse(exchange, error),
        }
    }

    pub(super) fn end(&mut self, exchange: &Exchange, split: &Split, epoch: usize) {
        if !exchange.is_main() {
            return;
        }
        let event = match split {
            Split::Train => self.processor.process_train(LearnerEvent::EndSplit(epoch)),
            _ => self.processor.process_valid(LearnerEvent::EndSplit(epoch)),
        };
        exchange.interrupter.fail_on_error(event);
    }

    pub(super) fn end_epoch(&mut self, exchange: &Exchange, epoch: usize) {
        let event = self.processor.process_train(LearnerEvent::EndEpoch(epoch));
        exchange.interrupter.fail_on_error(event);
    }

    pub(super) fn flush(&mut self, exchange: &Exchange) {
        exchange.interrupter.fail_on_error(self.processor.flush());
    }
}

fn refuse(exchange: &Exchange, error: UnpackError) {
    let message = error.to_string();
    let device_id = exchange.rank();
    let failure = MultiDeviceStepError::Workers(vec![WorkerFailure { device_id, message }]);
    exchange.interrupter.fail(failure);
}
