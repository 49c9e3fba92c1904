//! Running statistics, which every rank has of its own data.

use super::{hook::ParamHook, session::Session, sessions::lock};
use crate::{
    config::BufferPolicy,
    dtype,
    group::{DType, ReduceOp},
    reducer::{Reducer, ReducerError},
};
use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization},
    tensor::{Tensor, TensorData},
};
use std::{collections::VecDeque, fmt::Debug};

/// The buffers of a model that the user holds.
///
/// Burn keeps a running statistic behind a lock that all clones of its layer share, and shows only its value. So a clone of the model is kept, without its
/// parameters.
pub(super) trait Buffers: Debug + Send {
    fn read(&self) -> Result<Vec<TensorData>, String>;

    /// Replaces the values; tensors that somebody has taken stay as they are.
    fn write(&mut self, values: Vec<TensorData>);
}

/// The buffers of `plain`, a clone of the model that was wrapped as `wrapped`; `None` if it has none.
pub(super) fn of<M: Module + 'static>(plain: M, wrapped: &M) -> Option<Box<dyn Buffers>> {
    let mut find = Find::default();
    wrapped.visit(&mut find);
    if find.buffers.is_empty() {
        return None;
    }
    let mut strip = Strip {
        hooked: find.hooked,
        next: 0,
    };
    Some(Box::new(Held {
        model: Some(plain.map(&mut strip)),
        buffers: find.buffers,
    }))
}

#[derive(Debug)]
struct Held<M> {
    model: Option<M>,
    /// Positions among the float tensors of a traversal.
    buffers: Vec<usize>,
}

impl<M: Module> Buffers for Held<M> {
    fn read(&self) -> Result<Vec<TensorData>, String> {
        let mut read = Read {
            buffers: &self.buffers,
            next: 0,
            values: Ok(Vec::new()),
        };
        if let Some(model) = &self.model {
            // Brings what other threads have updated into the values.
            let _ = model.valid();
            model.visit(&mut read);
        }
        read.values
    }

    fn write(&mut self, values: Vec<TensorData>) {
        let mut write = Write {
            buffers: &self.buffers,
            next: 0,
            values: values.into(),
        };
        self.model = self.model.take().map(|model| model.map(&mut write));
    }
}

/// Which float tensors are buffers: those that are not trained and that nothing could be attached to. And which are parameters with a hook.
#[derive(Default)]
struct Find {
    hooked: Vec<usize>,
    next: usize,
    in_hook: bool,
    last: Option<usize>,
    buffers: Vec<usize>,
}

impl ModuleVisitor for Find {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container != "Reparameterization" {
            return;
        }
        self.in_hook = name == ParamHook::NAME;
        if let Some(last) = self.last.take() {
            self.buffers.retain(|buffer| *buffer != last);
            if self.in_hook {
                self.hooked.push(last);
            }
        }
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.in_hook = false;
        self.last = None;
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.in_hook {
            return;
        }
        let base = param.base();
        let can_be = !param.is_require_grad() && base.is_autodiff();
        if can_be && dtype::float(base.dtype()).is_some() {
            self.buffers.push(self.next);
        }
        self.last = Some(self.next);
        self.next += 1;
    }
}

/// Whether the tensor that a traversal has come to is one of those at `positions`.
fn step(next: &mut usize, positions: &[usize]) -> bool {
    let is = positions.binary_search(next).is_ok();
    *next += 1;
    is
}

/// Frees the memory of the parameters. They alone are values: a buffer, whatever it is used for, is shared with the user's model.
struct Strip {
    hooked: Vec<usize>,
    next: usize,
}

impl ModuleMapper for Strip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match step(&mut self.next, &self.hooked) {
            true => param.map(|old| Tensor::zeros([0; D], &old.device())),
            false => param,
        }
    }
}

struct Read<'a> {
    buffers: &'a [usize],
    next: usize,
    values: Result<Vec<TensorData>, String>,
}

impl ModuleVisitor for Read<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !step(&mut self.next, self.buffers) {
            return;
        }
        if let Ok(values) = &mut self.values {
            match param.base().try_into_data() {
                Ok(value) => values.push(value),
                Err(error) => self.values = Err(error.to_string()),
            }
        }
    }
}

struct Write<'a> {
    buffers: &'a [usize],
    next: usize,
    values: VecDeque<TensorData>,
}

impl ModuleMapper for Write<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !step(&mut self.next, self.buffers) {
            return param;
        }
        let Some(value) = self.values.pop_front() else {
            return param;
        };
        param.map(|old| {
            let dtype = value.dtype();
            Tensor::from_data(value, (&old.device(), dtype))
        })
    }
}

impl Session {
    /// Makes the buffers equal on all ranks, after a round in whose result the data of the `counted` ranks is. Collective.
    pub(super) fn sync_buffers(
        &self,
        buffers: &mut dyn Buffers,
        reducer: &Reducer,
        counted: &[bool],
    ) -> Result<(), ReducerError> {
        let values = buffers.read().map_err(|cause| ReducerError::Read {
            rank: self.rank,
            path: "the running statistics".into(),
            cause,
        })?;
        let mut all: Vec<f64> = values.iter().flat_map(|v| v.iter::<f64>()).collect();
        let finite = all.iter().all(|x| x.is_finite());
        let counts = match self.buffer_policy {
            BufferPolicy::Off => return Ok(()),
            BufferPolicy::Broadcast => {
                counted.iter().position(|counted| *counted) == Some(self.rank)
            }
            BufferPolicy::Average => counted[self.rank],
        };
        if !counts || !finite {
            all.fill(0.0);
        }
        // One number says who counts, so that all ranks divide alike: one batch that is no number must not stay in the statistics of all ranks for ever.
        all.push(f64::from(u8::from(counts && finite)));
        let bytes = bytemuck::cast_slice_mut(&mut all);
        let group = reducer.group();
        group.all_reduce(bytes, DType::F64, ReduceOp::Sum)?;
        let ranks = all.pop().unwrap_or(0.0);
        let mut last = lock(&self.last_buffers);
        if ranks > 0.0 {
            for x in &mut all {
                *x /= ranks;
            }
            last.clone_from(&all);
        } else {
            // Nobody has any that are numbers.
            all.clone_from(&last);
        }
        let mut all = all.into_iter();
        let value = |old: TensorData| {
            let new: Vec<f64> = all.by_ref().take(old.num_elements()).collect();
            match new.len() == old.num_elements() {
                true => TensorData::new(new, old.shape().clone()).convert_dtype(old.dtype()),
                // In the first step.
                false => old,
            }
        };
        buffers.write(values.into_iter().map(value).collect());
        Ok(())
    }
}
