//! The epochs of a training over ranks. Control flow follows from what the ranks have agreed on, never from one rank's own state.

use super::{
    board::Metrics,
    error::LearnerError,
    exchange::{Exchange, Lengths, Output, State, Verdict},
    feed::{Batch, Feed, Place},
    output::{GatherOutput, Pack},
};
use crate::{Ddp, Error, WrapConfig, autodiff::attach::Hooks, error::catch};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::train::{
    CloneEarlyStoppingStrategy, InferenceStep, Interrupter, Learner, LearnerModel,
    LearningCheckpointer, TrainLoader, TrainOutput, TrainStep, ValidLoader,
    metric::store::{EventStoreClient, Split},
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

type TrainInput<M> = <M as TrainStep>::Input;

/// Where a rank stands before the last pass of a window, and the batch for that pass.
type Opened<M> = (State, Option<Batch<TrainInput<M>>>);

/// Steps whose outputs rank 0 has not seen yet. They stay on the device until then, so that it has the time of loading a batch to finish them.
struct Steps<T> {
    outputs: Vec<(Place, Result<T, String>)>,
    rates: Vec<ModuleLearningRate>,
}

impl<T: GatherOutput> Steps<T> {
    fn new() -> Self {
        let (outputs, rates) = (Vec::new(), Vec::new());
        Self { outputs, rates }
    }

    fn push(&mut self, place: Place, output: T) {
        // Lets go of the graph.
        let output = output.sync().map_err(|error| error.to_string());
        self.outputs.push((place, output));
    }

    fn read(&mut self) -> Vec<Output> {
        let read = |(place, output): (Place, _)| Output {
            processed: place.processed,
            pack: Pack::of(output, place.valid),
        };
        self.outputs.drain(..).map(read).collect()
    }
}

/// What is asked for.
pub(super) struct Plan<M: LearnerModel> {
    pub(super) config: WrapConfig,
    /// The first and the last.
    pub(super) epochs: (usize, usize),
    pub(super) checkpointer: Option<LearningCheckpointer<M>>,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub(super) store: Arc<EventStoreClient>,
}

/// A training under way on this rank.
pub(super) struct Run<'a, M: LearnerModel> {
    pub(super) ddp: &'a Ddp,
    /// Holds the plain model; Burn gives no way to put the wrapped one in. Each step hooks a copy.
    pub(super) learner: Learner<M>,
    pub(super) train: TrainLoader<M>,
    pub(super) valid: ValidLoader<M>,
    pub(super) metrics: Metrics<M>,
    /// Batches for one optimizer step.
    pub(super) window: usize,
}

/// What the ranks must have in common, and what they add up.
#[derive(Serialize, Deserialize)]
struct Settings {
    /// Name and value.
    equal: Vec<String>,
    items: [usize; 2],
}

const SETTINGS: [&str; 5] = [
    "the first epoch (of the checkpoint that is resumed, plus 1)",
    "the number of epochs",
    "the length of an accumulation window",
    "whether there are checkpointers",
    "whether there is early stopping",
];

impl<M: LearnerModel> Run<'_, M>
where
    <M as TrainStep>::Output: GatherOutput,
    <M as InferenceStep>::Output: GatherOutput,
{
    pub(super) fn epochs(
        &mut self,
        mut plan: Plan<M>,
        interrupter: Interrupter,
    ) -> Result<(), LearnerError> {
        let group = self.ddp.group().new_group().map_err(Error::from)?;
        let exchange = Exchange { group, interrupter };
        self.agree_on_settings(&exchange, &plan)?;
        let hooks = self.wrap(plan.config.clone())?;
        let (first, last) = plan.epochs;
        // Each pass of a loader is an epoch of its own: those before the first have been.
        for _ in 1..first {
            drop(self.train.iter());
            drop(self.valid.iter());
        }
        for epoch in first..=last {
            let go_on = self.train_epoch(&exchange, &hooks, epoch)?
                && self.valid_epoch(&exchange, epoch)?
                && self.close_epoch(&exchange, &mut plan, epoch)?;
            if !go_on {
                if let (true, Some(stop)) =
                    (exchange.is_main(), exchange.interrupter.interruption())
                {
                    let reason = stop.reason.as_deref().unwrap_or("reason unknown");
                    tracing::info!("training interrupted: {reason}");
                }
                break;
            }
        }
        Ok(())
    }

    fn agree_on_settings(
        &mut self,
        exchange: &Exchange,
        plan: &Plan<M>,
    ) -> Result<(), LearnerError> {
        let (first, last) = plan.epochs;
        let ours = Settings {
            equal: vec![
                first.to_string(),
                last.to_string(),
                self.window.to_string(),
                plan.checkpointer.is_some().to_string(),
                plan.early_stopping.is_some().to_string(),
            ],
            items: [self.train.num_items(), self.valid.num_items()],
        };
        let all = exchange.all(&ours)?;
        let reference = &all[0].equal;
        for (index, what) in SETTINGS.into_iter().enumerate() {
            let differs = |theirs: &Settings| theirs.equal.get(index) != reference.get(index);
            if let Some(peer) = all.iter().position(differs) {
                let value = |rank: usize| all[rank].equal.get(index).cloned().unwrap_or_default();
                return Err(LearnerError::Settings {
                    rank: exchange.rank(),
                    what,
                    peer,
                    theirs: value(peer),
                    reference: value(0),
                });
            }
        }
        let total = |split: usize| all.iter().map(|rank| rank.items[split]).sum();
        self.metrics.totals = [total(0), total(1)];
        Ok(())
    }

    /// Rank 0's model on every rank, and the hooks of it.
    fn wrap(&mut self, config: WrapConfig) -> Result<Hooks, LearnerError> {
        let (model, hooks) = self.ddp.wrap_hooked(self.learner.model(), config)?;
        self.learner.load_model(model.into_record());
        Ok(hooks)
    }

    fn train_epoch(
        &mut self,
        exchange: &Exchange,
        hooks: &Hooks,
        epoch: usize,
    ) -> Result<bool, LearnerError> {
        let mut board = self.metrics.begin(exchange, Split::Train, epoch);
        let loader = self.train.clone();
        let mut feed = Feed::new(&*loader);
        let mut steps = Steps::new();
        let go_on = loop {
            let (state, closing) = self.open_window(exchange, hooks, &mut feed, &mut steps)?;
            let (verdict, gathered) = exchange.agree(state, &steps.read(), Lengths::Equal)?;
            let rates = std::mem::take(&mut steps.rates);
            self.metrics.show(exchange, &mut board, gathered, &rates);
            let batch = match (verdict, closing) {
                (Verdict::Step, Some(batch)) => batch,
                (Verdict::End, _) => break true,
                _ => break false,
            };
            let TrainOutput { grads, item } = self.step(hooks, batch.input)?;
            self.learner.lr_step();
            self.learner.optimizer_step(grads);
            steps.push(batch.place, item);
            steps.rates.push(self.learner.lr_current());
        };
        self.metrics.end(exchange, &Split::Train, epoch);
        Ok(go_on)
    }

    /// Makes the passes of an accumulation window before the closing one, which need no other rank. The batch of that one, if there is one.
    fn open_window(
        &self,
        exchange: &Exchange,
        hooks: &Hooks,
        feed: &mut Feed<'_, TrainInput<M>>,
        steps: &mut Steps<<M as TrainStep>::Output>,
    ) -> Result<Opened<M>, LearnerError> {
        let mut batches = 0;
        loop {
            if let Some(state) = exchange.stopped() {
                return Ok((state, None));
            }
            let batch = match feed.next() {
                None => return Ok((State::Ended, None)),
                Some(Err(error)) => {
                    exchange.interrupter.fail(error);
                    continue;
                }
                Some(Ok(batch)) => batch,
            };
            batches += 1;
            if batches >= self.window || feed.is_last() {
                return Ok((State::Ready { batches }, Some(batch)));
            }
            let guard = self.ddp.no_sync();
            let TrainOutput { item, .. } = self.step(hooks, batch.input)?;
            drop(guard);
            steps.push(batch.place, item);
            steps.rates.push(self.learner.lr_current());
        }
    }

    fn step(
        &self,
        hooks: &Hooks,
        input: TrainInput<M>,
    ) -> Result<TrainOutput<<M as TrainStep>::Output>, LearnerError> {
        let model = hooks.attach(self.learner.model());
        Ok(catch(|| TrainStep::step(&model, input))?)
    }

    fn valid_epoch(&mut self, exchange: &Exchange, epoch: usize) -> Result<bool, LearnerError> {
        let mut board = self.metrics.begin(exchange, Split::Valid, epoch);
        let model = self.learner.model().valid();
        let loader = self.valid.clone();
        let mut feed = Feed::new(&*loader);
        let mut steps = Steps::new();
        let go_on = loop {
            let batch = feed.next();
            let (state, batch) = match batch {
                Some(Ok(batch)) => (State::Ready { batches: 1 }, Some(batch)),
                Some(Err(error)) => {
                    exchange.interrupter.fail(error);
                    (State::Ended, None)
                }
                None => (State::Ended, None),
            };
            let state = exchange.stopped().unwrap_or(state);
            let (verdict, gathered) = exchange.agree(state, &steps.read(), Lengths::Any)?;
            self.metrics.show(exchange, &mut board, gathered, &[]);
            match verdict {
                Verdict::Step => {}
                Verdict::End => break true,
                Verdict::Stop => break false,
            }
            if let Some(Batch { input, place }) = batch {
                steps.push(place, InferenceStep::step(&model, input));
            }
        };
        self.metrics.end(exchange, &Split::Valid, epoch);
        Ok(go_on)
    }

    /// What follows an epoch: rank 0 saves and decides, the others wait and hear.
    fn close_epoch(
        &mut self,
        exchange: &Exchange,
        plan: &mut Plan<M>,
        epoch: usize,
    ) -> Result<bool, LearnerError> {
        if exchange.is_main() {
            self.metrics.end_epoch(exchange, epoch);
            if plan.checkpointer.is_some() || plan.early_stopping.is_some() {
                self.metrics.flush(exchange);
            }
        }
        // Metrics over a whole split may take long.
        exchange.wait()?;
        let state = exchange.stopped().unwrap_or(State::Ended);
        let (verdict, _) = exchange.agree(state, &[], Lengths::Equal)?;
        if verdict == Verdict::Stop {
            return Ok(false);
        }
        let mut stop = false;
        if exchange.is_main() {
            if let Some(checkpointer) = &mut plan.checkpointer {
                checkpointer.checkpoint(&self.learner, epoch, &plan.store);
            }
            if let Some(early_stopping) = &mut plan.early_stopping {
                stop = early_stopping.should_stop(epoch, &plan.store);
            }
        }
        Ok(!exchange.of_main(stop)?)
    }
}
