//! The reducer: gradients into buckets, buckets through the group, in the same order on every rank.
//!
//! One [`Reducer`] belongs to one wrapped model. It knows slots (distinct parameters, in
//! registration order), bytes and a process group; it knows nothing of graphs or of how ranks are
//! connected. A round is one synchronised backward pass:
//!
//! ```text
//! begin ──> pack(slot) … pack(slot) ──> launch_rest ──> wait
//!              │ bucket full: launch                      │ gradients, averaged
//!              ▼ in index order                           │
//!            communication thread: all_reduce, take out ──┘
//! ```
//!
//! Buckets are launched in index order whatever the order in which they fill, so that ranks whose
//! backward passes run in another order still meet in the same operations.

mod bucket;
mod comm_hook;
mod compress;
mod control;
mod elements;
mod error;
mod layout;
mod memory;
mod plan;
mod power_sgd;
mod round;
mod tail;
mod trace;
mod uses;

#[cfg(test)]
mod tests;

pub use comm_hook::{BucketParam, CommHook, GradBucket};
pub use compress::CompressHook;
pub use control::NonFinite;
pub(crate) use control::{Contribution, Finding};
pub use error::ReducerError;
pub(crate) use layout::{Layout, ParamSpec};
pub(crate) use plan::BucketCaps;
pub use power_sgd::{PowerSgdHook, PowerSgdState};
pub(crate) use round::Rule;
pub use trace::{BucketTrace, RoundTrace};
pub(crate) use uses::{Broken, Expect, Fired, Use, UseCounter};

use crate::{
    dtype,
    group::{DType, ProcessGroup, Work, WorkQueue},
};
pub(crate) use bucket::aligned;
use bucket::{Bucket, Reduced};
use burn::tensor::TensorData;
use control::WINDOW_MODULUS;
use memory::Memory;
use plan::{BucketPlan, TailSizes, assign};
use round::Round;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};
use trace::RoundClock;

type Result<T, E = ReducerError> = std::result::Result<T, E>;

/// What the reducer has done so far on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Totals {
    /// Synchronised backward passes.
    pub(crate) rounds: u64,
    /// Collectives issued, all kinds.
    pub(crate) collectives: u64,
    /// Bytes that the last round reduced: gradients and control tails.
    pub(crate) bytes_per_round: usize,
    /// Buckets per round.
    pub(crate) buckets: usize,
    /// Time the communication thread spent on buckets.
    pub(crate) communication: Duration,
    /// The part of it that lay inside backward.
    pub(crate) overlapped: Duration,
}

/// What a round ends with; equal on all ranks.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The reduced gradient of each slot, `None` where no rank used it.
    pub(crate) gradients: Vec<Option<TensorData>>,
    /// In rank order.
    pub(crate) contributions: Vec<Contribution>,
    pub(crate) finding: Finding,
}

/// Whether no element of a float tensor is a NaN or an infinity.
pub(crate) fn all_finite(data: &TensorData) -> bool {
    dtype::float(data.dtype()).is_none_or(|dtype| elements::all_finite(data.as_bytes(), dtype))
}

/// Averages the gradients of one wrapped model over the ranks of a group.
#[derive(Debug)]
pub(crate) struct Reducer {
    layout: Layout,
    caps: BucketCaps,
    rule: Rule,
    group: Arc<dyn ProcessGroup>,
    queue: WorkQueue,
    /// `None` while a bucket is with the communication thread.
    buckets: Vec<Option<Bucket>>,
    /// Slots in the agreed order of first use.
    order: Vec<usize>,
    /// Slots that have a place: those that are trained.
    members: Vec<bool>,
    /// Slot to (bucket, place in it).
    places: Vec<Option<(usize, usize)>>,
    /// The next bucket to launch; those before are in flight or back.
    next: usize,
    in_flight: VecDeque<Work<Result<Reduced, crate::group::GroupError>>>,
    own: Contribution,
    round: Arc<Round>,
    clock: RoundClock,
    current: RoundTrace,
    last: RoundTrace,
    totals: Totals,
}

impl Reducer {
    /// Buckets for `layout`, which is equal on all ranks. Collective.
    pub(crate) fn new(
        group: Arc<dyn ProcessGroup>,
        layout: Layout,
        caps: BucketCaps,
        rule: Rule,
    ) -> Result<Self> {
        let queue =
            WorkQueue::new("ddp-comm").map_err(|e| crate::group::GroupError::Transport {
                rank: group.rank(),
                operation: "starting the communication thread".into(),
                cause: e.to_string(),
            })?;
        let mut reducer = Self {
            places: vec![None; layout.len()],
            order: (0..layout.len()).collect(),
            members: layout.params.iter().map(|spec| spec.trainable).collect(),
            layout,
            caps,
            round: Arc::new(Round::new(rule.clone(), group.world_size(), 1.0)),
            rule,
            group,
            queue,
            buckets: Vec::new(),
            next: 0,
            in_flight: VecDeque::new(),
            own: Contribution::default(),
            clock: RoundClock::start(),
            current: RoundTrace::default(),
            last: RoundTrace::default(),
            totals: Totals::default(),
        };
        reducer.make_buckets()?;
        Ok(reducer)
    }

    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(crate) fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.group
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// The last finished round.
    pub(crate) fn trace(&self) -> &RoundTrace {
        &self.last
    }

    fn make_buckets(&mut self) -> Result<()> {
        let plans = self.assign();
        self.places.fill(None);
        // The old buckets' memory is given back before the new is taken.
        self.buckets.clear();
        for plan in plans {
            for (index, place) in plan.placements.iter().enumerate() {
                self.places[place.slot] = Some((self.buckets.len(), index));
            }
            let memory = Memory::new(&self.group, plan.bytes(), self.rule.views)?;
            self.buckets.push(Some(Bucket::new(plan, memory)));
        }
        self.totals.buckets = self.buckets.len();
        Ok(())
    }

    /// Gradients arrive roughly from the last layer to the first.
    fn assign(&self) -> Vec<BucketPlan> {
        let reversed = self.order.iter().rev().copied();
        let order: Vec<usize> = reversed.filter(|slot| self.members[*slot]).collect();
        let ranks = self.group.world_size();
        let tail = TailSizes {
            each: if self.rule.check_finite { ranks } else { 0 },
            first: ranks * Contribution::DIGITS,
        };
        assign(&self.layout, &order, self.caps, tail)
    }

    /// Opens a round, to which this rank contributes `own`. Gradients of `weight_unit` samples have a weight of 1.
    pub(crate) fn begin(&mut self, own: Contribution, weight_unit: f64) -> Result<()> {
        self.own = own;
        let ranks = self.group.world_size();
        self.round = Arc::new(Round::new(self.rule.clone(), ranks, weight_unit));
        self.next = 0;
        self.clock = RoundClock::start();
        self.current = RoundTrace::default();
        for bucket in self.buckets.iter_mut().flatten() {
            bucket.begin()?;
        }
        Ok(())
    }

    /// Opens another round, to which this rank contributes the same.
    pub(crate) fn begin_again(&mut self) -> Result<()> {
        let own = Contribution {
            changed: false,
            ..self.own
        };
        self.begin(own, self.round.weight_unit)
    }

    /// Whether this round has already sent something.
    pub(crate) fn has_launched(&self) -> bool {
        self.next > 0
    }

    /// Takes back what was packed but not sent. Only legal while nothing has been launched.
    pub(crate) fn discard(&mut self) {
        for bucket in self.buckets.iter_mut().flatten() {
            bucket.discard();
        }
    }

    /// Puts a complete gradient into its bucket and launches what has become full.
    ///
    /// A gradient that turns out not to have been complete is packed again: what comes later is added while its bucket is
    /// still here, and an error once it has been launched.
    pub(crate) fn pack(&mut self, slot: usize, data: TensorData) -> Result<()> {
        self.check(slot, &data)?;
        let rank = self.rank();
        let path = &self.layout.params[slot].path;
        let place = self.places[slot].filter(|(bucket, _)| *bucket >= self.next);
        let home = place.and_then(|(bucket, index)| Some((self.buckets[bucket].as_mut()?, index)));
        let Some((home, index)) = home else {
            let path = path.clone();
            return Err(ReducerError::LateGradient { rank, path });
        };
        if home.is_packed(index) {
            home.add(index, &data);
            return Ok(());
        }
        home.pack(index, data);
        self.current.ready.push((path.clone(), self.clock.now()));
        while matches!(self.buckets.get(self.next), Some(Some(bucket)) if bucket.is_full()) {
            self.launch()?;
        }
        Ok(())
    }

    /// All layers' backward has run: sends every bucket that is left, with zeros for what this rank
    /// did not use. Does not block.
    pub(crate) fn launch_rest(&mut self) -> Result<()> {
        if self.next == 0 || self.current.backward_end.is_zero() {
            self.current.backward_end = self.clock.now();
        }
        while self.next < self.buckets.len() {
            self.launch()?;
        }
        Ok(())
    }

    fn launch(&mut self) -> Result<()> {
        let index = self.next;
        let Some(mut bucket) = self.buckets[index].take() else {
            return Err(ReducerError::Interrupted { rank: self.rank() });
        };
        self.next += 1;
        let control = match index {
            0 => self.own.digits(self.rank(), self.group.world_size()),
            _ => Vec::new(),
        };
        bucket.seal(&control);
        let slots = bucket.plan.placements.iter().map(|p| p.slot);
        let specs: Vec<ParamSpec> = slots.map(|s| self.layout.params[s].clone()).collect();
        self.current.buckets.push(BucketTrace {
            parameters: specs.iter().map(|spec| spec.path.clone()).collect(),
            bytes: bucket.plan.bytes(),
            launched: self.clock.now(),
            ..Default::default()
        });
        let (round, group) = (self.round.clone(), self.group.clone());
        self.totals.collectives += 1;
        self.in_flight.push_back(self.queue.submit(move || {
            let reduced = bucket.reduce(index, &round, &*group, &specs);
            // The buckets behind it must not meet what the peers expect of this one.
            reduced.inspect_err(|error| group.abort(&error.to_string()))
        }));
        Ok(())
    }

    /// Blocks until all buckets are back. After [`launch_rest`](Self::launch_rest).
    pub(crate) fn wait(&mut self) -> Result<Outcome> {
        let mut gradients: Vec<Option<TensorData>> = vec![None; self.layout.len()];
        let mut finding = Finding::default();
        for index in 0..self.buckets.len() {
            let Some(work) = self.in_flight.pop_front() else {
                return Err(ReducerError::Interrupted { rank: self.rank() });
            };
            let Reduced {
                mut bucket,
                finding: found,
                started,
                finished,
            } = work.wait()??;
            for (place, gradient) in bucket.plan.placements.iter().zip(&mut bucket.gradients) {
                gradients[place.slot] = gradient.take();
            }
            finding.unite(found);
            if let Some(trace) = self.current.buckets.get_mut(index) {
                trace.started = self.clock.at(started);
                trace.finished = self.clock.at(finished);
            }
            self.buckets[index] = Some(bucket);
        }
        self.finish_trace(Instant::now());
        let contributions = self.round.contributions().to_vec();
        self.check_windows(&contributions)?;
        Ok(Outcome {
            gradients,
            contributions,
            finding,
        })
    }

    fn finish_trace(&mut self, end: Instant) {
        self.current.end = self.clock.at(end);
        self.last = std::mem::take(&mut self.current);
        let (communication, overlapped) = self.last.communication();
        self.totals.rounds += 1;
        self.totals.communication += communication;
        self.totals.overlapped += overlapped;
        self.totals.bytes_per_round = self.last.buckets.iter().map(|b| b.bytes).sum();
    }

    /// Every rank has read the same, so all of them come to the same answer.
    fn check_windows(&self, contributions: &[Contribution]) -> Result<()> {
        let active = contributions.iter().filter(|rank| rank.active);
        let windows: Vec<u32> = active.map(|rank| rank.window % WINDOW_MODULUS).collect();
        if windows.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(());
        }
        Err(ReducerError::UnequalWindows {
            rank: self.rank(),
            windows: contributions
                .iter()
                .map(|rank| rank.active.then_some(rank.window))
                .collect(),
        })
    }

    /// New buckets in reverse order of first use, rank 0's order on every rank. Collective; between rounds.
    pub(crate) fn rebuild(&mut self, first_use: &[usize]) -> Result<()> {
        let mut order: Vec<u64> = first_use.iter().map(|&slot| slot as u64).collect();
        self.group
            .broadcast(bytemuck::cast_slice_mut(&mut order), DType::U64, 0)?;
        self.totals.collectives += 1;
        self.order = order.into_iter().map(|slot| slot as usize).collect();
        self.remake_buckets()
    }

    /// New buckets for `members`, which are the same on all ranks. Collective; between rounds.
    pub(crate) fn set_members(&mut self, members: Vec<bool>) -> Result<()> {
        self.members = members;
        self.remake_buckets()
    }

    fn remake_buckets(&mut self) -> Result<()> {
        if self.plans().ne(&self.assign()) {
            self.make_buckets()?;
        }
        Ok(())
    }

    /// Whether gradients of `slot` have a place in a bucket.
    pub(crate) fn has_place(&self, slot: usize) -> bool {
        self.members[slot]
    }

    pub(crate) fn members(&self) -> &[bool] {
        &self.members
    }

    /// Slots that have a place, in the agreed order of first use.
    pub(crate) fn order(&self) -> impl Iterator<Item = usize> {
        self.order
            .iter()
            .copied()
            .filter(|slot| self.members[*slot])
    }

    fn plans(&self) -> impl Iterator<Item = &BucketPlan> {
        self.buckets.iter().flatten().map(|b| &b.plan)
    }

    fn check(&self, slot: usize, data: &TensorData) -> Result<()> {
        let spec = &self.layout.params[slot];
        let rank = self.rank();
        if dtype::float(data.dtype()) != Some(spec.dtype) {
            return Err(ReducerError::WrongType {
                rank,
                path: spec.path.clone(),
                expected: spec.dtype,
                actual: format!("{:?}", data.dtype()),
            });
        }
        if data.as_bytes().len() != spec.bytes() {
            return Err(ReducerError::WrongSize {
                rank,
                path: spec.path.clone(),
                expected: spec.bytes(),
                actual: data.as_bytes().len(),
            });
        }
        Ok(())
    }
}
