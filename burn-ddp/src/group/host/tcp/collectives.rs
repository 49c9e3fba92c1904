//! The collectives as steps of all-to-all exchanges.
//!
//! All-reduce of small data: everyone sends all to everyone and reduces it alone, one step. Of larger data:
//! a direct reduce-scatter (rank j receives slice j from all and reduces it in rank order) and an
//! all-gather of the results, by segments, where the gather of one segment shares its step with the scatter of the
//! next. Either way an element is reduced in rank order by the same kernel, so the bits do not depend on the path.
//!
//! The two-phase scheme is Rabenseifner's ("Optimization of Collective Reduction Operations", ICCS 2004), with direct
//! exchange in place of recursive halving: among the few ranks of a host, one hop matters more than many messages.

use super::exchange::{Exchange, Transfer};
use crate::group::{
    DType, GroupError, ReduceOp, Result, engine::Collectives, heap::HeapBytes, reduce::reduce_into,
};
use std::ops::Range;

/// Sizes that decide the path, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    /// Up to this size an all-reduce is one step.
    pub(super) small: usize,
    /// What one step of a larger operation covers, over all ranks.
    pub(super) segment: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            small: 16 << 10,
            segment: 4 << 20,
        }
    }
}

/// Memory for the peers' contributions, kept between operations.
#[derive(Debug, Default)]
pub(super) struct Scratch(HeapBytes);

impl Scratch {
    /// `ranks` blocks of `block` bytes.
    fn blocks(&mut self, rank: usize, ranks: usize, block: usize) -> Result<Vec<&mut [u8]>> {
        let bytes = ranks.saturating_mul(block);
        if self.0.as_slice().len() < bytes {
            self.0 = HeapBytes::new(bytes).ok_or_else(|| GroupError::Transport {
                rank,
                operation: format!("reserving {bytes} bytes for the peers' data"),
                cause: "out of memory".into(),
            })?;
        }
        let whole = &mut self.0.as_mut_slice()[..bytes];
        Ok(split(whole, (0..ranks).map(|k| k * block..(k + 1) * block)))
    }
}

pub(super) struct Collective<'a> {
    pub(super) exchange: Exchange<'a>,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) tuning: Tuning,
    pub(super) scratch: &'a mut Scratch,
}

impl Collectives for Collective<'_> {
    fn all_reduce(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        if data.len() <= self.tuning.small {
            let mut inputs = self.scratch.blocks(self.rank, self.ranks, data.len())?;
            inputs[self.rank].copy_from_slice(data);
            let ours = &*data;
            Self::trade(
                &mut self.exchange,
                self.rank,
                |_| ours,
                inputs.iter_mut().map(|input| &mut **input),
            )?;
            reduce(data, &inputs, dtype, op);
            return Ok(());
        }
        let mut segments = data.chunks_mut(self.piece(dtype) * self.ranks);
        // The segment whose own slice is reduced and whose other slices are on their way.
        let mut before: Option<&mut [u8]> = None;
        loop {
            let mut now = segments.next();
            if before.is_none() && now.is_none() {
                return Ok(());
            }
            self.pipelined_step(before.take(), now.as_deref_mut(), dtype, op)?;
            before = now;
        }
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<()> {
        if root == self.rank {
            let data = &*data;
            let nothing = (0..self.ranks).map(|_| &mut [][..]);
            return Self::trade(&mut self.exchange, self.rank, |_| data, nothing);
        }
        let mut data = Some(data);
        // Everyone's header comes too: a rank that differs is seen by all.
        let recv = (0..self.ranks).map(|peer| data.take_if(|_| peer == root).unwrap_or_default());
        Self::trade(&mut self.exchange, self.rank, |_| &[], recv)
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let block = send.len();
        recv[self.rank * block..][..block].copy_from_slice(send);
        let blocks = split(recv, (0..self.ranks).map(|k| k * block..(k + 1) * block));
        Self::trade(&mut self.exchange, self.rank, |_| send, blocks.into_iter())
    }

    fn reduce_scatter(
        &mut self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let block = recv.len();
        let mut pieces = recv.chunks_mut(self.piece(dtype)).enumerate().peekable();
        if pieces.peek().is_none() {
            return self.meet();
        }
        for (index, out) in pieces {
            let start = index * self.piece(dtype);
            let mut inputs = self.scratch.blocks(self.rank, self.ranks, out.len())?;
            let part = |peer: usize| &send[peer * block + start..][..out.len()];
            inputs[self.rank].copy_from_slice(part(self.rank));
            Self::trade(
                &mut self.exchange,
                self.rank,
                part,
                inputs.iter_mut().map(|input| &mut **input),
            )?;
            reduce(out, &inputs, dtype, op);
        }
        Ok(())
    }

    fn barrier(&mut self) -> Result<()> {
        self.meet()
    }
}

impl Collective<'_> {
    /// A step with at most one piece each way: what `send` gives for a peer against its block of `recv`.
    fn trade<'b>(
        exchange: &mut Exchange<'_>,
        rank: usize,
        send: impl Fn(usize) -> &'b [u8],
        recv: impl Iterator<Item = &'b mut [u8]>,
    ) -> Result<()> {
        let transfers = recv.enumerate().filter(|(peer, _)| *peer != rank);
        exchange.step(
            transfers
                .map(|(peer, recv)| Transfer {
                    peer,
                    send: [send(peer), &[]],
                    recv: [recv, &mut []],
                })
                .collect(),
        )
    }

    /// Compares descriptors and nothing else.
    fn meet(&mut self) -> Result<()> {
        let nothing = (0..self.ranks).map(|_| &mut [][..]);
        Self::trade(&mut self.exchange, self.rank, |_| &[], nothing)
    }

    /// One rank's share of a segment, at least one element.
    fn piece(&self, dtype: DType) -> usize {
        (self.tuning.segment / self.ranks / dtype.size()).max(1) * dtype.size()
    }

    /// Gathers the results of segment `before` and scatters segment `now`, then reduces the own slice of `now`.
    fn pipelined_step(
        &mut self,
        before: Option<&mut [u8]>,
        now: Option<&mut [u8]>,
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (rank, ranks) = (self.rank, self.ranks);
        let mut gathered = slices(before.unwrap_or_default(), ranks, dtype);
        let mut scattered = slices(now.unwrap_or_default(), ranks, dtype);
        let own = std::mem::take(&mut scattered[rank]);
        let mut inputs = self.scratch.blocks(rank, ranks, own.len())?;
        inputs[rank].copy_from_slice(own);

        let result = &*std::mem::take(&mut gathered[rank]);
        let transfers = gathered
            .into_iter()
            .zip(&scattered)
            .zip(&mut inputs)
            .enumerate();
        let transfers = transfers.filter(|(peer, _)| *peer != rank).map(
            |(peer, ((gathered, scattered), input))| Transfer {
                peer,
                send: [result, scattered],
                recv: [gathered, input],
            },
        );
        self.exchange.step(transfers.collect())?;
        reduce(own, &inputs, dtype, op);
        Ok(())
    }
}

fn reduce(out: &mut [u8], inputs: &[&mut [u8]], dtype: DType, op: ReduceOp) {
    let inputs: Vec<&[u8]> = inputs.iter().map(|input| &**input).collect();
    reduce_into(out, &inputs, dtype, op);
}

/// One slice for each rank, of whole elements, equal to within one element.
fn slices(segment: &mut [u8], ranks: usize, dtype: DType) -> Vec<&mut [u8]> {
    let elements = segment.len() / dtype.size();
    let bound = |k: usize| {
        let (share, rest) = (elements / ranks, elements % ranks);
        (k * share + k.min(rest)) * dtype.size()
    };
    split(segment, (0..ranks).map(|k| bound(k)..bound(k + 1)))
}

/// Adjoining ranges that begin at 0.
fn split(mut whole: &mut [u8], ranges: impl Iterator<Item = Range<usize>>) -> Vec<&mut [u8]> {
    let mut parts = Vec::with_capacity(ranges.size_hint().0);
    for range in ranges {
        let (part, rest) = whole.split_at_mut(range.len());
        parts.push(part);
        whole = rest;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cover_a_segment_by_whole_elements() {
        let lengths = |bytes: usize, ranks| {
            let mut memory = vec![0; bytes];
            slices(&mut memory, ranks, DType::F32)
                .iter()
                .map(|part| part.len())
                .collect::<Vec<_>>()
        };
        // 7 elements over 3 ranks: 3, 2, 2.
        assert_eq!(lengths(28, 3), [12, 8, 8]);
        // Fewer elements than ranks, and none.
        assert_eq!(lengths(8, 4), [4, 4, 0, 0]);
        assert_eq!(lengths(0, 2), [0, 0]);
    }
}
