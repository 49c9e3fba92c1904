//! Which samples a rank sees, and in which order.
//!
//! The shard of a rank is a pure function of (seed, epoch, cursor, rank, world size), see
//! [`ShardedSampler`]. [`DistributedLoader`] turns it into batches through Burn's own `Dataset` and
//! `Batcher` traits; it implements Burn's `DataLoader`, counts epochs by itself, and its whole
//! state is a [`LoaderState`] that can be restored with another number of ranks.

mod agree;
mod error;
mod iter;
mod loader;
mod position;
mod sampler;
mod stream;
mod worker;

pub use error::DataError;
#[cfg(feature = "train")]
pub(crate) use iter::take_valid;
pub use iter::{Batches, MarkedBatch, MarkedBatches};
pub use loader::{DistributedLoader, LoaderBuilder, LoaderState};
pub use sampler::{Sample, Shard, ShardedSampler, Tail};
pub use stream::StreamShard;
