//! Bytes of different lengths from every rank to every rank, in large messages of bounded memory.

use crate::group::{DType, ProcessGroup, Result};

/// Bytes that one collective carries at the most, over all ranks. Large enough for any network; four times as much makes the step of a model
/// of 8 million parameters a tenth longer, because the received bytes have left the cache when they are copied out.
const CHUNK: usize = 8 << 20;

/// Every rank's `own`, of the length that `lengths` says, on every rank; collective.
///
/// As long as half of the ranks have something left they send at once, then the others one after the other, so that
/// at most as much is padding as is data.
pub(super) fn all_gather(
    group: &dyn ProcessGroup,
    own: Vec<u8>,
    lengths: &[usize],
) -> Result<Vec<Vec<u8>>> {
    all_gather_by(group, own, lengths, CHUNK)
}

fn all_gather_by(
    group: &dyn ProcessGroup,
    own: Vec<u8>,
    lengths: &[usize],
    chunk: usize,
) -> Result<Vec<Vec<u8>>> {
    let (rank, world) = (group.rank(), lengths.len());
    let share = (chunk / world).max(1);
    let mut all: Vec<Vec<u8>> = (0..world)
        .map(|peer| Vec::with_capacity(if peer == rank { 0 } else { lengths[peer] }))
        .collect();
    let (mut padded, mut received) = (Vec::new(), Vec::new());
    let mut done = 0;
    loop {
        let left = || lengths.iter().map(|length| length - length.min(&done));
        let senders = left().filter(|&left| left > 0).count();
        if senders == 0 || senders * 2 < world {
            break;
        }
        // Ends with the rank that has least, so that only those without data pad.
        let least = left().filter(|&left| left > 0).min().unwrap_or(0);
        let size = least.min(share);
        received.resize(world * size, 0);
        let send = match own.get(done..done + size) {
            Some(send) => send,
            None => {
                padded.resize(size, 0);
                &padded[..size]
            }
        };
        group.all_gather(send, &mut received, DType::U8)?;
        for (peer, bytes) in received.chunks_exact(size).enumerate() {
            if peer != rank && lengths[peer] > done {
                all[peer].extend_from_slice(bytes);
            }
        }
        done += size;
    }
    for (peer, &length) in lengths.iter().enumerate() {
        if length > done {
            let rest = own.get(done..).filter(|_| peer == rank);
            broadcast(group, rest, length - done, peer, chunk, |bytes| {
                if peer != rank {
                    all[peer].extend_from_slice(bytes);
                }
            })?;
        }
    }
    all[rank] = own;
    Ok(all)
}

/// `length` bytes of `root`, who gives them as `own`, piece by piece to `take` on every rank; collective.
pub(super) fn stream(
    group: &dyn ProcessGroup,
    own: Option<&[u8]>,
    length: usize,
    root: usize,
    take: impl FnMut(&[u8]),
) -> Result<()> {
    broadcast(group, own, length, root, CHUNK, take)
}

fn broadcast(
    group: &dyn ProcessGroup,
    own: Option<&[u8]>,
    length: usize,
    root: usize,
    chunk: usize,
    mut take: impl FnMut(&[u8]),
) -> Result<()> {
    let mut buffer = vec![0; length.min(chunk)];
    let mut start = 0;
    while start < length {
        let size = chunk.min(length - start);
        let buffer = &mut buffer[..size];
        if let Some(own) = own {
            buffer.copy_from_slice(&own[start..start + size]);
        }
        group.broadcast(buffer, DType::U8, root)?;
        take(buffer);
        start += size;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::group::thread::ThreadGroup;
    use std::thread;

    fn gathered(lengths: &[usize], chunk: usize) {
        let bytes = |rank: usize| -> Vec<u8> {
            (0..lengths[rank]).map(|i| (rank * 50 + i) as u8).collect()
        };
        let groups = ThreadGroup::new(lengths.len());
        thread::scope(|scope| {
            let run = |(rank, group): (usize, ThreadGroup)| {
                scope.spawn(move || all_gather_by(&group, bytes(rank), lengths, chunk).unwrap())
            };
            let ranks: Vec<_> = groups.into_iter().enumerate().map(run).collect();
            let expected: Vec<_> = (0..lengths.len()).map(bytes).collect();
            for rank in ranks {
                assert_eq!(rank.join().unwrap(), expected, "{lengths:?} by {chunk}");
            }
        });
    }

    #[test]
    fn every_rank_gets_all_bytes_whatever_their_lengths() {
        for chunk in [1, 4, 7, 1000] {
            for lengths in [
                vec![5],
                vec![0, 0],
                vec![8, 8, 8, 8],
                vec![0, 0, 0, 9],
                vec![3, 0, 0, 0, 1],
                vec![1, 20, 3, 4],
                vec![12, 0, 13],
            ] {
                gathered(&lengths, chunk);
            }
        }
    }
}
