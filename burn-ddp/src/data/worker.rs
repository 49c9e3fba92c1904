//! Making batches, on the caller's thread or ahead of it on worker threads.

use super::{DataError, Sample, Shard};
use burn::{
    data::{
        dataloader::batcher::Batcher,
        dataset::{Dataset, DatasetError},
    },
    tensor::Device,
};
use std::{
    any::Any,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, SyncSender, channel, sync_channel},
    },
    thread,
};

/// Batches that each worker may finish ahead of the consumer.
const PREFETCH: usize = 2;

/// Items to a batch; hides the item type.
pub(super) trait Fetch<O>: Send + Sync {
    fn fetch(&self, indices: Vec<usize>, device: &Device) -> Result<O, DatasetError>;
}

/// A Burn data set with a Burn batcher.
pub(super) struct Source<I, O> {
    pub(super) dataset: Arc<dyn Dataset<I>>,
    pub(super) batcher: Arc<dyn Batcher<I, O>>,
}

impl<I, O> Fetch<O> for Source<I, O> {
    fn fetch(&self, indices: Vec<usize>, device: &Device) -> Result<O, DatasetError> {
        let items = self.dataset.get_many(indices)?;
        Ok(self.batcher.batch(items, device))
    }
}

/// One pass over (a slice of) a shard, cut into batches.
#[derive(Debug)]
pub(super) struct Pass {
    shard: Shard,
    positions: Range<usize>,
    batch_size: usize,
}

impl Pass {
    pub(super) fn new(shard: Shard, slice: Option<&Range<usize>>, batch_size: usize) -> Self {
        let len = shard.len();
        let positions = slice.map_or(0..len, |slice| {
            let end = slice.end.min(len);
            slice.start.min(end)..end
        });
        Self {
            shard,
            positions,
            batch_size,
        }
    }

    pub(super) fn batch_size(&self) -> usize {
        self.batch_size
    }

    pub(super) fn num_items(&self) -> usize {
        self.positions.len()
    }

    pub(super) fn num_batches(&self) -> usize {
        self.num_items().div_ceil(self.batch_size)
    }

    pub(super) fn samples(&self, batch: usize) -> impl Iterator<Item = Sample> + '_ {
        let start = self.positions.start + batch * self.batch_size;
        self.shard
            .samples(start..(start + self.batch_size).min(self.positions.end))
    }

    pub(super) fn cursor_after(&self, batches: usize) -> usize {
        self.shard.cursor_after(batches)
    }

    pub(super) fn fetch<O>(
        &self,
        batch: usize,
        from: &dyn Fetch<O>,
        device: &Device,
    ) -> Result<O, DatasetError> {
        from.fetch(
            self.samples(batch).map(|sample| sample.index).collect(),
            device,
        )
    }
}

/// Asks a worker for its batches of a pass: every `workers`-th, beginning with its own number.
struct Command<O> {
    pass: Arc<Pass>,
    device: Device,
    batches: SyncSender<Result<O, DatasetError>>,
}

/// Worker threads that live as long as the loader, not one pass: a backend may keep a stream and a
/// memory pool per thread, which would otherwise pile up epoch by epoch.
///
/// Dropping the pool does not wait for the workers; each ends after the batch that it is making.
#[derive(Debug)]
pub(super) struct Pool<O> {
    commands: Vec<Sender<Command<O>>>,
}

impl<O> std::fmt::Debug for Command<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command")
            .field("pass", &self.pass)
            .finish_non_exhaustive()
    }
}

impl<O: Send + 'static> Pool<O> {
    pub(super) fn new(
        workers: usize,
        rank: usize,
        source: &Arc<dyn Fetch<O>>,
    ) -> Result<Self, DataError> {
        let mut commands = Vec::with_capacity(workers);
        for worker in 0..workers {
            let (sender, receiver) = channel();
            let source = source.clone();
            thread::Builder::new()
                .name(format!("loader-{worker}"))
                .spawn(move || work(worker, workers, &*source, &receiver))
                .map_err(|error| DataError::Worker {
                    rank,
                    worker,
                    cause: error.to_string(),
                })?;
            commands.push(sender);
        }
        Ok(Self { commands })
    }

    /// One channel per worker; batch `b` of the pass comes from channel `b % workers`, so the order
    /// is that of the pass whichever worker is faster.
    pub(super) fn start(
        &self,
        pass: &Arc<Pass>,
        device: &Device,
    ) -> Vec<Receiver<Result<O, DatasetError>>> {
        let start = |command: &Sender<Command<O>>| {
            let (batches, receiver) = sync_channel(PREFETCH);
            // A worker that is gone has dropped its receiver; the consumer then finds its channel closed.
            let _ = command.send(Command {
                pass: pass.clone(),
                device: device.clone(),
                batches,
            });
            receiver
        };
        self.commands.iter().map(start).collect()
    }
}

fn work<O>(worker: usize, workers: usize, source: &dyn Fetch<O>, commands: &Receiver<Command<O>>) {
    while let Ok(Command {
        pass,
        device,
        batches,
    }) = commands.recv()
    {
        for batch in (worker..pass.num_batches()).step_by(workers) {
            // A panic is the consumer's error; the worker stays for the next pass.
            let result = catch_unwind(AssertUnwindSafe(|| pass.fetch(batch, source, &device)))
                .unwrap_or_else(|panic| {
                    Err(DatasetError::new(WorkerFailed::panicked(
                        worker, batch, &*panic,
                    )))
                });
            let failed = result.is_err();
            // A send fails when the consumer has dropped this pass.
            if batches.send(result).is_err() || failed {
                break;
            }
        }
    }
}

/// A batch that a worker could not deliver.
#[derive(Debug, thiserror::Error)]
#[error("loader worker {worker} failed at batch {batch} of this rank: {cause}")]
pub(super) struct WorkerFailed {
    worker: usize,
    batch: usize,
    cause: String,
}

impl WorkerFailed {
    fn panicked(worker: usize, batch: usize, payload: &(dyn Any + Send)) -> Self {
        let text = payload
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Self {
            worker,
            batch,
            cause: format!("it panicked: {text}"),
        }
    }

    pub(super) fn gone(worker: usize, batch: usize) -> Self {
        Self {
            worker,
            batch,
            cause: "its thread has ended".to_owned(),
        }
    }
}
