//! Where the checkpoints of a job are, and when they are due.

use super::{
    directory::{Directory, Keep},
    load::{self, Checkpoint},
    save,
    snapshot::Snapshot,
};
use crate::{ddp::Ddp, error::Error};
use std::path::Path;

/// The checkpoints of a job; made by [`Ddp::checkpoints`].
///
/// ```no_run
/// # use burn::{lr_scheduler::linear::LinearLrSchedulerConfig, nn::LinearConfig, optim::AdamConfig, prelude::*};
/// # use burn_ddp::{Ddp, train::Snapshot};
/// # fn train(ddp: Ddp, device: Device) -> Result<(), burn_ddp::Error> {
/// let mut model = LinearConfig::new(4, 2).init(&device);
/// let mut optim = AdamConfig::new().init();
/// let mut step = 0;
/// let checkpoints = ddp.checkpoints("checkpoints").every(100).keep_last(3);
/// if let Some(saved) = checkpoints.load()? {
///     model = saved.model("model", model)?; // before `wrap`
///     optim = saved.optimizer("optimizer", optim)?;
///     step = saved.step();
/// }
/// let model = ddp.wrap(model)?;
/// loop {
///     // ... one training step ...
///     step += 1;
///     if checkpoints.is_due(step) {
///         let snapshot = Snapshot::new()
///             .model("model", &model)
///             .optimizer("optimizer", &optim);
///         checkpoints.save(step, snapshot)?;
///     }
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct CheckpointManager {
    ddp: Ddp,
    directory: Directory,
    keep: Keep,
    every: u64,
}

impl CheckpointManager {
    pub(crate) fn new(ddp: Ddp, directory: &Path) -> Self {
        Self {
            ddp,
            directory: Directory::new(directory.into()),
            keep: Keep {
                last: None,
                every: None,
            },
            every: 1,
        }
    }

    /// Makes a checkpoint due at every multiple of `steps`; 0 never. The default is 1.
    pub fn every(mut self, steps: u64) -> Self {
        self.every = steps;
        self
    }

    /// Keeps the newest `count` steps, at least one, and removes older ones after each save. The default keeps all.
    pub fn keep_last(mut self, count: usize) -> Self {
        self.keep.last = Some(count);
        self
    }

    /// Keeps multiples of `steps` too, beside [`keep_last`](Self::keep_last).
    pub fn keep_every(mut self, steps: u64) -> Self {
        self.keep.every = Some(steps).filter(|n| *n > 0);
        self
    }

    /// Whether to save at `step`: a function of the step alone, so that all ranks say the same.
    pub fn is_due(&self, step: u64) -> bool {
        step > 0 && self.every > 0 && step.is_multiple_of(self.every)
    }

    /// Saves `snapshot` as step `step`: when this returns, the step is on rank 0's disk as a whole and is the latest. A step of this number that
    /// is there already is replaced. Collective; blocks while rank 0 writes, however long that takes, without the operation time-out.
    ///
    /// Values of single ranks travel to rank 0 through the group. A save that is killed leaves the steps before it as they are; what it
    /// leaves in the directory is removed by the next save. Two jobs that save into one directory wait for each other.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`](super::CheckpointError), on all ranks: some rank could not encode or write its part, or the ranks save different
    /// things.
    pub fn save(&self, step: u64, snapshot: Snapshot<'_>) -> Result<(), Error> {
        save::save(&self.ddp, &self.directory, self.keep, step, snapshot)
    }

    /// The newest step that is intact: every file has the length and the SHA-256 of its manifest. `None` when nothing was ever saved.
    /// Collective; rank 0 decides and all follow, whatever they see of the directory.
    ///
    /// Saves that did not end and damaged steps are passed over with a warning that names them.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Load`](super::CheckpointError::Load) when there are steps and all are damaged, or the directory cannot be read.
    pub fn load(&self) -> Result<Option<Checkpoint>, Error> {
        load::load(&self.ddp, &self.directory, None)
    }

    /// Step `step`. Collective, like [`load`](Self::load). Later steps stay until training comes there again and replaces them.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Load`](super::CheckpointError::Load) when it is not there or damaged.
    pub fn load_step(&self, step: u64) -> Result<Checkpoint, Error> {
        let found = load::load(&self.ddp, &self.directory, Some(step))?;
        found.ok_or_else(|| load::failed(&self.ddp, format!("there is no step {step}")).into())
    }
}
