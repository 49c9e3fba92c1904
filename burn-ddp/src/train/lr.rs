//! The learning rate for a larger batch.

use burn::lr_scheduler::{LrScheduler, LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler};
use burn::optim::LearningRate;
use std::fmt;

/// A learning-rate schedule made for one process, for a batch `factor` times as large: the linear scaling rule with gradual warm-up
/// (Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, sections 2.1 and 2.2).
///
/// `wrap` averages the gradients, so a schedule means the same on any number of ranks; but with the same batch per rank, one step
/// stands for `world_size` times as many samples. The rule makes it as much longer. At once that may be too much for a model
/// that changes quickly: over the warm-up steps the multiple grows from 1 to `factor` in equal parts, while the schedule goes on underneath.
///
/// One [`step`](LrScheduler::step) of a scheduler is one optimizer step, whatever the number of ranks: call it where the optimizer is called.
///
/// Burn scales all groups of a [`ModuleLrScheduler`] by themselves; this takes its base schedule. To scale the others too give each group a `LinearScaling` of its own.
#[derive(Clone)]
pub struct LinearScaling {
    schedule: ModuleLrScheduler,
    factor: f64,
    warm_up: usize,
    /// Optimizer steps made.
    steps: usize,
}

impl fmt::Debug for LinearScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinearScaling")
            .field("factor", &self.factor)
            .field("warm_up", &self.warm_up)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}

impl LinearScaling {
    /// `factor` times the rate of `schedule`, a scheduler of Burn's or a constant rate. The factor is the batch of a step in units of the batch that the
    /// schedule was made for: usually [`Ddp::world_size`](crate::Ddp::world_size), times the passes that are accumulated.
    pub fn new(schedule: impl Into<ModuleLrScheduler>, factor: f64) -> Self {
        Self {
            schedule: schedule.into(),
            factor,
            warm_up: 0,
            steps: 0,
        }
    }

    /// Reaches the full multiple after `steps` optimizer steps (default 0, at once); the paper takes those of five epochs.
    pub fn with_warm_up(mut self, steps: usize) -> Self {
        self.warm_up = steps;
        self
    }

    fn multiple(&self) -> f64 {
        if self.steps >= self.warm_up {
            return self.factor;
        }
        1.0 + (self.factor - 1.0) * self.steps as f64 / self.warm_up as f64
    }
}

impl LrScheduler for LinearScaling {
    fn step(&mut self) -> LearningRate {
        let rate = self.schedule.step().base() * self.multiple();
        self.steps += 1;
        rate
    }

    /// The position, but not the factor: a run that is resumed on another number of ranks is scaled for that.
    fn to_record(&self) -> LrSchedulerRecord {
        LrSchedulerRecord::new()
            .with_scalar("steps", self.steps)
            .with_record("schedule", self.schedule.to_record())
    }

    fn load_record(&mut self, record: LrSchedulerRecord) {
        if let Some(steps) = record.scalar("steps") {
            self.steps = steps;
        }
        self.schedule = self.schedule.clone().load_record(record.record("schedule"));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use burn::lr_scheduler::step::StepLrSchedulerConfig;

    fn rates(scheduler: &mut LinearScaling, steps: usize) -> Vec<f64> {
        (0..steps).map(|_| scheduler.step()).collect()
    }

    #[test]
    fn the_multiple_grows_by_the_same_amount_per_step() {
        let mut scheduler = LinearScaling::new(0.5, 4.0).with_warm_up(3);
        assert_eq!(rates(&mut scheduler, 6), [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]);
    }

    #[test]
    fn without_warm_up_the_full_multiple_holds_at_once() {
        assert_eq!(rates(&mut LinearScaling::new(0.25, 8.0), 2), [2.0, 2.0]);
    }

    /// 1 1 | 0.5 0.5 | 0.25 0.25 underneath, times 1, 1.5, 2, 2.
    #[test]
    fn ddp_08_the_schedule_goes_on_under_the_warm_up_and_is_resumed() {
        let schedule = StepLrSchedulerConfig::new(1.0, 2).with_gamma(0.5);
        let new = || LinearScaling::new(schedule.init().unwrap(), 2.0).with_warm_up(2);
        let mut scheduler = new();
        assert_eq!(rates(&mut scheduler, 3), [1.0, 1.5, 1.0]);
        let bytes = scheduler.to_record().into_bytes().unwrap();
        let mut resumed = new();
        resumed.load_record(LrSchedulerRecord::from_bytes(bytes).unwrap());
        for scheduler in [&mut scheduler, &mut resumed] {
            assert_eq!(rates(scheduler, 3), [1.0, 0.5, 0.5]);
        }
        // On four times as many ranks.
        let bytes = new().to_record().into_bytes().unwrap();
        let mut other = LinearScaling::new(schedule.init().unwrap(), 8.0);
        other.load_record(LrSchedulerRecord::from_bytes(bytes).unwrap());
        assert_eq!(rates(&mut other, 1), [8.0]);
    }
}
