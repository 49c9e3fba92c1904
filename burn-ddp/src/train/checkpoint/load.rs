//! Loading, as all ranks do it together.

use super::{
    directory::Directory,
    error::CheckpointError,
    files,
    manifest::{Entry, Kind, Manifest},
    mismatch::Shapes,
    transfer,
};
use crate::{
    data::{DistributedLoader, LoaderState},
    ddp::Ddp,
    error::Error,
    reducer::{PowerSgdHook, PowerSgdState},
};
use burn::{
    lr_scheduler::{LrSchedulerRecord, module_lr_scheduler::ModuleLrScheduler},
    module::Module,
    optim::{ModuleOptimizer, OptimizerRecord},
    store::ModuleRecord,
    tensor::Bytes,
};
use serde::de::DeserializeOwned;
use std::{
    fmt::Display,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
};

/// A step that was found intact, on all ranks.
///
/// Its methods that return an entry are collective: rank 0 reads the file, all get the bytes and check their SHA-256. Ask for
/// the same entries in the same order on every rank.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    ddp: Ddp,
    /// On rank 0.
    folder: PathBuf,
    manifest: Manifest,
}

/// Collective. The newest without `step`.
pub(super) fn load(
    ddp: &Ddp,
    directory: &Directory,
    step: Option<u64>,
) -> Result<Option<Checkpoint>, Error> {
    let choose = || match step {
        None => directory.newest_intact(),
        Some(step) => directory.intact(step).map(Some),
    };
    let chosen = match ddp.is_main() {
        true => choose().and_then(|m| m.map(|m| m.to_text()).transpose()),
        false => Ok(None),
    };
    // Rank 0 has read the whole checkpoint.
    ddp.monitored_barrier()?;
    let chosen: Result<Option<String>, String> = ddp.broadcast(chosen)?;
    let Some(text) = chosen.map_err(|cause| failed(ddp, cause))? else {
        return Ok(None);
    };
    let manifest = Manifest::from_text(text.as_bytes()).map_err(|cause| failed(ddp, cause))?;
    Ok(Some(Checkpoint {
        ddp: ddp.clone(),
        folder: directory.step(manifest.step),
        manifest,
    }))
}

pub(super) fn failed(ddp: &Ddp, cause: String) -> CheckpointError {
    let rank = ddp.rank();
    CheckpointError::Load { rank, cause }
}

impl Checkpoint {
    /// The step at which it was saved. Local.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The number of ranks that saved it. Local.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Whether it has an entry of this name. Local.
    pub fn contains(&self, name: &str) -> bool {
        self.manifest.entries.iter().any(|e| e.name == name)
    }

    /// `model` with the saved parameters and buffers, on its own device. Give it to [`Ddp::wrap`](crate::Ddp::wrap) afterwards, not before.
    /// Collective.
    ///
    /// The parameters get the saved ids, by which an optimizer finds its state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; [`CheckpointError::Unfit`] when the model has other parameters or shapes: it names the first one.
    pub fn model<M: Module>(&self, name: &str, model: M) -> Result<M, Error> {
        let bytes = self.entry(name, Kind::Model)?;
        let length = bytes.len();
        // Shared, so that a second reader costs no copy.
        let bytes = Bytes::from_bytes_vec(bytes).shared();
        let view = bytes.view(0, length).unwrap_or_else(|_| bytes.clone());
        let shapes = Shapes::of(&model);
        let record = ModuleRecord::from_bytes(view);
        let loaded = record.and_then(|record| model.try_load_record(record));
        // Burn's own text lists all parameters that differ.
        Ok(loaded.map_err(|e| match shapes.mismatch(bytes) {
            Some(mismatch) => self.unfit(name, mismatch),
            None => self.unfit(name, e),
        })?)
    }

    /// `optimizer` with the saved state. Collective.
    ///
    /// Burn puts the state on [`Device::default`](burn::tensor::Device) and moves it to each parameter's device at the next step. Where that is a GPU all ranks meet on the
    /// first one; set `BURN_DEVICE=flex` to have it on the host until then.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; [`CheckpointError::Unfit`] when the state is another kind of optimizer's.
    pub fn optimizer(
        &self,
        name: &str,
        optimizer: ModuleOptimizer,
    ) -> Result<ModuleOptimizer, Error> {
        let record = self.optimizer_record(name)?;
        let saved = record.len();
        // Burn panics over tensors without an id, or of a rank that it does not know.
        let loaded = catch_unwind(AssertUnwindSafe(|| optimizer.load_record(record)));
        let loaded = loaded.map_err(|_| self.unfit(name, "Burn cannot read this state"))?;
        // And it leaves out what it cannot use.
        let taken = loaded.to_record().len();
        if taken != saved {
            let cause = format!(
                "the optimizer takes {taken} of its {saved} tensors: it was saved by another kind of optimizer, or with other settings"
            );
            return Err(self.unfit(name, cause).into());
        }
        Ok(loaded)
    }

    /// The saved state of an optimizer, plain or divided, for [`ZeroRedundancyOptimizer::load_record`](crate::train::ZeroRedundancyOptimizer::load_record). Collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`].
    pub fn optimizer_record(&self, name: &str) -> Result<OptimizerRecord, Error> {
        let bytes = self.entry(name, Kind::Optimizer)?;
        let record = OptimizerRecord::from_bytes(Bytes::from_bytes_vec(bytes));
        Ok(record.map_err(|e| self.unfit(name, e))?)
    }

    /// `scheduler` with the saved state. Collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; [`CheckpointError::Unfit`] when the state is another kind of scheduler's.
    pub fn scheduler(
        &self,
        name: &str,
        scheduler: ModuleLrScheduler,
    ) -> Result<ModuleLrScheduler, Error> {
        let encode =
            |record: LrSchedulerRecord| record.into_bytes().map_err(|e| self.unfit(name, e));
        let bytes = self.entry(name, Kind::Scheduler)?;
        let record = LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(bytes));
        let record = record.map_err(|e| self.unfit(name, e))?;
        let saved = encode(record.clone())?;
        let before = encode(scheduler.to_record())?;
        let loaded = scheduler.load_record(record);
        // Burn's schedulers leave out what they do not know, without a word.
        let after = encode(loaded.to_record())?;
        if after[..] == before[..] && saved[..] != before[..] {
            let cause =
                "the scheduler takes nothing of it: it was saved by another kind of scheduler";
            return Err(self.unfit(name, cause).into());
        }
        Ok(loaded)
    }

    /// Makes `loader` go on with the first item that had not been consumed, on any number of ranks. Collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; [`DataError::State`](crate::data::DataError::State) when it shuffles by another seed or has fewer items.
    pub fn loader<O: Send + 'static>(
        &self,
        name: &str,
        loader: &DistributedLoader<O>,
    ) -> Result<(), Error> {
        let state: LoaderState = self.value(name)?;
        Ok(loader.restore(&state)?)
    }

    /// A value of the whole job. Collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`]; [`CheckpointError::Unfit`] when it was saved as another type, as far as the encoding shows it.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T, Error> {
        let bytes = self.entry(name, Kind::Value)?;
        self.decode(name, &bytes)
    }

    /// What each rank has saved under this name, in rank order: [`world_size`](Self::world_size) values, whatever the number of ranks is now. Collective.
    ///
    /// # Errors
    ///
    /// As for [`value`](Self::value).
    pub fn rank_values<T: DeserializeOwned>(&self, name: &str) -> Result<Vec<T>, Error> {
        self.each_rank(name).collect()
    }

    /// What the rank of this process's number has saved under this name; `None` when there were fewer ranks. Collective.
    ///
    /// # Errors
    ///
    /// As for [`value`](Self::value).
    pub fn rank_value<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        let mut own = None;
        for rank in 0..self.world_size().min(self.ddp.world_size()) {
            let bytes = self.bytes_of(self.find(name, Kind::Value, Some(rank))?)?;
            if rank == self.ddp.rank() {
                own = Some(bytes);
            }
        }
        own.map(|bytes| self.decode(name, &bytes)).transpose()
    }

    /// Makes `hook` go on with what it had, on any number of ranks. Before the first backward pass. Collective.
    ///
    /// Where the number of ranks has changed, each rank gets the mean of the error memories, which gives the same gradients to rounding.
    ///
    /// # Errors
    ///
    /// As for [`value`](Self::value).
    pub fn power_sgd(&self, name: &str, hook: &PowerSgdHook) -> Result<(), Error> {
        let state = match self.world_size() == self.ddp.world_size() {
            true => self.rank_value(name)?.unwrap_or_default(),
            false => PowerSgdState::mean(self.each_rank(name))?,
        };
        hook.load_state(state);
        Ok(())
    }

    /// What [`Snapshot::bytes`](super::Snapshot::bytes) has saved. Collective.
    ///
    /// # Errors
    ///
    /// [`CheckpointError`].
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>, Error> {
        self.entry(name, Kind::Bytes)
    }

    /// The values of all ranks, one at a time. Each is collective.
    fn each_rank<T: DeserializeOwned>(&self, name: &str) -> impl Iterator<Item = Result<T, Error>> {
        (0..self.world_size()).map(move |rank| {
            let bytes = self.bytes_of(self.find(name, Kind::Value, Some(rank))?)?;
            self.decode(name, &bytes)
        })
    }

    fn entry(&self, name: &str, kind: Kind) -> Result<Vec<u8>, Error> {
        self.bytes_of(self.find(name, kind, None)?)
    }

    fn find(&self, name: &str, kind: Kind, rank: Option<usize>) -> Result<&Entry, CheckpointError> {
        let entries = &self.manifest.entries;
        let found = entries
            .iter()
            .find(|e| e.name == name && e.kind == kind && e.rank == rank);
        found.ok_or_else(|| CheckpointError::Absent {
            rank: self.ddp.rank(),
            step: self.step(),
            kind: match rank {
                Some(_) => "value of each rank",
                None => kind.name(),
            },
            name: name.into(),
            present: self.manifest.describe(),
        })
    }

    /// Rank 0's file on every rank. Collective.
    fn bytes_of(&self, entry: &Entry) -> Result<Vec<u8>, Error> {
        let file = entry.file_name();
        let read = match self.ddp.is_main() {
            true => files::read(&self.folder.join(&file), entry.bytes),
            false => Ok(Vec::new()),
        };
        let (source, outcome) = match read {
            Ok(bytes) if self.ddp.is_main() && bytes.len() as u64 != entry.bytes => (
                Vec::new(),
                Err(format!("{file} has become shorter since it was checked")),
            ),
            Ok(bytes) => (bytes, Ok(())),
            Err(cause) => (Vec::new(), Err(cause)),
        };
        self.ddp.monitored_barrier()?;
        let outcome: Result<(), String> = self.ddp.broadcast(outcome)?;
        outcome.map_err(|cause| failed(&self.ddp, cause))?;
        let mut received = Vec::new();
        transfer::stream(&self.ddp, 0, &source, entry.bytes, |piece| {
            if !self.ddp.is_main() {
                received.extend_from_slice(piece);
            }
        })?;
        let bytes = match self.ddp.is_main() {
            true => source,
            false => received,
        };
        if files::sha256(&bytes) != entry.sha256 {
            let cause = format!("{file} has changed since it was checked (its SHA-256 differs)");
            return Err(failed(&self.ddp, cause).into());
        }
        Ok(bytes)
    }

    fn decode<T: DeserializeOwned>(&self, name: &str, bytes: &[u8]) -> Result<T, Error> {
        match postcard::take_from_bytes(bytes) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => {
                let cause = format!("{} bytes are left over: it is of another type", rest.len());
                Err(self.unfit(name, cause).into())
            }
            Err(error) => Err(self.unfit(name, error).into()),
        }
    }

    fn unfit(&self, name: &str, cause: impl Display) -> CheckpointError {
        CheckpointError::Unfit {
            rank: self.ddp.rank(),
            step: self.step(),
            name: name.into(),
            cause: cause.to_string(),
        }
    }
}
