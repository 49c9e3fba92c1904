//! What a collective is, as the ranks compare it before any payload is used.

use super::{DType, ReduceOp};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The kind of a collective, with the argument that all ranks must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OpKind {
    /// Every rank gives a buffer and gets the reduction of all.
    AllReduce(ReduceOp),
    /// The root's buffer replaces everyone's.
    Broadcast {
        /// The rank whose buffer is sent.
        root: usize,
    },
    /// Every rank gives a buffer and gets all of them, in rank order.
    AllGather,
    /// Every rank gives `world_size` blocks and gets the reduction of its own block.
    ReduceScatter(ReduceOp),
    /// No data.
    Barrier,
    /// The ranks reserve a group buffer of as many bytes as the count says.
    Buffer,
    /// The ranks make another group.
    NewGroup,
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpKind::AllReduce(op) => write!(f, "all_reduce({op})"),
            OpKind::Broadcast { root } => write!(f, "broadcast(root {root})"),
            OpKind::AllGather => f.write_str("all_gather"),
            OpKind::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            OpKind::Barrier => f.write_str("barrier"),
            OpKind::Buffer => f.write_str("buffer"),
            OpKind::NewGroup => f.write_str("new_group"),
        }
    }
}

/// One collective of one group. Two ranks meet in the same operation exactly when their
/// descriptors are equal; anything else is [`GroupError::Mismatch`](super::GroupError::Mismatch).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct OpDescriptor {
    /// Random number of the job, drawn by rank 0.
    pub job: u64,
    /// How often the job has been restarted.
    pub generation: u32,
    /// The ordering domain. The groups of a job are numbered from 0 as they are made; what could not be made keeps its number.
    pub group: u32,
    /// Position of this operation in its group, from 0.
    pub sequence: u64,
    /// What the ranks do.
    pub kind: OpKind,
    /// Element type.
    pub dtype: DType,
    /// Number of elements that this rank gives.
    pub count: u64,
    /// The group buffer that it runs on, from 1 in creation order; 0 for the caller's own memory.
    pub buffer: u32,
}

impl fmt::Display for OpDescriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} x {} (", self.kind, self.count, self.dtype)?;
        if self.buffer != 0 {
            write!(f, "group buffer {}, ", self.buffer)?;
        }
        write!(
            f,
            "operation {} of group {}, job {:016x}, generation {})",
            self.sequence, self.group, self.job, self.generation
        )
    }
}
