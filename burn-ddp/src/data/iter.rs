//! The iterators of a loader.

use super::{
    position::Position,
    worker::{Fetch, Pass, WorkerFailed},
};
use burn::{
    data::{
        dataloader::{DataLoaderIterator, Progress},
        dataset::DatasetError,
    },
    tensor::Device,
};
use std::sync::{Arc, mpsc::Receiver};

/// Where batches come from.
pub(super) enum Feed<O> {
    /// Made in `next`.
    Inline(Arc<dyn Fetch<O>>, Device),
    /// Made ahead, batch `b` on worker `b % workers`.
    Workers(Vec<Receiver<Result<O, DatasetError>>>),
}

#[cfg(feature = "train")]
thread_local! {
    static VALID: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
}

/// How many items of the batch that a loader of ours has just handed to this thread are real; `None` if none has since the last call.
///
/// For those that have the loader as Burn's `DataLoader`, whose batches bear no marks.
#[cfg(feature = "train")]
pub(crate) fn take_valid() -> Option<usize> {
    VALID.take()
}

/// This rank's batches of one pass, in order. Ends after the first error.
pub struct Batches<O> {
    feed: Feed<O>,
    pass: Arc<Pass>,
    next: usize,
    failed: bool,
    position: Arc<Position>,
    ticket: u64,
}

impl<O> Batches<O> {
    pub(super) fn new(
        feed: Feed<O>,
        pass: Arc<Pass>,
        position: Arc<Position>,
        ticket: u64,
    ) -> Self {
        Self {
            feed,
            pass,
            next: 0,
            failed: false,
            position,
            ticket,
        }
    }

    /// Number of items of a batch, and how many of them are real.
    fn lengths(&self, batch: usize) -> (usize, usize) {
        let samples = self.pass.samples(batch);
        samples.fold((0, 0), |(len, valid), sample| {
            (len + 1, valid + usize::from(!sample.padding))
        })
    }

    fn fetch(&self, batch: usize) -> Result<O, DatasetError> {
        match &self.feed {
            Feed::Inline(source, device) => self.pass.fetch(batch, &**source, device),
            Feed::Workers(workers) => {
                let worker = batch % workers.len();
                workers[worker]
                    .recv()
                    .unwrap_or_else(|_| Err(DatasetError::new(WorkerFailed::gone(worker, batch))))
            }
        }
    }
}

impl<O> Iterator for Batches<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        if self.next == self.pass.num_batches() {
            self.position.finish(self.ticket);
            return None;
        }
        let result = self.fetch(self.next);
        if result.is_ok() {
            #[cfg(feature = "train")]
            VALID.set(Some(self.lengths(self.next).1));
            self.next += 1;
            self.position
                .advance(self.ticket, self.pass.cursor_after(self.next));
        } else {
            self.failed = true;
        }
        Some(result)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = if self.failed {
            0
        } else {
            self.pass.num_batches() - self.next
        };
        (0, Some(left))
    }
}

impl<O> DataLoaderIterator<O> for Batches<O> {
    fn progress(&self) -> Progress {
        let done = (self.next * self.pass.batch_size()).min(self.pass.num_items());
        Progress::new(done, self.pass.num_items(), Some("items".to_owned()))
    }
}

/// A batch that knows which of its items count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedBatch<O> {
    /// What the batcher made.
    pub batch: O,
    /// Number of items in it.
    pub len: usize,
    /// How many of them are real: the first `valid`; the rest repeat items that another rank or
    /// batch has too. `len`, or one less in an epoch's last batch under [`Tail::Pad`](super::Tail::Pad).
    pub valid: usize,
}

/// Like [`Batches`], with the number of items that count.
pub struct MarkedBatches<O>(pub(super) Batches<O>);

impl<O> Iterator for MarkedBatches<O> {
    type Item = Result<MarkedBatch<O>, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.0.next;
        let batch = self.0.next()?;
        Some(batch.map(|batch| {
            let (len, valid) = self.0.lengths(index);
            MarkedBatch { batch, len, valid }
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}
