//! The fixed form of a descriptor in the header of a message.

use super::super::{DType, OpDescriptor, OpKind, ReduceOp};

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
