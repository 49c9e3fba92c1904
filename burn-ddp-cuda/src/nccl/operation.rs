//! One communication, before it is handed to NCCL.

mod enqueue;

use super::{DType, DevicePtr, ReduceOp};
use std::fmt;

/// One communication: what, from where, to where.
///
/// `count` is in elements. As with NCCL, `send == recv` is in place for all_reduce, reduce and broadcast; all_gather is in place when
/// `send` is block `rank` of `recv`, reduce_scatter when `recv` is block `rank` of `send`. Otherwise the buffers must not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// The reduction over all ranks, on every rank.
    AllReduce {
        /// `count` elements to read.
        send: DevicePtr,
        /// `count` elements to write.
        recv: DevicePtr,
        /// Elements.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they become one.
        op: ReduceOp,
    },
    /// The reduction over all ranks, on the root only.
    Reduce {
        /// `count` elements to read.
        send: DevicePtr,
        /// `count` elements to write; not used on other ranks than the root.
        recv: DevicePtr,
        /// Elements.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they become one.
        op: ReduceOp,
        /// The rank that gets the result.
        root: usize,
    },
    /// The root's elements, on every rank.
    Broadcast {
        /// `count` elements to read; not used on other ranks than the root.
        send: DevicePtr,
        /// `count` elements to write.
        recv: DevicePtr,
        /// Elements.
        count: usize,
        /// Their type.
        dtype: DType,
        /// The rank that has the data.
        root: usize,
    },
    /// Every rank's elements, in rank order, on every rank.
    AllGather {
        /// `count` elements to read.
        send: DevicePtr,
        /// `world_size * count` elements to write.
        recv: DevicePtr,
        /// Elements of one rank.
        count: usize,
        /// Their type.
        dtype: DType,
    },
    /// Block `rank` of the reduction over all ranks.
    ReduceScatter {
        /// `world_size * count` elements to read.
        send: DevicePtr,
        /// `count` elements to write.
        recv: DevicePtr,
        /// Elements of one block.
        count: usize,
        /// Their type.
        dtype: DType,
        /// How they become one.
        op: ReduceOp,
    },
    /// Elements for `peer`, which must receive as many.
    Send {
        /// `count` elements to read.
        send: DevicePtr,
        /// Elements.
        count: usize,
        /// Their type.
        dtype: DType,
        /// The rank that receives.
        peer: usize,
    },
    /// Elements from `peer`, which must send as many.
    Recv {
        /// `count` elements to write.
        recv: DevicePtr,
        /// Elements.
        count: usize,
        /// Their type.
        dtype: DType,
        /// The rank that sends.
        peer: usize,
    },
}

impl Operation {
    /// What is wrong with it for this rank, if anything.
    pub(super) fn check(&self, rank: usize, world_size: usize) -> Result<(), String> {
        let (count, dtype) = self.size();
        let in_world = |role: &str, rank: usize| {
            (rank < world_size)
                .then_some(())
                .ok_or_else(|| format!("{role} {rank} is not in 0..{world_size}"))
        };
        let used: &[DevicePtr] = match self {
            Operation::Reduce { send, root, .. } if *root != rank => {
                in_world("root", *root)?;
                &[*send]
            }
            Operation::Broadcast { recv, root, .. } if *root != rank => {
                in_world("root", *root)?;
                &[*recv]
            }
            Operation::AllReduce { send, recv, .. }
            | Operation::Reduce { send, recv, .. }
            | Operation::Broadcast { send, recv, .. }
            | Operation::AllGather { send, recv, .. }
            | Operation::ReduceScatter { send, recv, .. } => &[*send, *recv],
            Operation::Send {
                send: buffer, peer, ..
            }
            | Operation::Recv {
                recv: buffer, peer, ..
            } => {
                in_world("peer", *peer)?;
                &[*buffer]
            }
        };
        if count > 0 && used.contains(&DevicePtr::NULL) {
            return Err(format!("a null pointer for {count} elements"));
        }
        let bytes = count
            .checked_mul(dtype.size())
            .and_then(|bytes| bytes.checked_mul(world_size));
        if bytes.is_none() {
            return Err(format!("{count} elements are more than any memory holds"));
        }
        Ok(())
    }

    fn size(&self) -> (usize, DType) {
        match *self {
            Operation::AllReduce { count, dtype, .. }
            | Operation::Reduce { count, dtype, .. }
            | Operation::Broadcast { count, dtype, .. }
            | Operation::AllGather { count, dtype, .. }
            | Operation::ReduceScatter { count, dtype, .. }
            | Operation::Send { count, dtype, .. }
            | Operation::Recv { count, dtype, .. } => (count, dtype),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, dtype) = self.size();
        match self {
            Operation::AllReduce { op, .. } => write!(f, "all_reduce of {count} {dtype} ({op})"),
            Operation::Reduce { op, root, .. } => {
                write!(f, "reduce of {count} {dtype} ({op}) to rank {root}")
            }
            Operation::Broadcast { root, .. } => {
                write!(f, "broadcast of {count} {dtype} from rank {root}")
            }
            Operation::AllGather { .. } => write!(f, "all_gather of {count} {dtype} per rank"),
            Operation::ReduceScatter { op, .. } => {
                write!(f, "reduce_scatter of {count} {dtype} per rank ({op})")
            }
            Operation::Send { peer, .. } => write!(f, "send of {count} {dtype} to rank {peer}"),
            Operation::Recv { peer, .. } => {
                write!(f, "receive of {count} {dtype} from rank {peer}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduce(send: u64, recv: u64, count: usize, root: usize) -> Operation {
        Operation::Reduce {
            send: DevicePtr(send),
            recv: DevicePtr(recv),
            count,
            dtype: DType::F32,
            op: ReduceOp::Sum,
            root,
        }
    }

    #[test]
    fn arguments_are_checked_for_this_rank() {
        // Only the root needs a place for the result.
        assert_eq!(reduce(64, 0, 3, 1).check(0, 2), Ok(()));
        let null = Err("a null pointer for 3 elements".to_owned());
        assert_eq!(reduce(64, 0, 3, 0).check(0, 2), null);
        assert_eq!(reduce(0, 64, 3, 1).check(0, 2), null);
        assert_eq!(reduce(0, 0, 0, 0).check(0, 2), Ok(()));
        let outside = Err("root 2 is not in 0..2".to_owned());
        assert_eq!(reduce(64, 64, 3, 2).check(0, 2), outside);
        assert!(reduce(64, 64, usize::MAX / 4, 0).check(0, 2).is_err());
        let to = Operation::Send {
            send: DevicePtr(64),
            count: 1,
            dtype: DType::U8,
            peer: 7,
        };
        assert_eq!(to.check(0, 2), Err("peer 7 is not in 0..2".to_owned()));
        assert_eq!(to.to_string(), "send of 1 u8 to rank 7");
    }
}
