//! What all groups do alike around a collective: check its arguments, describe it, compare the
//! ranks' descriptions.

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

/// Words of an encoded descriptor.
pub(crate) const DESCRIPTOR_WORDS: usize = 6;

/// The fixed form of a descriptor in the header of a message.
pub(crate) fn encode(d: &OpDescriptor) -> [u64; DESCRIPTOR_WORDS] {
    let (kind, op, root) = match d.kind {
        OpKind::AllReduce(op) => (1, op as u64, 0),
        OpKind::Broadcast { root } => (2, 0, root as u64),
        OpKind::AllGather => (3, 0, 0),
        OpKind::ReduceScatter(op) => (4, op as u64, 0),
        OpKind::Barrier => (5, 0, 0),
        OpKind::Buffer => (6, 0, 0),
        OpKind::NewGroup => (7, 0, 0),
    };
    let codes = kind | op << 8 | (d.dtype as u64) << 16 | u64::from(d.buffer) << 32;
    let domain = u64::from(d.generation) << 32 | u64::from(d.group);
    [d.job, domain, d.sequence, codes, root, d.count]
}

/// The inverse of [`encode`]; `None` for words that it never makes.
pub(crate) fn decode(words: &[u64; DESCRIPTOR_WORDS]) -> Option<OpDescriptor> {
    let [job, domain, sequence, codes, root, count] = *words;
    let [kind, op, dtype, ..] = codes.to_le_bytes();
    Some(OpDescriptor {
        job,
        generation: (domain >> 32) as u32,
        group: domain as u32,
        sequence,
        kind: match kind {
            1 => OpKind::AllReduce(ReduceOp::from_u8(op)?),
            2 => OpKind::Broadcast {
                root: usize::try_from(root).ok()?,
            },
            3 => OpKind::AllGather,
            4 => OpKind::ReduceScatter(ReduceOp::from_u8(op)?),
            5 => OpKind::Barrier,
            6 => OpKind::Buffer,
            7 => OpKind::NewGroup,
            _ => return None,
        },
        dtype: DType::from_u8(dtype)?,
        count,
        buffer: (codes >> 32) as u32,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn id() -> Identity {
        Identity {
            rank: 1,
            world_size: 3,
            job: u64::MAX,
            generation: 7,
            group: 9,
        }
    }

    #[test]
    fn descriptor_survives_its_header() {
        let calls = [
            Call::all_reduce(&id(), u32::MAX, 40, DType::F32, ReduceOp::Product).unwrap(),
            Call::broadcast(&id(), 2, DType::BF16, 2).unwrap(),
            Call::all_gather(&id(), 8, 24, DType::I64).unwrap(),
            Call::reduce_scatter(&id(), 24, 8, DType::F64, ReduceOp::Mean).unwrap(),
            Call::barrier(),
            Call::buffer(3, 100),
            Call::new_group(),
        ];
        for (sequence, call) in calls.into_iter().enumerate() {
            let d = id().describe(call, sequence as u64);
            assert_eq!(decode(&encode(&d)), Some(d));
        }
    }

    #[test]
    fn ddp_37_counts_beyond_32_bits() {
        let count = (1u64 << 32) + 1;
        let d = OpDescriptor {
            count,
            ..id().describe(Call::barrier(), u64::MAX)
        };
        assert_eq!(decode(&encode(&d)).unwrap().count, 4_294_967_297);
    }

    #[test]
    fn words_that_no_rank_writes_are_refused() {
        let good = encode(&id().describe(Call::barrier(), 0));
        for codes in [0, 0xff, 5, 5 | 0xff << 16, 1 | 1 << 16] {
            let mut words = good;
            words[3] = codes;
            assert_eq!(decode(&words), None, "{codes:x}");
        }
    }

    #[test]
    fn arguments() {
        let cause = |e: Result<Call>| match e {
            Err(GroupError::InvalidArgument { rank: 1, cause, .. }) => cause,
            other => unreachable!("{other:?}"),
        };
        assert_eq!(
            cause(Call::all_reduce(&id(), 0, 7, DType::F32, ReduceOp::Sum)),
            "7 bytes are not a whole number of f32 elements of 4 bytes"
        );
        assert_eq!(
            cause(Call::all_reduce(&id(), 0, 8, DType::I64, ReduceOp::Mean)),
            "a mean of i64 is not defined: reduce the sum and divide it"
        );
        assert_eq!(
            cause(Call::broadcast(&id(), 8, DType::U8, 3)),
            "the group has the ranks 0 to 2"
        );
        assert_eq!(
            cause(Call::all_gather(&id(), 8, 16, DType::U8)),
            "`recv` has 16 bytes, which is not 3 ranks times the 8 bytes of `send`"
        );
        assert_eq!(
            cause(Call::reduce_scatter(&id(), 6, 2, DType::F32, ReduceOp::Sum)),
            "2 bytes are not a whole number of f32 elements of 4 bytes"
        );
        let call = Call::all_reduce(&id(), 1, 8, DType::F32, ReduceOp::Sum).unwrap();
        assert_eq!(
            cause(call.within(&id(), 8, 4)),
            "8 bytes of a buffer that has 4"
        );
        assert_eq!(call.within(&id(), 8, 8).unwrap().count, 2);
    }

    #[test]
    fn every_rank_sees_a_difference() {
        let at = |rank, sequence| {
            let id = Identity { rank, ..id() };
            let all = [0, 0, 1].map(|s| id.describe(Call::barrier(), s));
            id.compare(
                &id.describe(Call::barrier(), sequence),
                all.into_iter(),
                |rank| rank,
            )
        };
        for (rank, sequence, expected) in [(0, 0, 2), (1, 0, 2), (2, 1, 0)] {
            assert!(
                matches!(at(rank, sequence), Err(GroupError::Mismatch { peer, .. }) if peer == expected)
            );
        }
    }
}
