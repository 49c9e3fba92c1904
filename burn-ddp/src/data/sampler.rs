//! The shard of a rank as a pure function of (seed, epoch, cursor, rank, world size).

use super::DataError;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{ops::Range, sync::Arc};

/// What happens to the last items of an epoch, where they do not fill a batch on every rank.
///
/// Call `k` the items left after the last full global batch, `0 <= k < batch_size * world_size`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Tail {
    /// Every rank has the same number of batches and of items; nothing is left out. Each rank gets
    /// `ceil(k / world_size)` items in a last, shorter batch; a rank for which there are not enough
    /// gets one repeated item (from the start of the epoch's order) as the last of that batch,
    /// marked as [`Sample::padding`]. For training.
    #[default]
    Pad,
    /// Every rank has the same number of batches and of items; nothing is repeated. Each rank gets
    /// `floor(k / world_size)` items in a last, shorter batch, and the last `k % world_size` items
    /// of the epoch's order are left out. Fewer items than ranks give an epoch without batches.
    Drop,
    /// Every item exactly once. The `k` items are divided as evenly as possible, the first
    /// `k % world_size` ranks getting one more, so that ranks can differ by one item and therefore
    /// by one batch. For evaluation: a collective inside the loop would wait for ranks that have
    /// already left it.
    Exact,
}

/// One item of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sample {
    /// Index into the data set.
    pub index: usize,
    /// Repeated only to give all ranks the same number of items; leave it out of metrics.
    pub padding: bool,
}

/// Divides an epoch's items among ranks.
///
/// # Order
///
/// The items of an epoch are put in one global order: the identity without a seed, else a
/// permutation that depends on (seed, epoch, length) alone. A cursor counts the items that all
/// ranks together have consumed. From there the order is cut into global batches of
/// `batch_size * world_size` items, and rank `r` gets the `r`-th block of `batch_size` items of each.
///
/// So N ranks with batch size B see, global batch for global batch, the items of one process with
/// batch size `N * B` in the same order; and since the cursor says nothing of the number of ranks,
/// the rest of an epoch can be divided among another number of them.
///
/// # The permutation
///
/// Fixed for ever, because checkpoints depend on it: ChaCha8 keyed with the 32 bytes
/// `seed (u64, little endian) | epoch (u64, little endian) | "burn-ddp sampler"`, stream 0; then the
/// Fisher-Yates shuffle (Durstenfeld 1964, Knuth TAOCP 2, 3.4.2, algorithm P): for `i` from
/// `len - 1` down to 1, swap items `i` and `j`, with `j` uniform in `0..=i` by Lemire's
/// multiplication method with rejection ("Fast Random Integer Generation in an Interval", 2019,
/// algorithm 5) on 64-bit words. It holds one `usize` per item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedSampler {
    seed: Option<u64>,
    len: usize,
    batch_size: usize,
    rank: usize,
    world_size: usize,
    tail: Tail,
}

impl ShardedSampler {
    /// A sampler for rank `rank` of `world_size` over `len` items, `batch_size` of them per rank and
    /// batch; shuffled if there is a `seed`. Local: nothing is compared across ranks.
    pub fn new(
        len: usize,
        batch_size: usize,
        rank: usize,
        world_size: usize,
        seed: Option<u64>,
        tail: Tail,
    ) -> Result<Self, DataError> {
        if rank >= world_size {
            return Err(DataError::RankOutOfRange { rank, world_size });
        }
        if batch_size == 0 {
            return Err(DataError::ZeroBatchSize { rank });
        }
        if len == 0 {
            return Err(DataError::EmptyDataset { rank });
        }
        if batch_size.checked_mul(world_size).is_none() {
            return Err(DataError::BatchTooLarge {
                rank,
                batch_size,
                world_size,
            });
        }
        Ok(Self {
            seed,
            len,
            batch_size,
            rank,
            world_size,
            tail,
        })
    }

    /// The shuffling seed; `None` keeps the data set's own order.
    pub fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Number of items in the data set.
    pub fn dataset_len(&self) -> usize {
        self.len
    }

    /// Items of one rank in a full batch.
    pub fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// This sampler's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks that share the items.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// What happens to the last items.
    pub fn tail(&self) -> Tail {
        self.tail
    }

    /// This rank's part of what is left of `epoch` after `cursor` items. Computes the permutation:
    /// time and memory are linear in the data set's length when shuffling.
    pub fn shard(&self, epoch: u64, cursor: usize) -> Shard {
        let order = self
            .seed
            .map(|seed| permutation(seed, epoch, self.len).into());
        let split = self.split(cursor);
        Shard {
            sampler: self.clone(),
            order,
            cursor: cursor.min(self.len),
            split,
        }
    }

    /// Number of items of this rank, padding included, in what is left of an epoch after `cursor` items.
    pub fn num_items(&self, cursor: usize) -> usize {
        self.split(cursor).items
    }

    /// Number of batches of this rank in what is left of an epoch after `cursor` items.
    pub fn num_batches(&self, cursor: usize) -> usize {
        self.num_items(cursor).div_ceil(self.batch_size)
    }

    /// True if no rank has anything left in an epoch after `cursor` items. The same on all ranks.
    pub fn is_finished(&self, cursor: usize) -> bool {
        let left = self.len.saturating_sub(cursor);
        match self.tail {
            Tail::Pad | Tail::Exact => left == 0,
            Tail::Drop => left < self.world_size,
        }
    }

    fn global_batch(&self) -> usize {
        self.batch_size * self.world_size
    }

    fn split(&self, cursor: usize) -> Split {
        let left = self.len.saturating_sub(cursor);
        let full = left / self.global_batch();
        let rest = left % self.global_batch();
        let share = rest / self.world_size;
        let longer = match self.tail {
            Tail::Pad | Tail::Exact => rest % self.world_size,
            Tail::Drop => 0,
        };
        let real = share + usize::from(self.rank < longer);
        let padding = self.tail == Tail::Pad && longer > 0 && self.rank >= longer;
        let items = full * self.batch_size + real + usize::from(padding);
        Split {
            full,
            items,
            real,
            tail_offset: self.rank * share + self.rank.min(longer),
            longer,
            padding,
        }
    }
}

/// How what is left of an epoch falls on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Split {
    /// Full batches.
    full: usize,
    /// This rank's items, padding included.
    items: usize,
    /// Items of this rank in the tail, padding excluded.
    real: usize,
    /// Where they begin within the tail.
    tail_offset: usize,
    /// Ranks that have one more real item in the tail.
    longer: usize,
    /// Whether this rank ends with a repeated item.
    padding: bool,
}

/// One rank's items of (the rest of) one epoch, in order.
#[derive(Clone, Debug)]
pub struct Shard {
    sampler: ShardedSampler,
    order: Option<Arc<[usize]>>,
    cursor: usize,
    split: Split,
}

impl Shard {
    /// Number of this rank's items, padding included.
    pub fn len(&self) -> usize {
        self.split.items
    }

    /// True if this rank has nothing to do.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of this rank's batches.
    pub fn num_batches(&self) -> usize {
        self.len().div_ceil(self.sampler.batch_size)
    }

    /// The item at `position` of this rank, `None` from [`len`](Self::len) on.
    pub fn sample(&self, position: usize) -> Option<Sample> {
        let Split {
            full,
            items,
            real,
            tail_offset,
            longer,
            padding,
        } = self.split;
        if position >= items {
            return None;
        }
        let ShardedSampler {
            batch_size,
            rank,
            world_size,
            len,
            ..
        } = self.sampler;
        let (batch, within) = (position / batch_size, position % batch_size);
        if batch < full {
            return Some(self.at(self.cursor + (batch * world_size + rank) * batch_size + within));
        }
        let in_tail = position - full * batch_size;
        if padding && in_tail == real {
            // The ranks without a longer share repeat the epoch's first items, one each, over and over if
            // there are more ranks than items.
            let repeated = self.at((rank - longer) % len);
            return Some(Sample {
                padding: true,
                ..repeated
            });
        }
        let tail_start = self.cursor + full * self.sampler.global_batch();
        Some(self.at(tail_start + tail_offset + in_tail))
    }

    /// The items at `positions` of this rank; stops at the end of the shard.
    pub fn samples(&self, positions: Range<usize>) -> impl Iterator<Item = Sample> + '_ {
        positions.map_while(|position| self.sample(position))
    }

    /// All of this rank's items.
    pub fn iter(&self) -> impl Iterator<Item = Sample> + '_ {
        self.samples(0..self.len())
    }

    /// The cursor after the first `batches` batches: how many items of the epoch all ranks together
    /// have consumed by then.
    pub fn cursor_after(&self, batches: usize) -> usize {
        batches
            .saturating_mul(self.sampler.global_batch())
            .saturating_add(self.cursor)
            .min(self.sampler.len)
    }

    fn at(&self, position: usize) -> Sample {
        let index = self
            .order
            .as_ref()
            .map_or(position, |order| order[position]);
        Sample {
            index,
            padding: false,
        }
    }
}

/// The permutation that [`ShardedSampler`] documents.
fn permutation(seed: u64, epoch: u64, len: usize) -> Vec<usize> {
    let mut key = *b"........________burn-ddp sampler";
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    let mut order: Vec<usize> = (0..len).collect();
    for i in (1..len).rev() {
        order.swap(i, below(&mut rng, i as u64 + 1) as usize);
    }
    order
}

/// Uniform in `0..bound`, `bound > 0`: the high word of a 128-bit product; low words under
/// `2^64 mod bound` are rejected, which takes the bias away.
fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    let mut product = u128::from(rng.next_u64()) * u128::from(bound);
    if (product as u64) < bound {
        let threshold = bound.wrapping_neg() % bound;
        while (product as u64) < threshold {
            product = u128::from(rng.next_u64()) * u128::from(bound);
        }
    }
    (product >> 64) as u64
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
