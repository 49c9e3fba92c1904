//! The collectives, by messages between two ranks.
//!
//! Not by MPI's own reductions: their order of summation depends on the library's choice of algorithm, and so do the
//! bits; 16-bit floats they do not know; and a pending `MPI_Iallreduce` cannot be given up. Each element is
//! reduced on one rank, in rank order, by the kernel that all groups use, so that MPI gives the bits that the host group has on one machine.
//!
//! Data goes in pieces through memory of the group's own, since MPI may go on to read and write what it was given long after an
//! operation has failed. A piece is reduced while the next is on its way. Its size keeps it in the cache, and all of MPI's counts
//! far below 2^31.

use super::{
    exchange::{Block, Operation, Pending},
    stages::Place,
};
use crate::group::{DType, GroupError, ReduceOp, Result, engine::Payload, reduce::reduce_into};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Sizes, the same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tuning {
    /// Bytes of a message at most.
    pub(super) message: usize,
    /// Bytes that travel with the descriptions of an operation, in place of a step of their own.
    pub(super) inline: usize,
}

impl Tuning {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            // What a piece has on its way on one rank stays within 2 MiB.
            message: ((2 << 20) / ranks).clamp(8 << 10, 128 << 10),
            // Every rank receives every rank's.
            inline: ((64 << 10) / ranks).clamp(256, 8 << 10),
        }
    }
}

/// MPI counts the bytes of a message in 31 bits.
pub(super) const LONGEST_MESSAGE: usize = 1 << 30;

/// Pieces sent ahead along the chain of a broadcast.
const AHEAD: usize = 4;

/// `bytes` in ranges of at most `message`.
fn ranges(bytes: usize, message: usize) -> impl Iterator<Item = Range<usize>> {
    (0..bytes.div_ceil(message)).map(move |k| k * message..((k + 1) * message).min(bytes))
}

impl Operation<'_> {
    pub(super) fn run(
        &mut self,
        payload: Payload<'_>,
        tuning: Tuning,
        place: &Place,
    ) -> Result<()> {
        let Tuning { message, inline } = tuning;
        match payload {
            Payload::AllReduce { data, dtype, op } if data.len() <= inline => {
                let blocks = self.meet(data, 0, inline)?;
                self.reduce(&blocks, 0, data, dtype, op)
            }
            Payload::AllReduce { data, dtype, op } => {
                self.meet(&[], 0, inline)?;
                self.all_reduce(data, dtype, op, message, place)
            }
            Payload::Broadcast { data, root } if data.len() <= inline => {
                let ours: &[u8] = if root == self.id.rank { data } else { &[] };
                let blocks = self.meet(ours, 0, inline)?;
                self.copy(&blocks[root], data)
            }
            Payload::Broadcast { data, root } => {
                self.meet(&[], 0, inline)?;
                self.broadcast(data, root, message)
            }
            Payload::AllGather { send, recv } if send.len() <= inline => {
                let blocks = self.meet(send, 0, inline)?;
                if send.is_empty() {
                    return Ok(());
                }
                let mut recv = blocks.iter().zip(recv.chunks_exact_mut(send.len()));
                recv.try_for_each(|(block, recv)| self.copy(block, recv))
            }
            Payload::AllGather { send, recv } => {
                self.meet(&[], 0, inline)?;
                self.all_gather(send, recv, message)
            }
            Payload::ReduceScatter {
                send,
                recv,
                dtype,
                op,
            } if send.len() <= inline => {
                let blocks = self.meet(send, 0, inline)?;
                self.reduce(&blocks, self.id.rank * recv.len(), recv, dtype, op)
            }
            Payload::ReduceScatter {
                send,
                recv,
                dtype,
                op,
            } => {
                self.meet(&[], 0, inline)?;
                self.reduce_scatter(send, recv, dtype, op, message)
            }
            Payload::Barrier => self.meet(&[], 0, inline).map(drop),
        }
    }

    /// A rank that describes the operation as this one does sends as much in line.
    fn payload<'a>(&self, block: &'a Block, range: Range<usize>) -> Result<&'a [u8]> {
        block.payload.get(range).ok_or_else(|| self.short())
    }

    pub(super) fn short(&self) -> GroupError {
        GroupError::Transport {
            rank: self.id.rank,
            operation: "reading a peer's data".into(),
            cause: "it is shorter than the operation: build all ranks from one version of burn-ddp"
                .into(),
        }
    }

    fn copy(&self, block: &Block, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(self.payload(block, 0..out.len())?);
        Ok(())
    }

    fn reduce(
        &self,
        blocks: &[Block],
        start: usize,
        out: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let range = start..start + out.len();
        let inputs = blocks
            .iter()
            .map(|block| self.payload(block, range.clone()));
        reduce_into(out, &inputs.collect::<Result<Vec<_>>>()?, dtype, op);
        Ok(())
    }

    /// Sends every rank its share, and expects this rank's of all others.
    fn scatter(&mut self, data: &[u8], of: impl Fn(usize) -> Range<usize>) -> Result<Pending> {
        let own = of(self.id.rank).len();
        let sends: Vec<_> = self
            .peers()
            .map(|peer| (peer, Arc::new(self.pool.copy(&data[of(peer)]))))
            .collect();
        let receives = self.peers().map(|peer| (peer, own));
        self.post(sends, receives)
    }

    /// Reduces this rank's share `own` with the peers' to `out`.
    fn gather_up(
        &mut self,
        pending: Pending,
        own: &[u8],
        out: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let received = self.wait(pending)?;
        let mut inputs = vec![own; self.id.world_size];
        for (peer, data) in &received {
            inputs[*peer] = data;
        }
        if !own.is_empty() {
            if inputs.iter().any(|input| input.len() != own.len()) {
                return Err(self.short());
            }
            reduce_into(out, &inputs, dtype, op);
        }
        for (_, data) in received {
            self.pool.put(data);
        }
        Ok(())
    }

    fn reduce_scatter(
        &mut self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
        message: usize,
    ) -> Result<()> {
        let (rank, block) = (self.id.rank, recv.len());
        let message = (message / dtype.size()).max(1) * dtype.size();
        let of = |range: &Range<usize>, k: usize| k * block + range.start..k * block + range.end;
        let mut scattered: Option<(Range<usize>, Pending)> = None;
        let mut ranges = ranges(block, message);
        loop {
            let posted = match ranges.next() {
                Some(range) => {
                    let pending = self.scatter(send, |k| of(&range, k))?;
                    Some((range, pending))
                }
                None => None,
            };
            match scattered.take() {
                Some((range, pending)) => {
                    let own = &send[of(&range, rank)];
                    self.gather_up(pending, own, &mut recv[range], dtype, op)?;
                }
                None if posted.is_none() => return Ok(()),
                None => {}
            }
            scattered = posted;
        }
    }

    /// Around the ring: every rank passes on what it gets, except the block that its next rank has sent. So a block crosses
    /// between two machines once.
    fn all_gather(&mut self, send: &[u8], recv: &mut [u8], message: usize) -> Result<()> {
        let (rank, ranks, block) = (self.id.rank, self.id.world_size, send.len());
        recv[rank * block..(rank + 1) * block].copy_from_slice(send);
        // In the order in which they come: those of the rank before, the rank before it, and so on.
        let parts = |from: usize| {
            (0..ranks - 1).flat_map(move |k| {
                let start = (from + ranks - k) % ranks * block;
                ranges(block, message).map(move |range| start + range.start..start + range.end)
            })
        };
        let (previous, next) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
        let mut expected = VecDeque::new();
        let mut sent = VecDeque::new();
        let mut ahead = parts(previous);
        let own = block.div_ceil(message);
        let pairs = parts(rank).zip(parts(previous)).enumerate();
        let mut arrived: VecDeque<Vec<u8>> = VecDeque::new();
        for (at, (going, coming)) in pairs {
            while expected.len() < AHEAD
                && let Some(range) = ahead.next()
            {
                expected.push_back(self.post([], [(previous, range.len())])?);
            }
            let piece = if at < own {
                self.pool.copy(&recv[going])
            } else {
                arrived.pop_front().ok_or_else(|| self.short())?
            };
            sent.push_back(self.post([(next, Arc::new(piece))], [])?);
            if sent.len() > AHEAD
                && let Some(oldest) = sent.pop_front()
            {
                self.wait(oldest)?;
            }
            let piece = self.next_piece(&mut expected, coming.len())?;
            recv[coming].copy_from_slice(&piece);
            arrived.push_back(piece);
        }
        sent.into_iter()
            .try_for_each(|piece| self.wait(piece).map(drop))?;
        arrived.into_iter().for_each(|piece| self.pool.put(piece));
        Ok(())
    }

    /// The oldest message that is expected.
    fn next_piece(&mut self, expected: &mut VecDeque<Pending>, length: usize) -> Result<Vec<u8>> {
        let pending = expected.pop_front().unwrap_or_default();
        let piece = self.wait(pending)?.pop().map(|(_, piece)| piece);
        let piece = piece.filter(|piece| piece.len() == length);
        piece.ok_or_else(|| self.short())
    }

    /// Along the chain root, root + 1, ..., piece after piece: every rank sends the data once, whatever their number.
    fn broadcast(&mut self, data: &mut [u8], root: usize, message: usize) -> Result<()> {
        let (rank, ranks) = (self.id.rank, self.id.world_size);
        let position = (rank + ranks - root) % ranks;
        let (previous, next) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
        let last = position + 1 == ranks;
        let mut expected = VecDeque::new();
        let mut sent = VecDeque::new();
        let mut ahead = ranges(data.len(), message);
        for range in ranges(data.len(), message) {
            let piece = if position == 0 {
                self.pool.copy(&data[range])
            } else {
                while expected.len() < AHEAD
                    && let Some(range) = ahead.next()
                {
                    expected.push_back(self.post([], [(previous, range.len())])?);
                }
                let piece = self.next_piece(&mut expected, range.len())?;
                data[range].copy_from_slice(&piece);
                piece
            };
            if last {
                self.pool.put(piece);
                continue;
            }
            sent.push_back(self.post([(next, Arc::new(piece))], [])?);
            if sent.len() > AHEAD
                && let Some(oldest) = sent.pop_front()
            {
                self.wait(oldest)?;
            }
        }
        sent.into_iter()
            .try_for_each(|piece| self.wait(piece).map(drop))
    }
}
