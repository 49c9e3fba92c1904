//! Optimizer state divided over the ranks.

mod exchange;
mod partition;
mod pieces;
mod record;
mod state;
mod step;

use crate::{
    ddp::Ddp,
    dtype,
    error::Error,
    group::ReduceOp,
    train::params::{FloatVisitor, visit},
};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use partition::{Partition, Spec};
use serde::Serialize;
use std::{collections::HashSet, fmt};

/// Any of Burn's optimizers with its state divided over the ranks: the first stage of ZeRO (Rajbhandari et al., ZeRO: Memory Optimizations Toward
/// Training Trillion Parameter Models, SC20, section 5.1).
///
/// Each rank holds the state of its share of the parameters and steps only those; then the ranks exchange the stepped parameters. The result is, bit for bit,
/// that of the plain optimizer on every rank, for `1 / world_size` of its state and of its work, and for one all-gather of the parameters per step.
///
/// A parameter belongs to one rank as a whole, so that any optimizer will do, those that look at a whole matrix (Muon, LAMB, Adafactor) or clip by its
/// norm too. The ranks' shares are then as equal as the sizes of the parameters allow; [`split_parameters`](Self::split_parameters) makes them
/// equal to the element for optimizers that allow it.
///
/// A parameter without gradient on this step (equally on all ranks, as [`Ddp::wrap`] has it) is left alone, and so is its state. A parameter
/// that is unfrozen later gets its owner then.
#[derive(Clone)]
pub struct ZeroRedundancyOptimizer {
    ddp: Ddp,
    /// Holds the state of what this rank owns.
    inner: ModuleOptimizer,
    partition: Partition,
    split: bool,
}

/// Bytes of optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct StateBytes {
    /// On this rank.
    pub held: usize,
    /// On all ranks, which is what the plain optimizer would hold on each.
    pub whole: usize,
}

impl fmt::Debug for ZeroRedundancyOptimizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroRedundancyOptimizer")
            .field("rank", &self.ddp.rank())
            .field("world_size", &self.ddp.world_size())
            .field("parameters", &self.partition.entries().len())
            .finish_non_exhaustive()
    }
}

impl ZeroRedundancyOptimizer {
    /// Divides the state of `optimizer`, which must not have made a step yet: what it has is forgotten. Local.
    pub fn new(ddp: &Ddp, optimizer: ModuleOptimizer) -> Self {
        Self {
            partition: Partition::new(ddp.world_size(), false),
            split: false,
            ddp: ddp.clone(),
            inner: optimizer.load_record(Default::default()),
        }
    }

    /// Divides the state between elements, not between parameters, so that every rank holds the same share of it. Local; equal on all ranks, before the
    /// first step and before a record is loaded.
    ///
    /// The optimizer sees a flat part of a parameter only. Right for those that treat each element by itself (SGD, Adam, AdamW, Adan, RMSProp, Lion, AdaGrad), wrong
    /// for those that look at the shape or at a norm, gradient clipping by norm inside the optimizer included.
    pub fn split_parameters(mut self) -> Self {
        // One rank has everything: it steps whole parameters.
        self.split = self.ddp.world_size() > 1;
        self.partition = Partition::new(self.ddp.world_size(), self.split);
        self
    }

    /// One step with averaged gradients, as [`ModuleOptimizer::step`]. Collective when any parameter has a gradient; blocks until the parameters are
    /// exchanged.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::StepsDiffer`](crate::train::OptimizerError::StepsDiffer) or [`Error::Group`] when the ranks step different parameters; [`Error::Read`] when a
    /// parameter cannot be read from its device; [`Error::UnsupportedType`].
    pub fn step<M: Module>(
        &mut self,
        lr: impl Into<ModuleLearningRate>,
        model: M,
        grads: GradientsParams,
    ) -> Result<M, Error> {
        let specs = self.survey(&model, |spec| spec.has_gradient(&grads))?;
        let stepped = self.partition.enter(specs);
        if self.ddp.world_size() == 1 {
            return Ok(self.inner.step(lr, model, grads));
        }
        step::step(self, lr.into(), model, grads, &stepped)
    }

    /// What this rank holds, and what all hold together. Collective.
    ///
    /// Reads the state back from its device, to count what is there and not what should be: for a look now and then, not for
    /// every step.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`OptimizerError::Record`](crate::train::OptimizerError::Record) when the state cannot be read.
    pub fn state_bytes(&self) -> Result<StateBytes, Error> {
        let states = self.states()?;
        let held = states.bytes();
        let mut sum = [held as f64];
        self.ddp.all_reduce(&mut sum, ReduceOp::Sum)?;
        let whole = sum[0] as usize;
        Ok(StateBytes { held, whole })
    }

    /// The parameters of `model` that `filter` lets through, each id once: Burn's optimizers step the first field with an id only.
    fn survey<M: Module>(
        &self,
        model: &M,
        filter: impl FnMut(&Candidate<'_>) -> bool,
    ) -> Result<Vec<Spec>, Error> {
        let mut survey = Survey {
            rank: self.ddp.rank(),
            seen: HashSet::new(),
            filter,
            specs: Ok(Vec::new()),
        };
        visit(model, &mut survey);
        survey.specs
    }
}

/// A parameter that may take part.
struct Candidate<'a> {
    path: &'a str,
    id: ParamId,
    has_gradient: fn(&GradientsParams, ParamId) -> bool,
}

impl Candidate<'_> {
    fn has_gradient(&self, grads: &GradientsParams) -> bool {
        (self.has_gradient)(grads, self.id)
    }
}

struct Survey<F> {
    rank: usize,
    seen: HashSet<ParamId>,
    filter: F,
    specs: Result<Vec<Spec>, Error>,
}

impl<F: FnMut(&Candidate<'_>) -> bool> FloatVisitor for Survey<F> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let candidate = Candidate {
            path,
            id: param.id,
            has_gradient: |grads, id| grads.get::<D>(id).is_some(),
        };
        let Ok(specs) = &mut self.specs else {
            return;
        };
        if !(self.filter)(&candidate) || !self.seen.insert(param.id) {
            return;
        }
        let base = param.base();
        match dtype::float(base.dtype()) {
            Some(dtype) => specs.push(Spec {
                path: path.to_string(),
                id: param.id,
                dims: base.dims().to_vec(),
                dtype,
            }),
            None => {
                self.specs = Err(Error::UnsupportedType {
                    rank: self.rank,
                    path: path.to_string(),
                    dtype: format!("{:?}", base.dtype()),
                });
            }
        }
    }
}
