//! One bucket on its way: filled on the backward thread, reduced and emptied on the communication
//! thread.

use super::{
    comm_hook::GradBucket,
    control::{Contribution, Finding, own_flag},
    elements,
    layout::ParamSpec,
    memory::Memory,
    plan::BucketPlan,
    round::Round,
    tail,
};
use crate::group::{DType, GroupError, ProcessGroup, ReduceOp, reduce::reduce_into};
use burn::tensor::{Bytes, TensorData};
use std::{collections::BTreeSet, iter::repeat_n, time::Instant};

/// A bucket that is at home: no operation is using its memory.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) plan: BucketPlan,
    memory: Memory,
    /// Which gradients are in the memory.
    packed: Vec<bool>,
    /// On the way out the reduced gradients. On the way in the local ones, as storage for the reduced, unless these point into the memory.
    pub(super) gradients: Vec<Option<TensorData>>,
}

impl Bucket {
    pub(super) fn new(plan: BucketPlan, memory: Memory) -> Self {
        let gradients = plan.placements.iter().map(|_| None).collect();
        Self {
            packed: vec![false; plan.placements.len()],
            plan,
            memory,
            gradients,
        }
    }

    /// Before the first gradient of a round.
    pub(super) fn begin(&mut self) -> Result<(), GroupError> {
        self.memory.begin()
    }

    pub(super) fn is_full(&self) -> bool {
        self.packed.iter().all(|packed| *packed)
    }

    /// Copies a gradient to its place.
    pub(super) fn pack(&mut self, index: usize, data: TensorData) {
        let place = self.plan.placements[index];
        self.memory.input()[place.range()].copy_from_slice(data.as_bytes());
        self.packed[index] = true;
        self.gradients[index] = match self.memory {
            Memory::Group(_) => Some(data),
            Memory::Views(_) => None,
        };
    }

    pub(super) fn is_packed(&self, index: usize) -> bool {
        self.packed[index]
    }

    /// Forgets what was packed.
    pub(super) fn discard(&mut self) {
        self.packed.fill(false);
        self.gradients.fill_with(|| None);
    }

    /// Adds to a gradient that has been packed.
    pub(super) fn add(&mut self, index: usize, data: &TensorData) {
        let place = self.plan.placements[index];
        let sum = &mut self.memory.input()[place.range()];
        let old = sum.to_vec();
        reduce_into(
            sum,
            &[&old, data.as_bytes()],
            self.plan.dtype,
            ReduceOp::Sum,
        );
    }

    /// Zeros for what this rank did not use, and the control tail: the used flags, room for the finite flags, and `control` in the
    /// first bucket.
    pub(super) fn seal(&mut self, control: &[u8]) {
        let input = self.memory.input();
        for (place, packed) in self.plan.placements.iter().zip(&self.packed) {
            if !packed {
                input[place.range()].fill(0);
            }
        }
        let used = self.packed.iter().map(|packed| u8::from(*packed));
        let room = self.plan.tail_elements - self.packed.len() - control.len();
        let range = self.plan.data_bytes..self.plan.bytes();
        tail::write(
            &mut input[range],
            self.plan.dtype,
            used.chain(repeat_n(0, room)).chain(control.iter().copied()),
        );
    }

    /// Reduces the bucket and takes the result out of it. Runs on the communication thread.
    pub(super) fn reduce(
        mut self,
        index: usize,
        round: &Round,
        group: &dyn ProcessGroup,
        specs: &[ParamSpec],
    ) -> Result<Reduced, GroupError> {
        let started = Instant::now();
        let dtype = self.plan.dtype;
        if round.rule.check_finite {
            self.flag_own(group);
        }
        let told = self.reduce_tail(index, round, group)?;
        let factor = round.factor();
        if let Some(hook) = &round.rule.hook {
            let data = &mut self.memory.input()[..self.plan.data_bytes];
            match told.flagged.is_empty() {
                true => hook.reduce(&mut GradBucket {
                    index,
                    group,
                    dtype,
                    data,
                    places: &self.plan.placements,
                    specs,
                    used: &told.used,
                    factor: factor.unwrap_or(1.0),
                })?,
                // The step is given up: no hook should take what is no number into its state.
                false => group.all_reduce(data, dtype, ReduceOp::Mean)?,
            }
        }
        self.packed.fill(false);
        // Unused on every rank: no gradient, so that no decay or momentum step is made on it.
        let factors = told.used.iter().map(|used| factor.filter(|_| *used));
        let factors: Vec<Option<f64>> = factors.collect();
        let bad = self.take_out(round, &factors, specs);
        Ok(Reduced {
            bucket: self,
            finding: Finding {
                path: bad.map(|index| specs[index].path.clone()),
                ranks: told.flagged,
            },
            started,
            finished: Instant::now(),
        })
    }

    /// Makes gradients of what was reduced, where there is a factor; the first that is not finite, if that is looked at.
    fn take_out(
        &mut self,
        round: &Round,
        factors: &[Option<f64>],
        specs: &[ParamSpec],
    ) -> Option<usize> {
        let dtype = self.plan.dtype;
        let mut bad = None;
        let mut finish = |index, bytes: &mut [u8], factor| {
            if factor != 1.0 {
                elements::scale(bytes, dtype, factor);
            }
            let check = round.rule.check_finite && bad.is_none();
            if check && !elements::all_finite(bytes, dtype) {
                bad = Some(index);
            }
        };
        let places = || self.plan.placements.iter().zip(factors).enumerate();
        match &mut self.memory {
            Memory::Group(buffer) => {
                let output = match round.rule.hook {
                    None => buffer.output(),
                    Some(_) => buffer.input(),
                };
                for (index, (place, factor)) in places() {
                    let own = self.gradients[index].take();
                    let Some(factor) = factor else { continue };
                    let reduced = &output[place.range()];
                    let mut result = match own {
                        Some(own) => own,
                        None => {
                            let room = aligned(reduced, dtype);
                            TensorData::from_bytes(room, specs[index].shape.clone(), dtype.into())
                        }
                    };
                    TensorData::with_bytes_mut([&mut result], |mut storage| {
                        let Some(bytes) = storage.pop() else { return };
                        bytes.copy_from_slice(reduced);
                        finish(index, bytes, *factor);
                    });
                    self.gradients[index] = Some(result);
                }
            }
            Memory::Views(views) => {
                for (index, (place, factor)) in places() {
                    if let Some(factor) = factor {
                        finish(index, &mut views.memory()[place.range()], *factor);
                    }
                }
                let lent = views.lend();
                for (index, (place, factor)) in places() {
                    let shape = specs[index].shape.clone();
                    let view = factor.map(|_| lent.view(place.range()));
                    self.gradients[index] =
                        view.map(|view| TensorData::from_bytes(view, shape, dtype.into()));
                }
            }
        }
        bad
    }

    /// Sets this rank's finite flag if one of its gradients is not.
    fn flag_own(&mut self, group: &dyn ProcessGroup) {
        let dtype = self.plan.dtype;
        let input = self.memory.input();
        let set = !elements::all_finite(&input[..self.plan.data_bytes], dtype);
        let start = self.plan.data_bytes + self.plan.placements.len() * dtype.size();
        tail::write(&mut input[start..], dtype, own_flag(group, set).into_iter());
    }

    /// Reduces the tail over the ranks, and with it the data unless a hook does that. What a hook is told of the step comes from the tail.
    fn reduce_tail(
        &mut self,
        index: usize,
        round: &Round,
        group: &dyn ProcessGroup,
    ) -> Result<Told, GroupError> {
        let (dtype, bytes, data_bytes) = (self.plan.dtype, self.plan.bytes(), self.plan.data_bytes);
        let op = round.collective();
        let reduced = match round.rule.hook {
            None => {
                self.memory.all_reduce(bytes, dtype, op)?;
                &self.memory.output()[data_bytes..bytes]
            }
            Some(_) => {
                let tail = &mut self.memory.input()[data_bytes..bytes];
                group.all_reduce(tail, dtype, op)?;
                &*tail
            }
        };
        let mut sums = tail::read(reduced, dtype).map(|x| x * round.to_sum());
        let parameters = self.plan.placements.len();
        let used = sums.by_ref().take(parameters).map(|sum| sum > 0.5);
        let used = used.collect();
        let flags = match round.rule.check_finite {
            true => group.world_size(),
            false => 0,
        };
        let flagged = sums.by_ref().take(flags).enumerate();
        let flagged = flagged.filter_map(|(rank, sum)| (sum > 0.5).then_some(rank));
        let flagged = flagged.collect();
        if index == 0 {
            round.learn(Contribution::read(&sums.collect::<Vec<_>>()));
        }
        Ok(Told { used, flagged })
    }
}

/// What the tail of a reduced bucket says; equal on all ranks.
struct Told {
    /// Of each parameter, whether some rank has used it.
    used: Vec<bool>,
    /// Ranks whose own gradients in this bucket are not finite.
    flagged: BTreeSet<usize>,
}

/// A bucket that came back from the communication thread.
#[derive(Debug)]
pub(super) struct Reduced {
    /// Its `gradients` are the reduced ones; `None` where no rank used the parameter.
    pub(super) bucket: Bucket,
    pub(super) finding: Finding,
    pub(super) started: Instant,
    pub(super) finished: Instant,
}

/// A copy of `bytes` aligned for elements of `dtype`.
pub(crate) fn aligned(bytes: &[u8], dtype: DType) -> Bytes {
    match dtype.size() {
        8 => Bytes::from_elems::<u64>(bytemuck::pod_collect_to_vec(bytes)),
        4 => Bytes::from_elems::<u32>(bytemuck::pod_collect_to_vec(bytes)),
        2 => Bytes::from_elems::<u16>(bytemuck::pod_collect_to_vec(bytes)),
        _ => Bytes::from_bytes_vec(bytes.to_vec()),
    }
}
