//! A step on the own share, and the exchange of the stepped parameters.

use super::{ZeroRedundancyOptimizer, exchange, partition::Entry, pieces::Pieces};
use crate::{
    error::Error,
    reducer::aligned,
    train::{
        OptimizerError,
        params::{FloatMapper, FloatVisitor, map, visit},
    },
};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Tensor, TensorData};
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// Bytes before those of the parameters that tell which parameters a rank has stepped.
const MARK: usize = 8;

/// Steps the parameters with the numbers `stepped`, those that have a gradient, in module order; collective unless there are none.
pub(super) fn step<M: Module>(
    optimizer: &mut ZeroRedundancyOptimizer,
    lr: ModuleLearningRate,
    model: M,
    grads: GradientsParams,
    stepped: &[usize],
) -> Result<M, Error> {
    if stepped.is_empty() {
        return Ok(model);
    }
    let entries = optimizer.partition.entries();
    let stepped: Vec<&Entry> = stepped.iter().map(|&number| &entries[number]).collect();
    let mut share = Share {
        rank: optimizer.ddp.rank(),
        owned: HashMap::new(),
        grads,
        bytes: mark(&stepped).to_vec(),
        failure: None,
    };
    for entry in &stepped {
        if entry.piece(share.rank).is_some() {
            share.owned.insert(&entry.spec.path, entry);
        }
    }
    let inner = &mut optimizer.inner;
    let model = if optimizer.split {
        share.step_pieces(inner, lr, &model);
        model
    } else {
        share.step_whole(inner, lr, model)
    };
    if let Some(failure) = share.failure {
        return Err(failure);
    }
    let all = gather(optimizer, share.bytes, &stepped)?;
    let mut adopt = Adopt::new(&all, &stepped);
    if !optimizer.split {
        // What this rank has stepped as a whole is in the model already.
        adopt
            .values
            .retain(|path, _| !share.owned.contains_key(path));
    }
    Ok(map(model, &mut adopt))
}

/// A hash of the stepped parameters and their owners.
fn mark(stepped: &[&Entry]) -> [u8; MARK] {
    let mut hasher = Sha256::new();
    for entry in stepped {
        hasher.update(format!("{} {:?}\n", entry.spec.path, entry.pieces));
    }
    let hash = hasher.finalize();
    std::array::from_fn(|i| hash[i])
}

/// Every rank's mark and stepped values, compared and in rank order.
fn gather(
    optimizer: &ZeroRedundancyOptimizer,
    own: Vec<u8>,
    stepped: &[&Entry],
) -> Result<Vec<Vec<u8>>, Error> {
    let rank = optimizer.ddp.rank();
    let mut lengths = vec![MARK; optimizer.ddp.world_size()];
    for entry in stepped {
        for piece in &entry.pieces {
            lengths[piece.owner] += entry.bytes(piece);
        }
    }
    let all = exchange::all_gather(&**optimizer.ddp.group(), own, &lengths)?;
    let ours = &all[rank][..MARK];
    match all.iter().position(|theirs| theirs[..MARK] != *ours) {
        None => Ok(all),
        Some(peer) => Err(OptimizerError::StepsDiffer { rank, peer }.into()),
    }
}

/// What this rank steps.
struct Share<'a> {
    rank: usize,
    owned: HashMap<&'a str, &'a Entry>,
    grads: GradientsParams,
    /// The stepped values, in module order.
    bytes: Vec<u8>,
    failure: Option<Error>,
}

impl Share<'_> {
    /// Steps the own parameters inside `model`.
    fn step_whole<M: Module>(
        &mut self,
        inner: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        model: M,
    ) -> M {
        let mut keep = Keep {
            share: self,
            kept: GradientsParams::new(),
        };
        visit(&model, &mut keep);
        let kept = keep.kept;
        let model = inner.step(lr, model, kept);
        visit(&model, &mut Read { share: self });
        model
    }

    /// Steps the own parts of the parameters of `model`, outside of it.
    fn step_pieces<M: Module>(
        &mut self,
        inner: &mut ModuleOptimizer,
        lr: ModuleLearningRate,
        model: &M,
    ) {
        let mut cut = Cut {
            share: self,
            pieces: Pieces::default(),
            grads: GradientsParams::new(),
        };
        visit(model, &mut cut);
        let (pieces, grads) = (cut.pieces, cut.grads);
        for (path, param) in inner.step(lr, pieces, grads).parts {
            self.read(&path, param.into_value());
        }
    }

    fn read<const D: usize>(&mut self, path: &str, tensor: Tensor<D>) {
        match tensor.try_into_data() {
            Ok(data) => self.bytes.extend_from_slice(data.as_bytes()),
            Err(cause) => {
                self.failure.get_or_insert(Error::Read {
                    rank: self.rank,
                    path: path.to_string(),
                    cause: cause.to_string(),
                });
            }
        }
    }
}

/// Keeps the gradients of the own parameters only.
struct Keep<'a, 'b> {
    share: &'a mut Share<'b>,
    kept: GradientsParams,
}

impl FloatVisitor for Keep<'_, '_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.share.owned.contains_key(path)
            && let Some(gradient) = self.share.grads.remove::<D>(param.id)
        {
            self.kept.register(param.id, gradient);
        }
    }
}

/// Reads the own parameters after the step.
struct Read<'a, 'b> {
    share: &'a mut Share<'b>,
}

impl FloatVisitor for Read<'_, '_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.share.owned.contains_key(path) {
            self.share.read(path, param.base());
        }
    }
}

/// Takes the own parts of parameters and gradients, flat.
struct Cut<'a, 'b> {
    share: &'a mut Share<'b>,
    pieces: Pieces,
    grads: GradientsParams,
}

impl FloatVisitor for Cut<'_, '_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let owned = self.share.owned.get(path);
        let Some(piece) = owned.and_then(|entry| entry.piece(self.share.rank)) else {
            return;
        };
        let Some(gradient) = self.share.grads.remove::<D>(param.id) else {
            return;
        };
        let flat = |tensor: Tensor<D>| -> Tensor<1> {
            let elements: usize = tensor.dims().iter().product();
            tensor.reshape([elements]).slice([piece.elements.clone()])
        };
        // As ModuleOptimizer does it: a parameter is stepped where its gradient is.
        let value = param.base().inner().to_device(&gradient.device());
        // An optimizer steps tensors that know autodiff only.
        let part = Param::initialized(param.id, Tensor::from_inner(flat(value)));
        self.grads.register(param.id, flat(gradient));
        self.pieces.parts.push((path.to_string(), part));
    }
}

/// Puts the stepped values into the model.
struct Adopt<'a> {
    /// The parts of each parameter.
    values: HashMap<&'a str, (&'a Entry, Vec<&'a [u8]>)>,
}

impl<'a> Adopt<'a> {
    /// `all` has each rank's mark and its parts of the parameters `stepped`, in this order.
    fn new(all: &'a [Vec<u8>], stepped: &[&'a Entry]) -> Self {
        let mut rest: Vec<&[u8]> = all.iter().map(|bytes| &bytes[MARK..]).collect();
        let mut take = |owner: usize, bytes: usize| {
            let (head, tail) = rest[owner].split_at(bytes);
            rest[owner] = tail;
            head
        };
        let values = stepped.iter().map(|&entry| {
            let pieces = entry.pieces.iter();
            let parts = pieces.map(|piece| take(piece.owner, entry.bytes(piece)));
            (entry.spec.path.as_str(), (entry, parts.collect()))
        });
        Self {
            values: values.collect(),
        }
    }
}

impl FloatMapper for Adopt<'_> {
    fn map<const D: usize>(&mut self, path: &str, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((entry, parts)) = self.values.remove(path) else {
            return param;
        };
        let dtype = entry.spec.dtype;
        let bytes = match parts[..] {
            [whole] => aligned(whole, dtype),
            _ => aligned(&parts.concat(), dtype),
        };
        param.map(|old| {
            let data = TensorData::from_bytes(bytes, old.dims(), dtype.into());
            let device = old.device().inner();
            let new = Tensor::<D>::from_data(data, (&device, old.dtype()));
            like(new, &old)
        })
    }
}

/// `new` as a leaf of the kind that `old` is: what an optimizer of Burn's does with a stepped parameter.
fn like<const D: usize>(new: Tensor<D>, old: &Tensor<D>) -> Tensor<D> {
    let Some(strategy) = old.gradient_checkpointing_strategy() else {
        return new;
    };
    let new = Tensor::from_inner(new).with_gradient_checkpointing_strategy(strategy);
    if old.is_require_grad() {
        new.require_grad()
    } else {
        new
    }
}
