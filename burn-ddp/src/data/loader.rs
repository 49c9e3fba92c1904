//! A loader of this rank's shard, as Burn's `DataLoader`.

use super::{
    DataError, ShardedSampler, Tail,
    agree::{Settings, agree},
    iter::{Batches, Feed, MarkedBatches},
    position::Position,
    worker::{Fetch, Pass, Pool, Source},
};
use crate::group::ProcessGroup;
use burn::{
    data::{
        dataloader::{DataLoader, DataLoaderIterator, batcher::Batcher},
        dataset::Dataset,
    },
    tensor::Device,
};
use serde::{Deserialize, Serialize};
use std::{ops::Range, sync::Arc};

/// Options of a [`DistributedLoader`].
///
/// Defaults: batch size 1, data set's own order, [`Tail::Pad`], no worker threads, Burn's default device.
#[must_use]
pub struct LoaderBuilder<I, O> {
    group: Option<Arc<dyn ProcessGroup>>,
    dataset: Arc<dyn Dataset<I>>,
    batcher: Arc<dyn Batcher<I, O>>,
    batch_size: usize,
    seed: Option<u64>,
    tail: Tail,
    num_workers: usize,
    device: Option<Device>,
}

impl<I: 'static, O: Send + 'static> LoaderBuilder<I, O> {
    /// A loader over the ranks of `group`; without a group, over this process alone.
    pub fn new(
        group: Option<Arc<dyn ProcessGroup>>,
        dataset: impl Dataset<I> + 'static,
        batcher: impl Batcher<I, O> + 'static,
    ) -> Self {
        Self {
            group,
            dataset: Arc::new(dataset),
            batcher: Arc::new(batcher),
            batch_size: 1,
            seed: None,
            tail: Tail::default(),
            num_workers: 0,
            device: None,
        }
    }

    /// Items per batch **of one rank**; all ranks together take `batch_size * world_size` per step.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = batch_size;
        self
    }

    /// Shuffles every epoch anew, by `seed` and the epoch's number alone. Same seed on every rank.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// What happens to items that do not fill a batch on every rank.
    pub fn tail(mut self, tail: Tail) -> Self {
        self.tail = tail;
        self
    }

    /// Threads that make batches ahead of the loop, two batches each; 0 makes them in the loop.
    /// The order of batches is the same for any number.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// Device that the batcher is given.
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Compares the settings with the other ranks' and builds the loader.
    ///
    /// Collective if there is a group: blocks until every rank has called it or the group fails.
    ///
    /// # Errors
    ///
    /// [`DataError::Disagreement`], the same on every rank, if data set length, batch size, tail mode, seed or
    /// world size differ; [`DataError::EmptyDataset`]; [`DataError::ZeroBatchSize`];
    /// [`DataError::Worker`]; [`DataError::Group`].
    pub fn build(self) -> Result<DistributedLoader<O>, DataError> {
        let (rank, world_size) = self
            .group
            .as_ref()
            .map_or((0, 1), |group| (group.rank(), group.world_size()));
        let len = self.dataset.len();
        let Self {
            batch_size,
            seed,
            tail,
            ..
        } = self;
        // First the collective: a rank that left early with an error of its own would leave the others waiting.
        if let Some(group) = self.group.as_deref() {
            agree(
                group,
                &Settings {
                    len,
                    batch_size,
                    tail,
                    seed,
                    world_size,
                },
            )?;
        }
        let sampler = ShardedSampler::new(len, batch_size, rank, world_size, seed, tail)?;
        let source: Arc<dyn Fetch<O>> = Arc::new(Source {
            dataset: self.dataset,
            batcher: self.batcher,
        });
        let pool = match self.num_workers {
            0 => None,
            workers => Some(Arc::new(Pool::new(workers, rank, &source)?)),
        };
        let device = self.device.unwrap_or_default();
        Ok(DistributedLoader {
            sampler,
            source,
            pool,
            device,
            position: Arc::default(),
            slice: None,
        })
    }
}

/// Where a loader stands: all that a checkpoint has to keep of it, whatever the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LoaderState {
    /// The shuffling seed, `None` without shuffling.
    pub seed: Option<u64>,
    /// The epoch that is under way or next.
    pub epoch: u64,
    /// Items of that epoch that all ranks together have consumed.
    pub cursor: u64,
}

/// This rank's batches, epoch after epoch.
///
/// Each [`iter`](Self::iter) is one pass: the first is epoch 0, each later one the next epoch, also
/// if the pass before was left early. Clones made by `to_device` share the position; a `slice` counts for itself.
///
/// Each batch that a pass hands out counts as consumed, so a [`state`](Self::state) taken in the
/// loop's body after the optimizer step continues with the next batch. Prefetched batches do not count.
pub struct DistributedLoader<O> {
    sampler: ShardedSampler,
    source: Arc<dyn Fetch<O>>,
    pool: Option<Arc<Pool<O>>>,
    device: Device,
    position: Arc<Position>,
    /// Positions of this rank's shard that are used; all of them if `None`.
    slice: Option<Range<usize>>,
}

impl<O: Send + 'static> DistributedLoader<O> {
    /// Starts the next pass. The first item after an error is `None`.
    pub fn iter(&self) -> Batches<O> {
        let start = self.position.begin();
        let shard = self.sampler.shard(start.epoch, start.cursor);
        let pass = Arc::new(Pass::new(
            shard,
            self.slice.as_ref(),
            self.sampler.batch_size(),
        ));
        let feed = match &self.pool {
            Some(pool) => Feed::Workers(pool.start(&pass, &self.device)),
            None => Feed::Inline(self.source.clone(), self.device.clone()),
        };
        Batches::new(feed, pass, self.position.clone(), start.ticket)
    }

    /// Like [`iter`](Self::iter), and each batch comes with the number of its items that count.
    pub fn iter_marked(&self) -> MarkedBatches<O> {
        MarkedBatches(self.iter())
    }

    /// Batches of this rank in a whole epoch. Equal on all ranks except under [`Tail::Exact`].
    pub fn num_batches(&self) -> usize {
        self.num_items_per_epoch()
            .div_ceil(self.sampler.batch_size())
    }

    /// The sampler behind this loader.
    pub fn sampler(&self) -> &ShardedSampler {
        &self.sampler
    }

    /// Makes the next pass the whole of epoch `epoch`. Call it on all ranks with the same number.
    pub fn set_epoch(&self, epoch: u64) {
        self.position.set(epoch, 0);
    }

    /// Where the loader stands. The same on all ranks between two steps.
    pub fn state(&self) -> LoaderState {
        let (epoch, cursor) = self.position.get();
        // The loop may have taken the last batch without asking for the end.
        let (epoch, cursor) = self.normalise(epoch, cursor);
        LoaderState {
            seed: self.sampler.seed(),
            epoch,
            cursor: cursor as u64,
        }
    }

    /// Makes the next pass continue where `state` was taken, on any number of ranks. Call it on all
    /// ranks with the same state.
    ///
    /// # Errors
    ///
    /// [`DataError::State`] if the state has another seed or lies beyond the data set's end.
    pub fn restore(&self, state: &LoaderState) -> Result<(), DataError> {
        let rank = self.sampler.rank();
        let error = |what, saved, here| {
            Err(DataError::State {
                rank,
                what,
                saved,
                here,
            })
        };
        if state.seed != self.sampler.seed() {
            let show = |seed: Option<u64>| {
                seed.map_or_else(|| "none (no shuffling)".to_owned(), |s| s.to_string())
            };
            return error(
                "the shuffling seed",
                show(state.seed),
                show(self.sampler.seed()),
            );
        }
        let len = self.sampler.dataset_len();
        let Some(cursor) = usize::try_from(state.cursor)
            .ok()
            .filter(|cursor| *cursor <= len)
        else {
            let here = format!("at most {len} (the data set's length)");
            return error(
                "the number of consumed items",
                state.cursor.to_string(),
                here,
            );
        };
        let (epoch, cursor) = self.normalise(state.epoch, cursor);
        self.position.set(epoch, cursor);
        Ok(())
    }

    fn normalise(&self, epoch: u64, cursor: usize) -> (u64, usize) {
        if cursor > 0 && self.sampler.is_finished(cursor) {
            (epoch.wrapping_add(1), 0)
        } else {
            (epoch, cursor)
        }
    }

    fn num_items_per_epoch(&self) -> usize {
        let len = self.sampler.num_items(0);
        self.slice
            .as_ref()
            .map_or(len, |slice| slice.end.min(len).saturating_sub(slice.start))
    }

    fn share(
        &self,
        device: Device,
        position: Arc<Position>,
        slice: Option<Range<usize>>,
    ) -> Arc<dyn DataLoader<O>> {
        let Self {
            sampler,
            source,
            pool,
            ..
        } = self;
        Arc::new(Self {
            sampler: sampler.clone(),
            source: source.clone(),
            pool: pool.clone(),
            device,
            position,
            slice,
        })
    }
}

impl<O: Send + 'static> DataLoader<O> for DistributedLoader<O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        Box::new(DistributedLoader::iter(self))
    }

    /// Items of this rank in a whole epoch, padding included.
    fn num_items(&self) -> usize {
        self.num_items_per_epoch()
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        self.share(device.clone(), self.position.clone(), self.slice.clone())
    }

    /// A part of this rank's items; the order of each epoch is cut, not the data set.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let origin = self.slice.as_ref().map_or(0, |slice| slice.start);
        let limit = self.slice.as_ref().map_or(usize::MAX, |slice| slice.end);
        let clamp = |offset: usize| origin.saturating_add(offset).min(limit);
        let position = Arc::new(self.position.copy());
        self.share(
            self.device.clone(),
            position,
            Some(clamp(start)..clamp(end.max(start))),
        )
    }
}

#[cfg(test)]
#[path = "loader_tests.rs"]
mod tests;
