//! The collectives of a hierarchical group: over each machine in shared memory, between machines on parallel rings.
//!
//! All-reduce is a reduce-scatter over the machine, an all-reduce of every shard on its ring, and an all-gather over
//! the machine. On a ring of `m` machines it is the bandwidth-optimal one: reduce-scatter and all-gather in
//! `m - 1` hops each, `2 (m - 1) / m` of the shard over every link (Patarasuk and Yuan, "Bandwidth optimal all-reduce
//! algorithms for clusters of workstations", JPDC 2009, section 4).
//!
//! 16-bit floats are accumulated in 32 bits on each machine and rounded once a machine on their way; a mean of them is divided
//! before it travels, so that the sum cannot overflow.
//!
//! Every element is reduced along one path and then copied, so all ranks get the same bits; the order of the
//! ranks in it depends on the element's place, not on time.

use super::{
    super::{
        shm::{Operation, share},
        spans::Spans,
    },
    ring::{Plan, Receive, Reduction, Ring},
    topology::Topology,
};
use crate::group::{
    DType, GroupError, ReduceOp, Result,
    engine::{Collectives, Payload},
    heap::HeapBytes,
    reduce::reduce_scaled,
};
use std::{iter::once, ops::Range};

/// One operation of the group.
pub(super) struct Collective<'a, 'b> {
    pub(super) topology: &'a Topology,
    /// The operation among the ranks of this machine; `None` if this rank is alone on it.
    pub(super) local: Option<&'a mut Operation<'b>>,
    /// `None` if this rank is on no ring.
    pub(super) ring: Option<Ring<'a>>,
    /// A copy of what is sent, for collectives that do not reduce in place.
    pub(super) scratch: &'a mut HeapBytes,
    /// What a ring carries in a stage of an all-reduce, at least.
    pub(super) stage: usize,
}

/// Every stage costs a trip around the ring, which more of them no longer earn.
const MOST_STAGES: usize = 8;

impl Collectives for Collective<'_, '_> {
    /// In stages: while a ring carries one, the machine reduces the next and hands out the last.
    fn all_reduce(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let (topology, machines) = (self.topology, self.topology.machines());
        let stages = self.stages(data.len());
        let stages: Vec<_> = (0..stages)
            .map(|stage| part(0..data.len(), stage, stages))
            .collect();
        let shards: Vec<_> = stages
            .iter()
            .map(|stage| self.shards(once(stage.clone())))
            .collect();
        let plan = |stage: &Range<usize>| {
            let shard = part(stage.clone(), topology.local, topology.rings());
            let segment =
                |machine| -> Spans { once(part(shard.clone(), machine, machines)).collect() };
            let mut receive = reduced(topology.backwards(1, machines - 1).map(segment));
            receive.extend(stored(topology.backwards(0, machines - 1).map(segment)));
            Plan::passing_on(segment(topology.machine), receive)
        };
        let plans: Vec<Plan> = stages.iter().map(plan).collect();
        let (local_op, reduction) = (self.local_op(dtype, op), self.reduction(dtype, op));
        self.divide_alone(data, dtype, op);
        let mut flow = self.ring.as_mut().map(|ring| ring.start(&plans, reduction));
        for k in 0..=stages.len() {
            if let Some(shards) = shards.get(k) {
                if let Some(local) = &mut self.local {
                    local.reduce_to_owners(data, shards, dtype, local_op, topology.ranks())?;
                }
                if let Some(flow) = &mut flow {
                    flow.open();
                    flow.poll(data);
                }
            }
            let Some(done) = k.checked_sub(1) else {
                continue;
            };
            if let Some(flow) = &mut flow {
                flow.complete(data, k)?;
            }
            if let Some(local) = &mut self.local {
                local.share(data, &shards[done])?;
            }
        }
        Ok(())
    }

    fn broadcast(&mut self, data: &mut [u8], root: usize) -> Result<()> {
        let (topology, machines) = (self.topology, self.topology.machines());
        let (source, local_root) = topology.place(root);
        let distance = (topology.machine + machines - source) % machines;
        if distance == 0
            && let Some(local) = &mut self.local
        {
            local.broadcast(data, local_root)?;
        }
        let shard = Spans::from_iter([part(0..data.len(), topology.local, topology.rings())]);
        let plan = if distance == 0 {
            Plan::passing_on(shard, Vec::new())
        } else {
            let keep = if distance == machines - 1 {
                shard.len()
            } else {
                0
            };
            Plan {
                lead: Spans::default(),
                receive: vec![(shard, Receive::Store)],
                keep,
            }
        };
        self.on_ring(data, &plan, Reduction::NONE)?;
        if distance == 0 {
            return Ok(());
        }
        let shards = self.shards(once(0..data.len()));
        self.share_here(data, &shards)
    }

    fn all_gather(&mut self, send: &[u8], recv: &mut [u8]) -> Result<()> {
        let (topology, machines) = (self.topology, self.topology.machines());
        let block = send.len();
        let own = topology.here()[topology.local] * block;
        recv[own..][..block].copy_from_slice(send);
        let blocks: Vec<Spans> = topology
            .blocks(topology.machine, block)
            .map(|block| Spans::from_iter([block]))
            .collect();
        self.share_here(recv, &blocks)?;
        let bundle = |machine| self.bundle(machine, block);
        let receive = stored(topology.backwards(1, machines - 1).map(bundle)).collect();
        let plan = Plan::passing_on(bundle(topology.machine), receive);
        self.on_ring(recv, &plan, Reduction::NONE)?;
        let elsewhere = (0..machines).filter(|machine| *machine != topology.machine);
        let shards = self.shards(elsewhere.flat_map(|machine| topology.blocks(machine, block)));
        self.share_here(recv, &shards)
    }

    fn reduce_scatter(
        &mut self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let (topology, machines) = (self.topology, self.topology.machines());
        let block = recv.len();
        let mut copy = std::mem::take(self.scratch);
        if copy.as_slice().len() < send.len() {
            copy = HeapBytes::new(send.len()).ok_or_else(|| self.no_memory(send.len()))?;
        }
        let data = &mut copy.as_mut_slice()[..send.len()];
        data.copy_from_slice(send);
        let everywhere = (0..machines).flat_map(|machine| topology.blocks(machine, block));
        let shards = self.shards(everywhere);
        self.reduce_here(data, &shards, dtype, op)?;
        let bundle = |machine| self.bundle(machine, block);
        let receive = reduced(topology.backwards(2, machines - 1).map(bundle));
        let lead = topology.backwards(1, 1).map(bundle).next();
        let plan = Plan::passing_on(lead.unwrap_or_default(), receive);
        self.on_ring(data, &plan, self.reduction(dtype, op))?;
        let shards = self.shards(topology.blocks(topology.machine, block));
        self.share_here(data, &shards)?;
        recv.copy_from_slice(&data[topology.here()[topology.local] * block..][..block]);
        *self.scratch = copy;
        Ok(())
    }

    /// All descriptors of the ring have come, and each was sent when its machine was there.
    fn barrier(&mut self) -> Result<()> {
        match &mut self.local {
            Some(local) => local.advance(),
            None => Ok(()),
        }
    }
}

impl Collective<'_, '_> {
    pub(super) fn run(&mut self, payload: Payload<'_>) -> Result<()> {
        // A machine whose ranks differ among themselves does not get as far as the others.
        if let Some(local) = &mut self.local {
            local.advance()?;
        }
        if let Some(ring) = &mut self.ring {
            ring.meet()?;
        }
        self.perform(payload)
    }

    /// The number of stages of an all-reduce, the same on all ranks. Where no machine has several ranks, there is nothing to
    /// overlap, and a ring is a stream already.
    fn stages(&self, bytes: usize) -> usize {
        let topology = self.topology;
        match topology.machines() < topology.ranks() {
            true => (bytes / topology.rings() / self.stage).clamp(1, MOST_STAGES),
            false => 1,
        }
    }

    /// What each ring carries of `ranges`.
    fn shards(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<Spans> {
        let rings = self.topology.rings();
        let ranges: Vec<_> = ranges.into_iter().collect();
        let shard = |ring| {
            ranges
                .iter()
                .map(|range| part(range.clone(), ring, rings))
                .collect()
        };
        (0..rings).map(shard).collect()
    }

    /// What this rank's ring carries of a machine's blocks.
    fn bundle(&self, machine: usize, block: usize) -> Spans {
        let (ring, rings) = (self.topology.local, self.topology.rings());
        let blocks = self.topology.blocks(machine, block);
        blocks.map(|block| part(block, ring, rings)).collect()
    }

    /// Whether a mean is divided before it travels: sums of 16-bit floats may overflow where their mean does not.
    fn divides_first(&self, dtype: DType, op: ReduceOp) -> bool {
        let travels = self.topology.machines() > 1;
        op == ReduceOp::Mean && (!travels || matches!(dtype, DType::F16 | DType::BF16))
    }

    fn reduction(&self, dtype: DType, op: ReduceOp) -> Reduction {
        let divisor = (!self.divides_first(dtype, op)).then(|| self.topology.ranks());
        Reduction { dtype, op, divisor }
    }

    /// What the ranks of a machine do with their values; otherwise the ring divides.
    fn local_op(&self, dtype: DType, op: ReduceOp) -> ReduceOp {
        match op == ReduceOp::Mean && !self.divides_first(dtype, op) {
            true => ReduceOp::Sum,
            false => op,
        }
    }

    /// A rank that is alone on its machine divides its own values, where that comes first.
    fn divide_alone(&mut self, data: &mut [u8], dtype: DType, op: ReduceOp) {
        let first = self.divides_first(dtype, op);
        let (None, Some(ring), true) = (&self.local, &mut self.ring, first) else {
            return;
        };
        for data in data.chunks_mut(ring.chunk.len()) {
            let copy = &mut ring.chunk[..data.len()];
            copy.copy_from_slice(data);
            reduce_scaled(data, &[copy], dtype, op, self.topology.ranks());
        }
    }

    /// Reduces `data` over this machine, each shard into the memory of the rank that takes it further.
    fn reduce_here(
        &mut self,
        data: &mut [u8],
        shards: &[Spans],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.divide_alone(data, dtype, op);
        let (local_op, ranks) = (self.local_op(dtype, op), self.topology.ranks());
        match &mut self.local {
            Some(local) => local.reduce_to_owners(data, shards, dtype, local_op, ranks),
            None => Ok(()),
        }
    }

    fn on_ring(&mut self, data: &mut [u8], plan: &Plan, reduction: Reduction) -> Result<()> {
        match &mut self.ring {
            Some(ring) => ring.run(data, plan, reduction),
            None => Ok(()),
        }
    }

    /// Gives this machine's ranks what those that own a shard have of it.
    fn share_here(&mut self, data: &mut [u8], shards: &[Spans]) -> Result<()> {
        match &mut self.local {
            Some(local) => local.share(data, shards),
            None => Ok(()),
        }
    }

    fn no_memory(&self, bytes: usize) -> GroupError {
        GroupError::Transport {
            rank: self.topology.here()[self.topology.local],
            operation: format!("reserving {bytes} bytes for a reduce-scatter"),
            cause: "out of memory".into(),
        }
    }
}

/// Part `k` of `n` of a range.
fn part(range: Range<usize>, k: usize, n: usize) -> Range<usize> {
    let part = share(range.len(), n, k);
    range.start + part.start..range.start + part.end
}

/// Received to be reduced; the last one has then met every machine.
fn reduced(spans: impl Iterator<Item = Spans>) -> Vec<(Spans, Receive)> {
    let mut receive: Vec<_> = spans.map(|spans| (spans, Receive::Reduce)).collect();
    if let Some((_, how)) = receive.last_mut() {
        *how = Receive::Complete;
    }
    receive
}

fn stored(spans: impl Iterator<Item = Spans>) -> impl Iterator<Item = (Spans, Receive)> {
    spans.map(|spans| (spans, Receive::Store))
}
