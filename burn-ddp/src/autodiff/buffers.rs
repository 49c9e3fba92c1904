//! Running statistics, which every rank has of its own data.

use super::{hook::ParamHook, session::Session};
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
        buffers: find.buffers.clone(),
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

/// Which float tensors are buffers: those that are not trained and that nothing could be attached to.
#[derive(Default)]
struct Find {
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

/// Whether the tensor that a traversal has come to is a buffer.
fn step(next: &mut usize, buffers: &[usize]) -> bool {
    let is = buffers.binary_search(next).is_ok();
    *next += 1;
    is
}

/// Frees the memory of everything but the buffers.
struct Strip {
    buffers: Vec<usize>,
    next: usize,
}

impl ModuleMapper for Strip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match step(&mut self.next, &self.buffers) {
            true => param,
            false => param.map(|old| Tensor::zeros([0; D], &old.device())),
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
        let group = reducer.group();
        match self.buffer_policy {
            BufferPolicy::Off => return Ok(()),
            BufferPolicy::Broadcast => {
                let root = counted.iter().position(|counted| *counted).unwrap_or(0);
                group.broadcast(bytemuck::cast_slice_mut(&mut all), DType::F64, root)?;
            }
            BufferPolicy::Average => {
                if !counted[self.rank] {
                    all.fill(0.0);
                }
                let bytes = bytemuck::cast_slice_mut(&mut all);
                group.all_reduce(bytes, DType::F64, ReduceOp::Sum)?;
                let ranks = counted.iter().filter(|counted| **counted).count();
                for x in &mut all {
                    *x /= ranks.max(1) as f64;
                }
            }
        }
        let mut all = all.into_iter();
        let value = |old: TensorData| {
            let new: Vec<f64> = all.by_ref().take(old.num_elements()).collect();
            TensorData::new(new, old.shape().clone()).convert_dtype(old.dtype())
        };
        buffers.write(values.into_iter().map(value).collect());
        Ok(())
    }
}
