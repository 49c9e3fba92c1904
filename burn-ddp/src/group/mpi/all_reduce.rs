//! The all-reduce of long data: side by side within a machine, from machine to machine in rank order, and back.
//!
//! On one machine every rank reduces its share of each piece and sends it to all: 2 (n - 1) / n of the data each way, which is the
//! least (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005, section 4).
//!
//! On several, the sum of the ranks before goes on to the next machine's rank of the same lane, which adds its own machine's
//! inputs; the last one's result goes back the same way. So the data crosses between two machines once in each direction, which
//! networks carry at the same time, over as many connections as there are ranks on a machine, and the order of the sum is still that of
//! the ranks. Ranks that mpirun has dealt out to the machines in turn (`--map-by node`) are a chain of single ranks: right, but slower.

use super::{
    exchange::{Operation, Pending},
    stages::{Place, owner},
};
use crate::group::{
    DType, ReduceOp, Result,
    reduce::{accumulator_size, fold_into, reduce_into},
};
use std::{collections::VecDeque, ops::Range, sync::Arc};

/// Pieces between this machine and the last one at most.
const UNDER_WAY: usize = 32;

/// An interval of the data, divided among the lanes.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: usize,
    end: usize,
    /// Bytes of every lane but the last ones.
    share: usize,
}

impl Piece {
    fn of(&self, lane: usize) -> Range<usize> {
        let at = |k: usize| (self.start + k * self.share).min(self.end);
        at(lane)..at(lane + 1)
    }
}

/// `bytes` in pieces of which every lane has at most `message` bytes, a whole number of elements of `size` bytes.
fn pieces(bytes: usize, lanes: usize, message: usize, size: usize) -> impl Iterator<Item = Piece> {
    let most = (message / size).max(1) * size * lanes;
    (0..bytes.div_ceil(most)).map(move |k| {
        let (start, end) = (k * most, ((k + 1) * most).min(bytes));
        let share = ((end - start) / size).div_ceil(lanes) * size;
        Piece { start, end, share }
    })
}

/// The all-reduce of one buffer, between two ranks of which messages keep their order: everything is posted by ascending piece, within it by step,
/// and within that by ascending lane.
struct AllReduce<'a, 'b> {
    operation: &'a mut Operation<'b>,
    data: &'a mut [u8],
    place: &'a Place,
    dtype: DType,
    op: ReduceOp,
}

/// The results of this rank's lanes.
type Results = Vec<(usize, Vec<u8>)>;

impl Operation<'_> {
    pub(super) fn all_reduce(
        &mut self,
        data: &mut [u8],
        dtype: DType,
        op: ReduceOp,
        message: usize,
        place: &Place,
    ) -> Result<()> {
        let mut pieces = pieces(data.len(), place.lanes, message, dtype.size());
        let mut run = AllReduce {
            operation: self,
            data,
            place,
            dtype,
            op,
        };
        // A result comes back two steps for each stage behind this one after its piece went on.
        let window = (2 * place.behind).min(UNDER_WAY);
        let mut collected: Option<(Piece, Pending)> = None;
        let mut under_way: VecDeque<(Piece, Pending)> = VecDeque::new();
        let mut spread: Option<(Piece, Pending)> = None;
        loop {
            let posted = match pieces.next() {
                Some(piece) => Some((piece, run.collect(piece)?)),
                None => None,
            };
            let fed = posted.is_some() || collected.is_some();
            if !fed && under_way.is_empty() && spread.is_none() {
                return Ok(());
            }
            let mut done = None;
            if let Some((piece, pending)) = collected.take() {
                let folded = run.fold(piece, pending)?;
                match &place.next {
                    None => done = Some((piece, folded)),
                    Some(next) => under_way.push_back((piece, run.pass_on(piece, folded, next)?)),
                }
            }
            if (under_way.len() > window || !fed)
                && let Some((piece, pending)) = under_way.pop_front()
            {
                done = Some((piece, run.results(piece, pending)?));
            }
            let started = match done {
                Some((piece, results)) => Some((piece, run.spread(piece, results)?)),
                None => None,
            };
            if let Some((piece, pending)) = spread.take() {
                run.store(piece, pending)?;
            }
            (collected, spread) = (posted, started);
        }
    }
}

impl AllReduce<'_, '_> {
    fn rank(&self) -> usize {
        self.operation.id.rank
    }

    /// The lanes of `piece` that have data, of this rank or of its stage's other ranks.
    fn lanes(&self, piece: Piece, own: bool) -> Vec<usize> {
        let rank = self.rank();
        (0..self.place.lanes)
            .filter(|lane| !piece.of(*lane).is_empty())
            .filter(|lane| (owner(&self.place.stage, *lane) == rank) == own)
            .collect()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        self.place.stage.clone().filter(move |peer| *peer != rank)
    }

    /// Bytes of the sum so far of a share.
    fn carried(&self, share: &Range<usize>) -> usize {
        share.len() / self.dtype.size() * accumulator_size(self.dtype)
    }

    /// Sends this rank's inputs to those who reduce them, and expects what is for its own lanes.
    fn collect(&mut self, piece: Piece) -> Result<Pending> {
        let mut sends = Vec::new();
        for lane in self.lanes(piece, false) {
            let input = self.operation.pool.copy(&self.data[piece.of(lane)]);
            sends.push((owner(&self.place.stage, lane), Arc::new(input)));
        }
        let mut receives = Vec::new();
        for lane in self.lanes(piece, true) {
            let share = piece.of(lane);
            receives.extend(self.peers().map(|peer| (peer, share.len())));
            if let Some(previous) = &self.place.previous {
                receives.push((owner(previous, lane), self.carried(&share)));
            }
        }
        self.operation.post(sends, receives)
    }

    /// Adds this stage's inputs to the sum so far of each of this rank's lanes.
    fn fold(&mut self, piece: Piece, pending: Pending) -> Result<Results> {
        let mut received = self.operation.wait(pending)?.into_iter();
        let mut folded = Vec::new();
        for lane in self.lanes(piece, true) {
            let share = piece.of(lane);
            let peers: Vec<_> = received.by_ref().take(self.place.stage.len() - 1).collect();
            let mut inputs = vec![&self.data[share.clone()]; self.place.stage.len()];
            for (peer, data) in &peers {
                inputs[peer - self.place.stage.start] = data;
            }
            let carry = match self.place.previous {
                Some(_) => received.next().map(|(_, data)| data),
                None => None,
            };
            let carried = self.carried(&share);
            let complete = inputs.iter().all(|input| input.len() == share.len())
                && carry.as_ref().is_none_or(|carry| carry.len() == carried)
                && carry.is_some() == self.place.previous.is_some();
            if !complete {
                return Err(self.operation.short());
            }
            let last = self.place.next.is_none();
            let length = if last { share.len() } else { carried };
            let mut out = self.operation.pool.take(length);
            if self.place.is_alone() {
                reduce_into(&mut out, &inputs, self.dtype, self.op);
            } else {
                let ranks = last.then_some(self.operation.id.world_size);
                fold_into(
                    &mut out,
                    carry.as_deref(),
                    &inputs,
                    self.dtype,
                    self.op,
                    ranks,
                );
            }
            folded.push((lane, out));
            let used = peers.into_iter().map(|(_, data)| data).chain(carry);
            used.for_each(|memory| self.operation.pool.put(memory));
        }
        Ok(folded)
    }

    /// Sends the sums so far to the next stage, and expects the results.
    fn pass_on(&mut self, piece: Piece, folded: Results, next: &Range<usize>) -> Result<Pending> {
        let receives: Vec<_> = folded
            .iter()
            .map(|(lane, _)| (owner(next, *lane), piece.of(*lane).len()))
            .collect();
        let sends = folded
            .into_iter()
            .map(|(lane, sum)| (owner(next, lane), Arc::new(sum)));
        self.operation.post(sends, receives)
    }

    fn results(&mut self, piece: Piece, pending: Pending) -> Result<Results> {
        let received = self.operation.wait(pending)?;
        let lanes = self.lanes(piece, true).into_iter();
        Ok(lanes
            .zip(received.into_iter().map(|(_, data)| data))
            .collect())
    }

    /// Sends the results of this rank's lanes to its stage and to the previous one, and expects the other lanes'.
    fn spread(&mut self, piece: Piece, results: Results) -> Result<Pending> {
        let mut sends = Vec::new();
        for (lane, result) in results {
            let out = &mut self.data[piece.of(lane)];
            if out.len() != result.len() {
                return Err(self.operation.short());
            }
            out.copy_from_slice(&result);
            let result = Arc::new(result);
            let previous = self.place.previous.iter().map(|stage| owner(stage, lane));
            sends.extend(
                previous
                    .chain(self.peers())
                    .map(|peer| (peer, result.clone())),
            );
        }
        let others = self.lanes(piece, false).into_iter();
        let stage = &self.place.stage;
        let receives = others.map(|lane| (owner(stage, lane), piece.of(lane).len()));
        self.operation.post(sends, receives)
    }

    /// Takes the results of the other lanes.
    fn store(&mut self, piece: Piece, pending: Pending) -> Result<()> {
        let received = self.operation.wait(pending)?;
        for (lane, (_, result)) in self.lanes(piece, false).into_iter().zip(received) {
            let out = &mut self.data[piece.of(lane)];
            if out.len() != result.len() {
                return Err(self.operation.short());
            }
            out.copy_from_slice(&result);
            self.operation.pool.put(result);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ddp_37_pieces_have_whole_elements_and_all_of_them() {
        let shares = |bytes, lanes, message, size| -> Vec<Vec<Range<usize>>> {
            pieces(bytes, lanes, message, size)
                .map(|piece| (0..lanes).map(|k| piece.of(k)).collect())
                .collect()
        };
        // 10 elements of 4 bytes on 3 lanes, 2 elements a message: 6 and then 4, of which the last lane has none.
        assert_eq!(
            shares(40, 3, 11, 4),
            [[0..8, 8..16, 16..24], [24..32, 32..40, 40..40]]
        );
        // A message smaller than an element carries one.
        assert_eq!(shares(16, 2, 1, 8), [[0..8, 8..16]]);
        assert!(shares(0, 2, 8, 1).is_empty());
        // More than 2^32 elements in messages of 128 KiB: (2^33 + 4) bytes of two-byte elements on two lanes.
        let bytes = (1usize << 33) + 4;
        let last = pieces(bytes, 2, 128 << 10, 2).last();
        let last = last.map(|piece| (piece.of(0), piece.of(1)));
        let middle = (1 << 33) + 2;
        assert_eq!(last, Some((1 << 33..middle, middle..bytes)));
    }
}
