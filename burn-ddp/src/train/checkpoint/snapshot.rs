//! What is to be saved.

use super::manifest::{Kind, check_name};
use crate::{data::DistributedLoader, reducer::PowerSgdHook};
use burn::{
    lr_scheduler::module_lr_scheduler::ModuleLrScheduler,
    module::Module,
    optim::{ModuleOptimizer, OptimizerRecord},
};
use serde::Serialize;
use std::{
    collections::BTreeSet,
    fmt::{self, Display},
    ops::Deref,
};

/// An encoded entry.
pub(super) type Payload = Box<dyn Deref<Target = [u8]>>;

/// The named entries of a checkpoint, for [`CheckpointManager::save`](super::CheckpointManager::save).
///
/// Nothing is read or encoded before `save`, and then entries of the whole job on rank 0 alone. Names are made of letters, digits, `-` and
/// `_`; the same on all ranks, in the same order.
#[derive(Default)]
#[must_use = "a snapshot does nothing until it is saved"]
pub struct Snapshot<'a> {
    pub(super) parts: Vec<Part<'a>>,
}

pub(super) struct Part<'a> {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) per_rank: bool,
    pub(super) encode: Box<dyn FnOnce() -> Result<Payload, String> + 'a>,
}

impl fmt::Debug for Snapshot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl<'a> Snapshot<'a> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    fn part<B: Deref<Target = [u8]> + 'static, E: Display>(
        mut self,
        (name, kind, per_rank): (&str, Kind, bool),
        encode: impl FnOnce() -> Result<B, E> + 'a,
    ) -> Self {
        self.parts.push(Part {
            name: name.into(),
            kind,
            per_rank,
            encode: Box::new(move || match encode() {
                Ok(bytes) => Ok(Box::new(bytes)),
                Err(error) => Err(error.to_string()),
            }),
        });
        self
    }

    /// Parameters and buffers of `model`, wrapped or not: the same record, bit for bit, that the plain model would give.
    ///
    /// Rank 0's; buffers differ between ranks with [`BufferPolicy::Off`](crate::BufferPolicy::Off) only.
    pub fn model<M: Module>(self, name: &str, model: &'a M) -> Self {
        self.part((name, Kind::Model, false), || {
            // Brings running statistics that another thread updated into the model itself.
            let _ = model.valid();
            model.clone().into_record().into_bytes()
        })
    }

    /// The state of an optimizer.
    pub fn optimizer(self, name: &str, optimizer: &'a ModuleOptimizer) -> Self {
        self.part((name, Kind::Optimizer, false), || optimizer.into_bytes())
    }

    /// The state of an optimizer as a record: that of a [`ZeroRedundancyOptimizer`](crate::train::ZeroRedundancyOptimizer), which its `to_record` gathers on
    /// rank 0. The other ranks' is not looked at. A plain optimizer can load it too.
    pub fn optimizer_record(self, name: &str, record: Option<OptimizerRecord>) -> Self {
        self.part((name, Kind::Optimizer, false), || match record {
            Some(record) => record.into_bytes().map_err(|error| error.to_string()),
            None => Err("rank 0 has no record of the optimizer".into()),
        })
    }

    /// The state of a learning-rate scheduler, as `init` of any scheduler's configuration gives it.
    pub fn scheduler(self, name: &str, scheduler: &'a ModuleLrScheduler) -> Self {
        self.part((name, Kind::Scheduler, false), || {
            scheduler.to_record().into_bytes()
        })
    }

    /// The position of a loader: seed, epoch, and items that all ranks together have consumed. Any number of ranks can go on from it.
    pub fn loader<O: Send + 'static>(self, name: &str, loader: &'a DistributedLoader<O>) -> Self {
        self.part((name, Kind::Value, false), || encode(&loader.state()))
    }

    /// A value of the whole job: rank 0's.
    pub fn value<T: Serialize + ?Sized>(self, name: &str, value: &'a T) -> Self {
        self.part((name, Kind::Value, false), || encode(value))
    }

    /// A value of each rank: a random generator, the state of a comm hook of your own.
    pub fn rank_value<T: Serialize + ?Sized>(self, name: &str, value: &'a T) -> Self {
        self.part((name, Kind::Value, true), || encode(value))
    }

    /// What a [`PowerSgdHook`] keeps, of each rank: the reduction goes on with the same bits on as many ranks, and to rounding on others.
    pub fn power_sgd(self, name: &str, hook: &'a PowerSgdHook) -> Self {
        self.part((name, Kind::Value, true), || encode(&hook.state()))
    }

    /// Bytes of the whole job, made on rank 0 alone; for records that have no method here.
    pub fn bytes<B: Deref<Target = [u8]> + 'static, E: Display>(
        self,
        name: &str,
        make: impl FnOnce() -> Result<B, E> + 'a,
    ) -> Self {
        self.part((name, Kind::Bytes, false), make)
    }

    /// Names are file names, so two that differ in case alone are the same on some systems.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut seen = BTreeSet::new();
        for part in &self.parts {
            check_name(&part.name)?;
            if !seen.insert(part.name.to_ascii_lowercase()) {
                return Err(format!("two entries are named `{}`", part.name));
            }
        }
        Ok(())
    }

    pub(super) fn describe(&self) -> String {
        let part = |part: &Part<'_>| {
            let each = if part.per_rank { " of each rank" } else { "" };
            format!("{} `{}`{each}", part.kind.name(), part.name)
        };
        self.parts.iter().map(part).collect::<Vec<_>>().join(", ")
    }
}

/// Exact for floats, which JSON is not.
fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_stdvec(value)
}
