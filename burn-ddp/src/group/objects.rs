//! Byte strings of different lengths between ranks.

use super::{DType, ProcessGroup, Result};

/// Every rank's `bytes`, in rank order. Collective.
pub(crate) fn gather(group: &dyn ProcessGroup, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let world = group.world_size();
    let mut lengths = vec![0u64; world];
    let length = [bytes.len() as u64];
    group.all_gather(
        bytemuck::cast_slice(&length),
        bytemuck::cast_slice_mut(&mut lengths),
        DType::U64,
    )?;
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    let mut padded = bytes.to_vec();
    padded.resize(longest, 0);
    let mut all = vec![0; longest * world];
    group.all_gather(&padded, &mut all, DType::U8)?;
    let slice = |(rank, &length): (usize, &u64)| all[rank * longest..][..length as usize].to_vec();
    Ok(lengths.iter().enumerate().map(slice).collect())
}

/// The root's bytes on every rank. Collective.
pub(crate) fn broadcast(group: &dyn ProcessGroup, bytes: &mut Vec<u8>, root: usize) -> Result<()> {
    let mut length = [bytes.len() as u64];
    group.broadcast(bytemuck::cast_slice_mut(&mut length), DType::U64, root)?;
    bytes.resize(length[0] as usize, 0);
    group.broadcast(bytes, DType::U8, root)
}
