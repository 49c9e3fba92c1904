//! An all-reduce cut in two, for ranks that go on between the halves: some of them own shards, reduce them over the
//! machine, take them elsewhere, and hand the results out.

use super::collectives::{LINE, Operation, piece, pieces};
use crate::group::{DType, ReduceOp, Result, host::spans::Spans, reduce::reduce_scaled};

impl Operation<'_> {
    /// Leaves in the memory of each owner (rank `k` owns `shards[k]`) the reduction of its shard over the ranks; a
    /// mean divides by `divisor`. The other bytes of `data` stay as they are.
    pub(in crate::group::host) fn reduce_to_owners(
        &mut self,
        data: &mut [u8],
        shards: &[Spans],
        dtype: DType,
        op: ReduceOp,
        divisor: usize,
    ) -> Result<()> {
        let (me, ranks) = (self.id.rank, self.id.world_size);
        // A piece of every shard fits an area.
        let size = self.rounds.payload() / shards.len() / LINE * LINE;
        let longest = shards.iter().map(Spans::len).max().unwrap_or_default();
        for k in 0..pieces(size, longest) {
            let (_, own) = self.rounds.split();
            for (owner, shard) in shards.iter().enumerate() {
                for (at, range) in shard.within(piece(k, size, shard.len())) {
                    own[owner * size + at..][..range.len()].copy_from_slice(&data[range]);
                }
            }
            self.advance()?;
            let Some(shard) = shards.get(me) else {
                continue;
            };
            let peers = self.rounds.peers();
            for (at, range) in shard.within(piece(k, size, shard.len())) {
                let input = |rank| &peers.area(rank)[me * size + at..][..range.len()];
                let inputs: Vec<&[u8]> = (0..ranks).map(input).collect();
                reduce_scaled(&mut data[range], &inputs, dtype, op, divisor);
            }
        }
        Ok(())
    }

    /// Gives the bytes of `shards[k]` that rank `k` has to all ranks.
    pub(in crate::group::host) fn share(
        &mut self,
        data: &mut [u8],
        shards: &[Spans],
    ) -> Result<()> {
        let me = self.id.rank;
        let size = self.rounds.payload();
        let longest = shards.iter().map(Spans::len).max().unwrap_or_default();
        for k in 0..pieces(size, longest) {
            if let Some(shard) = shards.get(me) {
                let (_, own) = self.rounds.split();
                for (at, range) in shard.within(piece(k, size, shard.len())) {
                    own[at..][..range.len()].copy_from_slice(&data[range]);
                }
            }
            self.advance()?;
            let peers = self.rounds.peers();
            for (owner, shard) in shards.iter().enumerate().filter(|(k, _)| *k != me) {
                for (at, range) in shard.within(piece(k, size, shard.len())) {
                    data[range.clone()].copy_from_slice(&peers.area(owner)[at..][..range.len()]);
                }
            }
        }
        Ok(())
    }
}
