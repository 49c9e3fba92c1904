//! The handle that a training script holds.

mod collectives;
mod stats;

pub use stats::Stats;

use crate::{
    autodiff::{
        attach::{self, Hooks, WrapContext},
        gather::Gather,
        sessions::{Sessions, SyncSwitch},
    },
    config::WrapConfig,
    data::LoaderBuilder,
    error::Error,
    group::{
        GroupError, ProcessGroup,
        host::{HostGroup, Rendezvous},
    },
    replica,
    train::checkpoint::CheckpointManager,
};
use burn::data::{dataloader::batcher::Batcher, dataset::Dataset};
use burn::module::Module;
use burn::tensor::Device;
use std::{
    path::Path,
    sync::{Arc, Weak},
};

/// This process's membership in a data-parallel job.
///
/// Cheap to clone. Methods marked *collective* must be called by all ranks in the same order; they block until all have
/// come, a peer failed, or the operation time-out passed, and then return [`Error::Group`]. They have an order of their own: a metric reduced between
/// forward and backward never meets a gradient.
#[derive(Clone, Debug)]
pub struct Ddp {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    local_rank: usize,
    local_world_size: usize,
    /// Orders `wrap` calls.
    root: Arc<dyn ProcessGroup>,
    /// Orders the user's collectives.
    group: Arc<dyn ProcessGroup>,
    switch: Arc<SyncSwitch>,
    sessions: Arc<Sessions>,
}

impl Ddp {
    /// Joins the job that the environment describes (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, or the
    /// variables of Open MPI, Hydra or Slurm); a job of one without them. Collective; blocks until all ranks have come or the rendezvous time-out has passed.
    ///
    /// [`launch`](crate::launch()) calls it; call it yourself in a program that something else starts.
    ///
    /// # Errors
    ///
    /// [`Error::Settings`] when a variable is missing or wrong, [`Error::Rendezvous`] when the ranks do not find together.
    pub fn from_env() -> Result<Self, Error> {
        #[cfg(feature = "mpi")]
        if let Some(group) = crate::group::mpi::join()? {
            return Self::from_mpi(group);
        }
        match Rendezvous::from_env()? {
            Some(settings) => Self::connect(settings),
            None => Self::connect(Rendezvous::new(0, 1, "127.0.0.1", 0)?),
        }
    }

    /// Joins the job that `settings` describe. Collective; blocks until all ranks have come or the rendezvous time-out has passed.
    ///
    /// # Errors
    ///
    /// [`Error::Rendezvous`] when the ranks do not find together.
    pub fn connect(settings: Rendezvous) -> Result<Self, Error> {
        let group = HostGroup::connect(settings)?;
        let (rank, size) = (group.local_rank(), group.local_world_size());
        Self::from_group(Arc::new(group), rank, size)
    }

    /// Joins through MPI. Collective.
    ///
    /// [`from_env`](Self::from_env) does it by itself in a process that mpirun has started.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] when the peers do not make the same call.
    #[cfg(feature = "mpi")]
    pub fn from_mpi(group: crate::group::mpi::MpiGroup) -> Result<Self, Error> {
        let (rank, size) = (group.local_rank(), group.local_world_size());
        Self::from_group(Arc::new(group), rank, size)
    }

    /// Joins through an existing process group. Collective.
    ///
    /// `local_rank` and `local_world_size` are this process's position among the ranks of its machine and their number.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] when the peers do not make the same call.
    pub fn from_group(
        group: Arc<dyn ProcessGroup>,
        local_rank: usize,
        local_world_size: usize,
    ) -> Result<Self, Error> {
        let (root, group) = (group.clone(), group.new_group()?);
        Ok(Self {
            inner: Arc::new(Inner {
                local_rank,
                local_world_size,
                root,
                group,
                switch: Arc::default(),
                sessions: Arc::default(),
            }),
        })
    }

    /// This process's number in the job, `0..world_size`.
    pub fn rank(&self) -> usize {
        self.inner.root.rank()
    }

    /// Number of processes in the job.
    pub fn world_size(&self) -> usize {
        self.inner.root.world_size()
    }

    /// This process's number among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.inner.local_rank
    }

    /// Number of the job's processes on this machine.
    pub fn local_world_size(&self) -> usize {
        self.inner.local_world_size
    }

    /// Whether this is global rank 0, which logs and saves.
    pub fn is_main(&self) -> bool {
        self.rank() == 0
    }

    /// The group that carries the user's collectives, for operations on raw bytes.
    pub fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.inner.group
    }

    /// The failure that has ended the job, if any; costs an atomic load. Local.
    pub fn failure(&self) -> Option<GroupError> {
        self.inner.root.failure()
    }

    /// Ends the job: every pending and later operation on every rank fails with an error that carries `reason`. Never blocks.
    pub fn abort(&self, reason: &str) {
        self.inner.root.abort(reason);
    }

    pub(crate) fn downgrade(&self) -> Weak<dyn ProcessGroup> {
        Arc::downgrade(&self.inner.root)
    }

    pub(crate) fn switch(&self) -> &SyncSwitch {
        &self.inner.switch
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.inner.sessions
    }

    /// How layers exchange statistics with the other ranks. The first call is collective.
    pub(crate) fn gather(&self) -> Result<Gather, Error> {
        let inner = &self.inner;
        let new = || {
            let group = inner.root.new_group()?;
            Ok(Gather::new(group, inner.switch.clone(), &inner.sessions))
        };
        Ok(inner.sessions.gather(new)?)
    }

    /// A loader of this rank's shard of `dataset`, reshuffled each epoch by itself; see [`LoaderBuilder`]. Its `build` is collective.
    pub fn loader<I, O>(
        &self,
        dataset: impl Dataset<I> + 'static,
        batcher: impl Batcher<I, O> + 'static,
    ) -> LoaderBuilder<I, O>
    where
        I: 'static,
        O: Send + 'static,
    {
        LoaderBuilder::new(Some(self.inner.group.clone()), dataset, batcher)
    }

    /// The device of this rank, given the kind of device to train on: for CUDA the one with this process's local rank, otherwise `base` itself.
    ///
    /// # Errors
    ///
    /// [`Error::Device`] when the machine has fewer CUDA devices than ranks.
    pub fn device(&self, base: Device) -> Result<Device, Error> {
        #[cfg(feature = "cuda")]
        {
            let cuda: Vec<Device> = Device::enumerate(burn::tensor::DeviceType::Cuda).into_vec();
            if cuda.contains(&base) {
                let local_rank = self.local_rank();
                let found = cuda.len();
                return cuda.into_iter().nth(local_rank).ok_or_else(|| Error::Device {
                    rank: self.rank(),
                    local_rank,
                    cause: format!(
                        "this machine shows {found} CUDA device(s): start at most that many ranks on it, or make more visible with CUDA_VISIBLE_DEVICES"
                    ),
                });
            }
        }
        Ok(base)
    }

    /// Makes `model` data-parallel: rank 0's parameters and buffers on every rank, and from now on `backward` returns gradients
    /// averaged over the ranks. Collective.
    ///
    /// The type does not change, nor do its code, the loop, its records or its printed form. A forward pass without
    /// gradients (`model.valid()`, frozen parameters) communicates nothing. Any number of models can be
    /// wrapped, in the same order on every rank. Clones made before stay unwrapped.
    ///
    /// Load records before: Burn gives a loaded parameter the record's id, and a model loaded after `wrap` cannot train on when it has tied fields
    /// or parameters that a rank does not use in every pass ([`ReducerError::Reloaded`](crate::ReducerError::Reloaded)).
    ///
    /// A parameter that a rank's loss does not reach counts as zero there, but every rank's loss must reach some parameter of the model in
    /// each backward pass that synchronises: a rank whose graph does not touch the model at all is waited for.
    ///
    /// Collect gradients (`GradientsParams::from_grads`) right after `backward`. In between the model shows those that other ranks
    /// alone produced to every traversal, so a record taken just there, or another look at the values, takes them away.
    ///
    /// Fields that share one parameter (tied weights) are reduced once and receive the same gradient, so that they stay equal
    /// under any optimizer; all but the first get a [`ParamId`](burn::module::ParamId) of their own for that.
    ///
    /// # Errors
    ///
    /// [`Error::ModelMismatch`] names the first parameter in which the ranks differ. [`Error::ForeignReparameterization`], [`Error::NothingToTrain`],
    /// [`Error::UnsupportedType`]: the model cannot be wrapped as it is.
    pub fn wrap<M: Module + 'static>(&self, model: M) -> Result<M, Error> {
        self.wrap_with(model, WrapConfig::default())
    }

    /// [`wrap`](Self::wrap) with options. Collective.
    ///
    /// # Errors
    ///
    /// As for `wrap`.
    pub fn wrap_with<M: Module + 'static>(&self, model: M, config: WrapConfig) -> Result<M, Error> {
        Ok(self.wrap_hooked(model, config)?.0)
    }

    /// The wrapped model and its hooks. Collective.
    pub(crate) fn wrap_hooked<M: Module + 'static>(
        &self,
        model: M,
        config: WrapConfig,
    ) -> Result<(M, Hooks), Error> {
        let context = WrapContext {
            group: &self.inner.root,
            switch: &self.inner.switch,
            sessions: &self.inner.sessions,
            config,
        };
        attach::wrap(model, &context)
    }

    /// The plain model, without hooks; local. Any other reparameterization (LoRA) is merged into its parameter.
    ///
    /// What is trained through it is trained on this rank alone: wrap it again for that. To evaluate, `valid()` is enough.
    pub fn unwrap<M: Module>(&self, model: M) -> M {
        model.materialize()
    }

    /// Until the guard is dropped, backward passes of this process accumulate locally: `backward` returns no gradient for wrapped
    /// models, and the first one after the guard reduces and returns the sum over the whole window (its mean over ranks).
    ///
    /// What counts is whether a guard is alive when `backward` begins. Guards nest. All ranks must accumulate the same number of passes; the closing
    /// backward checks it.
    pub fn no_sync(&self) -> NoSync {
        self.inner.switch.hold();
        NoSync {
            switch: self.inner.switch.clone(),
        }
    }

    /// Runs `f` under [`no_sync`](Self::no_sync).
    pub fn without_sync<R>(&self, f: impl FnOnce() -> R) -> R {
        let _guard = self.no_sync();
        f()
    }

    /// One SHA-256 over all parameters and buffers of `model` per rank, in rank order, hexadecimal. Collective.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`Error::Read`] when a tensor cannot be read from its device.
    pub fn param_hashes<M: Module>(&self, model: &M) -> Result<Vec<String>, Error> {
        self.all_gather(&replica::hash(model, self.rank())?)
    }

    /// Checks that all ranks hold the same bits. Collective; reads the whole model.
    ///
    /// # Errors
    ///
    /// [`Error::ReplicasDiffer`] names the first parameter or buffer that does not agree, on every rank.
    pub fn check_replicas<M: Module>(&self, model: &M) -> Result<(), Error> {
        replica::check(model, &*self.inner.group)
    }

    /// Replaces the float buffers of `model` (batch norm's running statistics) by their mean over ranks. Collective.
    ///
    /// With [`BufferPolicy::Off`](crate::BufferPolicy::Off) each rank's running statistics are those of its own batches. Call this before evaluating and
    /// saving then, so that all ranks score alike and the file holds the statistics of all data. With the other policies they are equal after every step.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`Error::Read`].
    pub fn average_buffers<M: Module>(&self, model: M) -> Result<M, Error> {
        replica::average_buffers(model, &*self.inner.group)
    }

    /// A seed for this rank's own random stream (dropout, augmentation), a fixed function of `seed` and the rank.
    ///
    /// Seed the model's initial weights alike or not at all: `wrap` makes them equal anyway.
    pub fn rank_seed(&self, seed: u64) -> u64 {
        split_mix(seed, self.rank() as u64)
    }

    /// A seed for this rank's random stream in one step: a fixed function of `seed`, the rank and the step.
    ///
    /// `device.seed(ddp.step_seed(seed, step))` at the beginning of every step makes dropout and augmentation of a resumed run those of a run that
    /// was never interrupted. Burn's own generators cannot be saved, so seeding at the start alone does not.
    pub fn step_seed(&self, seed: u64, step: u64) -> u64 {
        split_mix(self.rank_seed(seed), step)
    }

    /// The checkpoints in `directory`, of which rank 0's counts; the others need not see it. Local; its `save` and `load` are collective.
    pub fn checkpoints(&self, directory: impl AsRef<Path>) -> CheckpointManager {
        CheckpointManager::new(self.clone(), directory.as_ref())
    }
}

/// Number `index` of the sequence of `seed`. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): neighbours are unrelated.
fn split_mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Keeps backward passes local while it lives; see [`Ddp::no_sync`].
#[derive(Debug)]
#[must_use = "dropping the guard turns synchronisation on again"]
pub struct NoSync {
    switch: Arc<SyncSwitch>,
}

impl Drop for NoSync {
    fn drop(&mut self) {
        self.switch.release();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// They hold one another in turn.
    #[test]
    fn what_exchanges_statistics_goes_with_the_last_handle() {
        let ddp = Ddp::connect(Rendezvous::new(0, 1, "127.0.0.1", 0).unwrap()).unwrap();
        let gather = ddp.gather().unwrap();
        let sessions = Arc::downgrade(&ddp.inner.sessions);
        drop((ddp, gather));
        assert!(sessions.upgrade().is_none());
    }
}
