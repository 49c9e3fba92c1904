//! Why a loader could not be built or restored.

use crate::group::GroupError;

/// Why a sampler or a loader could not be built or restored.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// There is nothing to shard.
    #[error("rank {rank}: the data set is empty; a loader needs at least one item")]
    EmptyDataset {
        /// The rank that reports.
        rank: usize,
    },
    /// A batch must hold at least one item.
    #[error(
        "rank {rank}: the batch size is 0; it is the number of items of one rank in one batch and must be at least 1"
    )]
    ZeroBatchSize {
        /// The rank that reports.
        rank: usize,
    },
    /// `batch_size * world_size` does not fit in a `usize`.
    #[error(
        "rank {rank}: batch size {batch_size} on {world_size} ranks is larger than this machine can count"
    )]
    BatchTooLarge {
        /// The rank that reports.
        rank: usize,
        /// Items of one rank in one batch.
        batch_size: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The rank is not one of the world's.
    #[error("rank {rank} does not exist among {world_size} rank(s)")]
    RankOutOfRange {
        /// The rank that was asked for.
        rank: usize,
        /// Number of ranks.
        world_size: usize,
    },
    /// The loader worker is not one of those that there are.
    #[error("loader worker {worker} does not exist among {workers}: they are numbered from 0")]
    WorkerOutOfRange {
        /// The worker that was asked for.
        worker: usize,
        /// Number of workers of each rank.
        workers: usize,
    },
    /// Two ranks build their loaders differently, so their shards would overlap or leave items out.
    #[error(
        "rank {rank}: the ranks build different loaders: {what} is {theirs} on rank {peer} but {reference} on rank 0. \
         Every rank must pass the same data set, seed, batch size and tail mode"
    )]
    Disagreement {
        /// The rank that reports.
        rank: usize,
        /// The first setting that differs.
        what: &'static str,
        /// The lowest rank that differs from rank 0.
        peer: usize,
        /// That rank's value.
        theirs: String,
        /// Rank 0's value.
        reference: String,
    },
    /// A saved state belongs to another loader.
    #[error(
        "rank {rank}: the saved loader state does not fit this loader: {what} is {saved} in the state and {here} here"
    )]
    State {
        /// The rank that reports.
        rank: usize,
        /// What differs.
        what: &'static str,
        /// The saved value.
        saved: String,
        /// This loader's value.
        here: String,
    },
    /// The operating system gave no thread for a loader worker.
    #[error(
        "rank {rank}: could not start loader worker {worker}: {cause}. Use a smaller num_workers"
    )]
    Worker {
        /// The rank that reports.
        rank: usize,
        /// Which worker, from 0.
        worker: usize,
        /// The system's words.
        cause: String,
    },
    /// The ranks could not compare their settings.
    #[error("while comparing the loader's settings across ranks: {0}")]
    Group(#[from] GroupError),
}
