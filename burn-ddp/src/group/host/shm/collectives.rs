//! The collectives on the caller's memory, as rounds.
//!
//! Large operations run in pieces that stay in the cache; a piece takes one round, and since a rank
//! may enter the next round while others still read the last, copying and reducing overlap between ranks.

use super::{
    rounds::{Rounds, corrupt},
    wait::Patience,
};
use crate::group::{
    DType, OpDescriptor, ReduceOp, Result, engine::Collectives, ops::Identity, reduce::reduce_into,
};
use std::ops::Range;

/// Slices start on a line, which is also a whole number of elements of every type.
pub(super) const LINE: usize = 64;

/// One operation under way.
pub(in crate::group::host) struct Operation<'a> {
    pub(super) id: Identity,
    pub(super) rounds: &'a mut Rounds,
    pub(super) descriptor: OpDescriptor,
    pub(super) patience: Patience<'a>,
    /// Up to how many bytes every rank reduces everything.
    pub(super) one_shot: usize,
    pub(super) compared: bool,
}

/// Rank `rank`'s share of `bytes` bytes.
pub(in crate::group::host) fn share(bytes: usize, ranks: usize, rank: usize) -> Range<usize> {
    let size = share_size(bytes, ranks);
    let at = |rank: usize| (rank * size).min(bytes);
    at(rank)..at(rank + 1)
}

/// The largest rank's share.
pub(super) fn share_size(bytes: usize, ranks: usize) -> usize {
    bytes.div_ceil(ranks).next_multiple_of(LINE)
}

/// The part of `bytes` that piece `k` covers.
pub(super) fn piece(k: usize, size: usize, bytes: usize) -> Range<usize> {
    (k * size).min(bytes)..((k + 1) * size).min(bytes)
}

/// Pieces of `bytes`, one at least: every operation has a round.
pub(super) fn pieces(size: usize, bytes: usize) -> usize {
    bytes.div_ceil(size).max(1)
}

impl Collectives for Operation<'_> {
    fn all_reduce(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        if data.len() <= self.one_shot {
            return self.all_reduce_small(data, dtype, op);
        }
        let (me, ranks) = (self.id.rank, self.id.world_size);
        let size = piece_size(self.rounds.payload(), ranks);
        let count = pieces(size, data.len());
        // In round k the inputs of piece k travel beside the results of piece k - 1.
        for k in 0..=count {
            let (peers, own) = self.rounds.split();
            let (inputs, results) = own.split_at_mut(size);
            if k < count {
                let data = &data[piece(k, size, data.len())];
                for rank in (0..ranks).filter(|rank| *rank != me) {
                    let range = share(data.len(), ranks, rank);
                    inputs[range.clone()].copy_from_slice(&data[range]);
                }
            }
            if k > 0 {
                let data = &data[piece(k - 1, size, data.len())];
                let range = share(data.len(), ranks, me);
                let inputs: Vec<&[u8]> = (0..ranks)
                    .map(|rank| if rank == me { data } else { peers.area(rank) })
                    .map(|input| &input[range.clone()])
                    .collect();
                reduce_into(&mut results[..range.len()], &inputs, dtype, op);
            }
            self.advance()?;
            if k > 0 {
                let range = piece(k - 1, size, data.len());
                let data = &mut data[range];
                let peers = self.rounds.peers();
                for rank in 0..ranks {
                    let range = share(data.len(), ranks, rank);
                    let results = &peers.area(rank)[size..][..range.len()];
                    data[range].copy_from_slice(results);
                }
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<()> {
        let size = self.rounds.payload();
        for k in 0..pieces(size, data.len()) {
            let range = piece(k, size, data.len());
            let data = &mut data[range];
            if self.id.rank == root {
                self.rounds.split().1[..data.len()].copy_from_slice(data);
            }
            self.advance()?;
            if self.id.rank != root {
                data.copy_from_slice(&self.rounds.peers().area(root)[..data.len()]);
            }
        }
        Ok(())
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let size = self.rounds.payload();
        let block = send.len();
        for k in 0..pieces(size, block) {
            let range = piece(k, size, block);
            self.rounds.split().1[..range.len()].copy_from_slice(&send[range.clone()]);
            self.advance()?;
            let peers = self.rounds.peers();
            for rank in 0..self.id.world_size {
                let to = &mut recv[rank * block..][range.clone()];
                to.copy_from_slice(&peers.area(rank)[..range.len()]);
            }
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (me, ranks) = (self.id.rank, self.id.world_size);
        // A piece of every block fits an area.
        let size = self.rounds.payload() / ranks / LINE * LINE;
        let block = recv.len();
        for k in 0..pieces(size, block) {
            let range = piece(k, size, block);
            let (_, own) = self.rounds.split();
            for rank in (0..ranks).filter(|rank| *rank != me) {
                let from = &send[rank * block..][range.clone()];
                own[rank * size..][..range.len()].copy_from_slice(from);
            }
            self.advance()?;
            let peers = self.rounds.peers();
            let input = |rank: usize| match rank == me {
                true => &send[me * block..][range.clone()],
                false => &peers.area(rank)[me * size..][..range.len()],
            };
            let inputs: Vec<&[u8]> = (0..ranks).map(input).collect();
            reduce_into(&mut recv[range.clone()], &inputs, dtype, op);
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<()> {
        self.advance()
    }
}

impl Operation<'_> {
    /// Ends a round. The first one compares the descriptors, before any payload is used.
    pub(in crate::group::host) fn advance(&mut self) -> Result<()> {
        self.rounds.advance(&self.patience)?;
        if !std::mem::replace(&mut self.compared, true) {
            let name = |rank| self.patience.name(rank);
            let all: Option<Vec<_>> = self.rounds.descriptors().collect();
            let Some(all) = all else {
                let peer = self
                    .rounds
                    .descriptors()
                    .position(|d| d.is_none())
                    .unwrap_or_default();
                return Err(corrupt(name(self.id.rank), name(peer), &self.descriptor));
            };
            self.id.compare(&self.descriptor, all.into_iter(), name)?;
        }
        Ok(())
    }

    /// One round: every rank reduces everything, in the same order and hence to the same bits.
    fn all_reduce_small(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let len = data.len();
        self.rounds.split().1[..len].copy_from_slice(data);
        self.advance()?;
        let peers = self.rounds.peers();
        let inputs: Vec<&[u8]> = (0..self.id.world_size)
            .map(|rank| &peers.area(rank)[..len])
            .collect();
        reduce_into(data, &inputs, dtype, op);
        Ok(())
    }

    /// Gathers a message of every rank, in rank order; the lengths may differ.
    pub(super) fn exchange(&mut self, message: &[u8]) -> Result<Vec<Vec<u8>>> {
        const LENGTH: usize = size_of::<u64>();
        let (_, own) = self.rounds.split();
        // Long messages are error texts; what fits of them is enough.
        let len = message.len().min(own.len() - LENGTH);
        own[..LENGTH].copy_from_slice(&(len as u64).to_ne_bytes());
        own[LENGTH..][..len].copy_from_slice(&message[..len]);
        self.advance()?;
        let peers = self.rounds.peers();
        let read = |rank| {
            let (len, text) = peers
                .area(rank)
                .split_first_chunk()
                .unwrap_or((&[0; LENGTH], &[]));
            text[..text.len().min(u64::from_ne_bytes(*len) as usize)].to_vec()
        };
        Ok((0..self.id.world_size).map(read).collect())
    }
}

/// The payload of an area for pieces of `size` bytes: a piece, and this rank's share of another.
pub(super) fn payload_size(size: usize, ranks: usize) -> usize {
    size + share_size(size, ranks)
}

/// The inverse of [`payload_size`], for sizes that are a multiple of `ranks` lines.
fn piece_size(payload: usize, ranks: usize) -> usize {
    payload / (ranks + 1) * ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        for ranks in 1..=5 {
            for bytes in [0, 1, 63, 64, 65, 128, 1000, 4096] {
                let mut end = 0;
                for rank in 0..ranks {
                    let share = share(bytes, ranks, rank);
                    assert_eq!(share.start, end);
                    assert!(share.len() <= share_size(bytes, ranks));
                    end = share.end;
                }
                assert_eq!(end, bytes);
            }
        }
        assert_eq!(share(200, 2, 0), 0..128);
        assert_eq!(share(200, 2, 1), 128..200);
        assert_eq!(share(64, 3, 2), 64..64);
    }

    #[test]
    fn pieces_and_payload_fit() {
        for ranks in 1..=64 {
            let size = 7 * ranks * LINE;
            assert_eq!(piece_size(payload_size(size, ranks), ranks), size);
        }
        assert_eq!(pieces(64, 0), 1);
        assert_eq!(pieces(64, 64), 1);
        assert_eq!(pieces(64, 65), 2);
        assert_eq!(piece(1, 64, 65), 64..65);
    }
}
