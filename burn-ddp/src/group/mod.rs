//! Process groups: the collectives, on bytes and element types.
//!
//! A [`ProcessGroup`] is a set of ranks with an order of operations. This module knows nothing of
//! tensors or modules.
//!
//! | implementation | ranks are | built on |
//! |---|---|---|
//! | [`thread`] | threads of one process (tests) | std |
//! | [`host`] | processes of one machine | shared memory on Linux, TCP elsewhere |
//! | `mpi` (feature `mpi`) | processes that mpirun has started | Open MPI or MPICH |

mod descriptor;
mod dtype;
mod engine;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub(crate) mod heap;
pub mod host;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
pub(crate) mod objects;
mod ops;
pub(crate) mod recorder;
pub(crate) mod reduce;
pub mod thread;
mod work;

#[cfg(test)]
mod conformance;

pub use descriptor::{OpDescriptor, OpKind};
pub use dtype::{DType, ReduceOp};
pub(crate) use error::Ranks;
pub use error::{GroupError, Result};
pub use work::{QueueClosed, Work, WorkQueue};

use std::{fmt::Debug, sync::Arc};

/// A set of ranks that run the same collectives in the same order.
///
/// Every method except [`rank`](Self::rank), [`world_size`](Self::world_size),
/// [`transport`](Self::transport), [`abort`](Self::abort) and [`failure`](Self::failure) must be called by **all
/// ranks, in the same order**, and blocks until the operation is complete on this rank, a peer
/// failed, or the group's operation time-out passed. Operations on one group from several threads
/// of a rank are serialised in no particular order: use one group per thread, see
/// [`new_group`](Self::new_group).
///
/// Lengths are in bytes and must be a multiple of the element size; all ranks must give the same
/// length (the error of a rank that does not prints both sides).
pub trait ProcessGroup: Send + Sync + Debug {
    /// This process's position in the group, `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn world_size(&self) -> usize;

    /// How the data travels, for logs: `"shm"`, `"tcp"`, `"thread"`.
    fn transport(&self) -> &'static str;

    /// Replaces `data` on every rank by the reduction over all ranks.
    fn all_reduce(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()>;

    /// Replaces `data` on every rank by the root's.
    fn broadcast(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()>;

    /// Fills `recv` (of `world_size * send.len()` bytes) with every rank's `send`, in rank order.
    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()>;

    /// Reduces `send` (of `world_size * recv.len()` bytes) over all ranks and leaves block `rank` in
    /// `recv`.
    fn reduce_scatter(
        &self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()>;

    /// Returns when every rank has called it.
    fn barrier(&self) -> Result<()>;

    /// [`barrier`](Self::barrier) without the operation time-out: waits as long as its peers live, for phases in which some
    /// ranks work and the others have nothing to do. Ends with an error when a peer dies or leaves, as every operation does; a peer
    /// that lives and never comes is waited for, with a warning in the log now and then. Meets `barrier` on other ranks.
    fn monitored_barrier(&self) -> Result<()>;

    /// Reserves a buffer of `bytes` bytes in memory that suits this group best (shared memory
    /// where the group has it), for [`GroupBuffer::all_reduce`] without a copy.
    fn buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>>;

    /// A new group of the same ranks with an order of its own: operations on it never meet
    /// operations on this one. Collective.
    fn new_group(&self) -> Result<Arc<dyn ProcessGroup>>;

    /// Ends every pending and later operation of the whole job on every rank with an error that
    /// carries `reason`. Never blocks; calling it again does nothing.
    fn abort(&self, reason: &str);

    /// The failure that poisoned the job, if any. Costs an atomic load.
    fn failure(&self) -> Option<GroupError>;
}

/// A buffer that lives in a group's own memory.
///
/// Write this rank's data with [`input`](Self::input), call [`all_reduce`](Self::all_reduce) on all
/// ranks, read the result with [`output`](Self::output). `input` and `output` may be the same
/// memory (what was written is then gone) or not, so read results only from `output`. The result
/// stays valid until the next `all_reduce` on this buffer.
pub trait GroupBuffer: Send + Debug {
    /// Size in bytes.
    fn bytes(&self) -> usize;

    /// This rank's contribution, 64-byte aligned.
    fn input(&mut self) -> &mut [u8];

    /// Reduces the first `bytes` bytes over all ranks. Collective; same rules as
    /// [`ProcessGroup::all_reduce`], and ordered with the operations of the group that made the buffer.
    fn all_reduce(&mut self, bytes: usize, dtype: DType, op: ReduceOp) -> Result<()>;

    /// The reduction of the last [`all_reduce`](Self::all_reduce), 64-byte aligned, the same bits on every rank.
    fn output(&self) -> &[u8];
}
