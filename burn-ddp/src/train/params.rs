//! The float parameters of a model with their paths, one after the other.

use crate::autodiff::{ParamHook, attach::tied_id};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::Tensor;
use std::collections::HashMap;

/// Looks at one float parameter after the other.
pub(super) trait FloatVisitor {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>);
}

/// Replaces one float parameter after the other.
pub(super) trait FloatMapper {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>>;
}

/// Shows `visitor` every float parameter of `model`, buffers too, in module order.
pub(super) fn visit<M: Module>(model: &M, visitor: &mut impl FloatVisitor) {
    model.visit(&mut Walk::new(visitor));
}

/// Hands `mapper` every float parameter of `model`, buffers too, in module order.
pub(super) fn map<M: Module>(model: M, mapper: &mut impl FloatMapper) -> M {
    model.map(&mut Walk::new(mapper))
}

/// Keeps the path.
struct Walk<'a, V> {
    path: Vec<String>,
    /// Inside a hook of ours, which shows at most a stand-in that is no part of the model.
    in_hook: bool,
    inner: &'a mut V,
}

impl<'a, V> Walk<'a, V> {
    fn new(inner: &'a mut V) -> Self {
        Self {
            path: Vec::new(),
            in_hook: false,
            inner,
        }
    }

    fn enter(&mut self, name: &str, container: &str) {
        self.in_hook = name == ParamHook::NAME && container == "Reparameterization";
        self.path.push(name.to_string());
    }

    fn exit(&mut self) {
        self.in_hook = false;
        self.path.pop();
    }
}

impl<V: FloatVisitor> ModuleVisitor for Walk<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.in_hook {
            self.inner.visit(&self.path.join("."), param);
        }
    }
}

impl<V: FloatMapper> ModuleMapper for Walk<'_, V> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.enter(name, container);
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.in_hook {
            return param;
        }
        self.inner.map(&self.path.join("."), param)
    }
}

/// Recognises fields that share one parameter: by their id in a plain model, by an id that follows from the
/// first field's in a wrapped one.
#[derive(Default)]
pub(super) struct TiedFields {
    /// The first field's id and the number of fields met, by the ids that lead to them.
    known: HashMap<ParamId, usize>,
    fields: Vec<(ParamId, u64)>,
}

impl TiedFields {
    /// Whether a field met earlier has the parameter of the field `id`, which is met now.
    pub(super) fn is_tied(&mut self, id: ParamId) -> bool {
        let tied = self.known.get(&id).copied();
        let slot = tied.unwrap_or_else(|| {
            self.fields.push((id, 0));
            self.known.insert(id, self.fields.len() - 1);
            self.fields.len() - 1
        });
        let (first, fields) = &mut self.fields[slot];
        *fields += 1;
        self.known.insert(tied_id(*first, *fields), slot);
        tied.is_some()
    }
}
