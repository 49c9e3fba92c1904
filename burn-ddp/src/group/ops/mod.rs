//! What all groups do alike around a collective: check its arguments, describe it, compare the
//! ranks' descriptions.

mod words;

pub(crate) use words::{DESCRIPTOR_WORDS, decode, encode};

use super::{DType, GroupError, OpDescriptor, OpKind, ReduceOp, Result};

/// Who a group's operations belong to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) job: u64,
    pub(crate) generation: u32,
    pub(crate) group: u32,
}

/// A collective whose arguments have been checked.
///
/// The constructors return [`GroupError::InvalidArgument`] and nothing else. They are called before
/// the operation takes its sequence number, so that a refused call leaves no trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    kind: OpKind,
    dtype: DType,
    count: u64,
    buffer: u32,
    /// Whether it has to end within the operation time-out. Of no concern to the peers.
    limited: bool,
}

impl Identity {
    /// The description of `call` as this rank's operation `sequence`.
    pub(crate) fn describe(&self, call: Call, sequence: u64) -> OpDescriptor {
        OpDescriptor {
            job: self.job,
            generation: self.generation,
            group: self.group,
            sequence,
            kind: call.kind,
            dtype: call.dtype,
            count: call.count,
            buffer: call.buffer,
        }
    }

    /// An error unless all ranks are in the same operation. Every rank finds some rank that differs
    /// from itself as soon as any two differ, so all of them fail. `name` is how errors call a rank.
    pub(crate) fn compare(
        &self,
        ours: &OpDescriptor,
        theirs: impl Iterator<Item = OpDescriptor>,
        name: impl Fn(usize) -> usize,
    ) -> Result<()> {
        match theirs.enumerate().find(|(_, theirs)| theirs != ours) {
            None => Ok(()),
            Some((peer, theirs)) => Err(GroupError::Mismatch {
                rank: name(self.rank),
                peer: name(peer),
                ours: Box::new(*ours),
                theirs: Box::new(theirs),
            }),
        }
    }

    /// This rank's view of a failure that `origin` met first.
    pub(crate) fn view(&self, origin: usize, error: &GroupError) -> GroupError {
        if origin == self.rank {
            return error.clone();
        }
        let reason = match error {
            GroupError::Aborted { reason, .. } => reason.clone(),
            other => other.to_string(),
        };
        GroupError::aborted(self.rank, origin, reason)
    }

    fn invalid(&self, kind: OpKind, cause: String) -> GroupError {
        GroupError::InvalidArgument {
            rank: self.rank,
            operation: kind.to_string(),
            cause,
        }
    }

    fn elements(&self, kind: OpKind, bytes: usize, dtype: DType) -> Result<u64> {
        if !bytes.is_multiple_of(dtype.size()) {
            let size = dtype.size();
            return Err(self.invalid(
                kind,
                format!("{bytes} bytes are not a whole number of {dtype} elements of {size} bytes"),
            ));
        }
        Ok((bytes / dtype.size()) as u64)
    }

    fn reducible(&self, kind: OpKind, dtype: DType, op: ReduceOp) -> Result<()> {
        let float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16);
        if op == ReduceOp::Mean && !float {
            return Err(self.invalid(
                kind,
                format!("a mean of {dtype} is not defined: reduce the sum and divide it"),
            ));
        }
        Ok(())
    }

    /// `whole` must be `world_size` times `block`.
    fn blocks(
        &self,
        kind: OpKind,
        (whole_name, whole): (&str, usize),
        (block_name, block): (&str, usize),
    ) -> Result<()> {
        if block.checked_mul(self.world_size) != Some(whole) {
            let ranks = self.world_size;
            return Err(self.invalid(
                kind,
                format!(
                    "`{whole_name}` has {whole} bytes, which is not {ranks} ranks times the {block} \
                     bytes of `{block_name}`"
                ),
            ));
        }
        Ok(())
    }
}

impl Call {
    pub(crate) fn all_reduce(
        id: &Identity,
        buffer: u32,
        bytes: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Self> {
        let kind = OpKind::AllReduce(op);
        id.reducible(kind, dtype, op)?;
        Ok(Self {
            kind,
            dtype,
            count: id.elements(kind, bytes, dtype)?,
            buffer,
            limited: true,
        })
    }

    pub(crate) fn broadcast(
        id: &Identity,
        bytes: usize,
        dtype: DType,
        root: usize,
    ) -> Result<Self> {
        let kind = OpKind::Broadcast { root };
        if root >= id.world_size {
            let last = id.world_size - 1;
            return Err(id.invalid(kind, format!("the group has the ranks 0 to {last}")));
        }
        Ok(Self {
            kind,
            dtype,
            count: id.elements(kind, bytes, dtype)?,
            buffer: 0,
            limited: true,
        })
    }

    pub(crate) fn all_gather(
        id: &Identity,
        send: usize,
        recv: usize,
        dtype: DType,
    ) -> Result<Self> {
        let kind = OpKind::AllGather;
        id.blocks(kind, ("recv", recv), ("send", send))?;
        Ok(Self {
            kind,
            dtype,
            count: id.elements(kind, send, dtype)?,
            buffer: 0,
            limited: true,
        })
    }

    pub(crate) fn reduce_scatter(
        id: &Identity,
        send: usize,
        recv: usize,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<Self> {
        let kind = OpKind::ReduceScatter(op);
        id.reducible(kind, dtype, op)?;
        id.blocks(kind, ("send", send), ("recv", recv))?;
        id.elements(kind, recv, dtype)?;
        Ok(Self {
            kind,
            dtype,
            count: id.elements(kind, send, dtype)?,
            buffer: 0,
            limited: true,
        })
    }

    pub(crate) fn barrier() -> Self {
        Self {
            kind: OpKind::Barrier,
            dtype: DType::U8,
            count: 0,
            buffer: 0,
            limited: true,
        }
    }

    /// A barrier that waits as long as its peers live.
    pub(crate) fn monitored_barrier() -> Self {
        Self {
            limited: false,
            ..Self::barrier()
        }
    }

    /// Whether the operation time-out counts.
    pub(crate) fn is_limited(&self) -> bool {
        self.limited
    }

    /// The reservation of group buffer number `buffer`.
    pub(crate) fn buffer(buffer: u32, bytes: usize) -> Self {
        Self {
            kind: OpKind::Buffer,
            dtype: DType::U8,
            count: bytes as u64,
            buffer,
            limited: true,
        }
    }

    pub(crate) fn new_group() -> Self {
        Self {
            kind: OpKind::NewGroup,
            dtype: DType::U8,
            count: 0,
            buffer: 0,
            limited: true,
        }
    }

    /// For the first `bytes` bytes of a group buffer of `reserved` bytes.
    pub(crate) fn within(self, id: &Identity, bytes: usize, reserved: usize) -> Result<Self> {
        if bytes > reserved {
            return Err(id.invalid(
                self.kind,
                format!("{bytes} bytes of a buffer that has {reserved}"),
            ));
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests;
