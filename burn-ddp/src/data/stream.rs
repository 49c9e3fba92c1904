//! This rank's share of a stream.

use super::DataError;
use crate::Ddp;

impl Ddp {
    /// This rank's share of a source that can only be run through, such as lines of files or records from a network. Local; every rank must
    /// see the same items in the same order.
    ///
    /// The rank runs through all items and keeps every `world_size`-th. All ranks get equally many: what is left at the end, fewer items than
    /// ranks, goes to nobody. With a large number of files it is cheaper to give each rank files of its own, and then to
    /// [join](Self::join).
    pub fn shard<I: Iterator>(&self, items: I) -> StreamShard<I> {
        StreamShard {
            items,
            share: self.rank(),
            shares: self.world_size(),
        }
    }
}

/// Every so-many-th item of an iterator that all ranks run through alike; see [`Ddp::shard`](crate::Ddp::shard).
///
/// Shares are dealt out in rounds of one item to each share. The last round is left out if it is incomplete, so that all shares have equally many
/// items.
#[derive(Clone, Debug)]
pub struct StreamShard<I> {
    items: I,
    share: usize,
    shares: usize,
}

impl<I: Iterator> StreamShard<I> {
    /// The part of this share that loader worker `worker` of `workers` takes, as many on each rank.
    ///
    /// # Errors
    ///
    /// [`DataError::WorkerOutOfRange`].
    pub fn worker(self, worker: usize, workers: usize) -> Result<Self, DataError> {
        if worker >= workers {
            return Err(DataError::WorkerOutOfRange { worker, workers });
        }
        Ok(Self {
            items: self.items,
            share: self.share * workers + worker,
            shares: self.shares * workers,
        })
    }
}

impl<I: Iterator> Iterator for StreamShard<I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let own = self.items.nth(self.share)?;
        match self.shares - self.share - 1 {
            0 => {}
            rest => {
                self.items.nth(rest - 1)?;
            }
        }
        Some(own)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let (least, most) = self.items.size_hint();
        (least / self.shares, most.map(|most| most / self.shares))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn shares(items: usize, ranks: usize, workers: usize) -> Vec<Vec<usize>> {
        let share = |rank, worker| {
            let shard = StreamShard {
                items: 0..items,
                share: rank,
                shares: ranks,
            };
            let shard = shard.worker(worker, workers).unwrap();
            let (least, most) = shard.size_hint();
            let all: Vec<usize> = shard.collect();
            assert_eq!((all.len(), Some(all.len())), (least, most));
            all
        };
        let workers_of = |rank| (0..workers).map(move |worker| share(rank, worker));
        (0..ranks).flat_map(workers_of).collect()
    }

    #[test]
    fn ddp_16_every_item_goes_to_one_worker_of_one_rank() {
        let all = shares(20, 2, 2);
        assert_eq!(all[1], [1, 5, 9, 13, 17]);
        let mut union: Vec<usize> = all.concat();
        union.sort_unstable();
        assert_eq!(union, (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn ddp_16_an_incomplete_round_is_left_out() {
        for (items, each) in [(21, 5), (23, 5), (24, 6), (3, 0), (0, 0)] {
            let all = shares(items, 2, 2);
            assert!(
                all.iter().all(|share| share.len() == each),
                "{items}: {all:?}"
            );
        }
    }

    #[test]
    fn one_rank_has_everything() {
        assert_eq!(shares(5, 1, 1), [[0, 1, 2, 3, 4]]);
    }

    #[test]
    fn a_worker_that_does_not_exist_is_an_error() {
        let shard = StreamShard {
            items: 0..3,
            share: 0,
            shares: 1,
        };
        let (worker, workers) = (2, 2);
        let error = shard.worker(worker, workers).unwrap_err();
        assert_eq!(error, DataError::WorkerOutOfRange { worker, workers });
    }
}
