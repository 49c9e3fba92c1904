//! The batches of one pass over a Burn loader.

use crate::data::take_valid;
use burn::data::{
    dataloader::{DataLoader, DataLoaderIterator},
    dataset::DatasetError,
};

pub(super) struct Batch<I> {
    pub(super) input: I,
    pub(super) place: Place,
}

/// Where a batch stands in its pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// Items of the pass up to and with this batch.
    pub(super) processed: usize,
    /// Items that are no padding, which come first, where the loader says so.
    pub(super) valid: Option<usize>,
}

type Next<I> = Option<Result<Batch<I>, DatasetError>>;

pub(super) struct Feed<'a, I> {
    iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    ahead: Option<Next<I>>,
}

impl<'a, I> Feed<'a, I> {
    pub(super) fn new(loader: &'a dyn DataLoader<I>) -> Self {
        Self {
            iterator: loader.iter(),
            ahead: None,
        }
    }

    pub(super) fn next(&mut self) -> Next<I> {
        match self.ahead.take() {
            Some(next) => next,
            None => self.load(),
        }
    }

    /// Whether the batch that came last was the pass's last one. Loads the next one for it: a loader's own progress may be inexact.
    pub(super) fn is_last(&mut self) -> bool {
        if self.ahead.is_none() {
            self.ahead = Some(self.load());
        }
        matches!(self.ahead, Some(None))
    }

    fn load(&mut self) -> Next<I> {
        take_valid();
        let next = self.iterator.next()?;
        let valid = take_valid();
        let processed = self.iterator.progress().items_processed;
        let place = Place { processed, valid };
        Some(next.map(|input| Batch { input, place }))
    }
}
