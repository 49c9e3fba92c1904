//! Bytes of any number between ranks, however slow the disk at one end is.

use crate::{
    ddp::Ddp,
    group::{DType, GroupError},
};

/// Sent in one broadcast.
const CHUNK: usize = 32 << 20;

/// Hands the root's `bytes` to `sink` in pieces, in order, on every rank. `len` is their number, known to all; `bytes` is
/// empty on the other ranks. Collective.
///
/// Nothing here has the operation time-out: what a sink or a source takes is waited for as long as its process lives.
pub(super) fn stream(
    ddp: &Ddp,
    root: usize,
    bytes: &[u8],
    len: u64,
    mut sink: impl FnMut(&[u8]),
) -> Result<(), GroupError> {
    let group = ddp.group();
    let is_root = group.rank() == root;
    let mut done = 0u64;
    while done < len {
        let size = (len - done).min(CHUNK as u64) as usize;
        let mut piece = match bytes.get(done as usize..).and_then(|rest| rest.get(..size)) {
            Some(piece) if is_root => piece.to_vec(),
            _ => vec![0; size],
        };
        group.monitored_barrier()?;
        group.broadcast(&mut piece, DType::U8, root)?;
        sink(&piece);
        done += size as u64;
    }
    Ok(())
}
