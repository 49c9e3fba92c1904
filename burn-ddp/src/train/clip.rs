//! Gradient clipping over the whole model, on averaged gradients.

use super::{
    OptimizerError,
    params::{FloatVisitor, TiedFields, visit},
};
use crate::{Ddp, Error};
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};
use half::{bf16, f16};
use std::collections::HashSet;

/// How large a gradient is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Norm {
    /// Square root of the sum of the squares.
    #[default]
    L2,
    /// Largest absolute value.
    Inf,
}

impl Ddp {
    /// Scales the gradients of `model` so that their norm, taken over all parameters together, is at most `max_norm`; returns them and the norm
    /// that they had (Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013, algorithm 1). Local.
    ///
    /// Call it on averaged gradients, which is what `backward` returns for a wrapped model (after [`unscale`](super::LossScaler::unscale), if the
    /// loss was scaled). They are the same bits on all ranks and are added up in a fixed order in f64, so the factor is the same
    /// on all ranks without another message. For that they are read to the host. Fields that share one parameter count once. The gradient
    /// clipping of Burn's optimizers takes each parameter by itself.
    ///
    /// `max_norm` of infinity changes nothing and tells the norm.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::NonFiniteGradient`], on every rank, when a gradient is infinite or not a number: there is nothing that scaling could
    /// make of them. [`Error::Read`] when a gradient cannot be read from its device.
    pub fn clip_grad_norm<M: Module>(
        &self,
        grads: GradientsParams,
        model: &M,
        max_norm: f64,
        norm: Norm,
    ) -> Result<(GradientsParams, f64), Error> {
        let mut measure = Measure {
            rank: self.rank(),
            grads: &grads,
            norm,
            tied: TiedFields::default(),
            total: 0.0,
            failure: None,
        };
        visit(model, &mut measure);
        if let Some(failure) = measure.failure {
            return Err(failure);
        }
        let total = match norm {
            Norm::L2 => measure.total.sqrt(),
            Norm::Inf => measure.total,
        };
        if total <= max_norm {
            return Ok((grads, total));
        }
        let factor = max_norm / total;
        Ok((map_grads(grads, model, Scale(factor)), total))
    }

    /// Limits every element of the gradients of `model` to `-limit..=limit`. Local; on averaged gradients, as [`clip_grad_norm`](Self::clip_grad_norm).
    ///
    /// Infinities become the limit, what is not a number stays so.
    pub fn clip_grad_value<M: Module>(
        &self,
        grads: GradientsParams,
        model: &M,
        limit: f64,
    ) -> GradientsParams {
        map_grads(grads, model, Limit(limit))
    }
}

struct Measure<'a> {
    rank: usize,
    grads: &'a GradientsParams,
    norm: Norm,
    tied: TiedFields,
    /// The sum of squares, or the largest absolute value.
    total: f64,
    failure: Option<Error>,
}

impl FloatVisitor for Measure<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let tied = self.tied.is_tied(param.id);
        let Some(gradient) = self.grads.get::<D>(param.id).filter(|_| !tied) else {
            return;
        };
        if self.failure.is_some() {
            return;
        }
        let (rank, path) = (self.rank, path.to_string());
        match gradient.try_into_data() {
            Err(cause) => {
                let cause = cause.to_string();
                self.failure = Some(Error::Read { rank, path, cause });
            }
            Ok(data) => {
                let size = size(&data, self.norm);
                if !size.is_finite() {
                    self.failure = Some(OptimizerError::NonFiniteGradient { rank, path }.into());
                }
                self.total = match self.norm {
                    Norm::L2 => self.total + size,
                    Norm::Inf => self.total.max(size),
                };
            }
        }
    }
}

/// The sum of squares or the largest absolute value; not finite when any element is not.
fn size(data: &TensorData, norm: Norm) -> f64 {
    /// Sums that are independent of each other, so that the processor need not wait for one to add to it.
    const LANES: usize = 8;

    fn fold<E: bytemuck::Pod>(bytes: &[u8], norm: Norm, f64_of: impl Fn(E) -> f64) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let add = |lane: &mut f64, x: f64| match norm {
            Norm::L2 => *lane += x * x,
            // `max` would drop what is not a number.
            Norm::Inf if x.is_nan() => *lane = f64::INFINITY,
            Norm::Inf => *lane = lane.max(x.abs()),
        };
        let chunks = bytes.chunks_exact(LANES * size_of::<E>());
        let tail = chunks.remainder();
        for chunk in chunks.chain([tail]) {
            let elements = chunk.chunks_exact(size_of::<E>());
            for (lane, element) in lanes.iter_mut().zip(elements) {
                add(lane, f64_of(bytemuck::pod_read_unaligned(element)));
            }
        }
        match norm {
            Norm::L2 => lanes.iter().sum(),
            Norm::Inf => lanes.iter().copied().fold(0.0, f64::max),
        }
    }

    let bytes = data.as_bytes();
    match data.dtype() {
        DType::F64 => fold(bytes, norm, |x: f64| x),
        DType::F16 => fold(bytes, norm, |x: f16| x.to_f64()),
        DType::BF16 => fold(bytes, norm, |x: bf16| x.to_f64()),
        _ => fold(bytes, norm, |x: f32| f64::from(x)),
    }
}

/// What is done to each gradient.
pub(super) trait OnGradient {
    fn apply<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D>;
}

struct Scale(f64);

impl OnGradient for Scale {
    fn apply<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D> {
        gradient.mul_scalar(self.0)
    }
}

struct Limit(f64);

impl OnGradient for Limit {
    fn apply<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D> {
        gradient.clamp(-self.0, self.0)
    }
}

/// `grads` with `change` made to those of `model`.
pub(super) fn map_grads<M: Module>(
    grads: GradientsParams,
    model: &M,
    change: impl OnGradient,
) -> GradientsParams {
    struct Change<O> {
        grads: GradientsParams,
        /// Two fields of a plain model can share a gradient.
        changed: HashSet<ParamId>,
        on: O,
    }
    impl<O: OnGradient> FloatVisitor for Change<O> {
        fn visit<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
            if self.changed.insert(param.id)
                && let Some(gradient) = self.grads.remove::<D>(param.id)
            {
                self.grads.register(param.id, self.on.apply(gradient));
            }
        }
    }
    let mut change = Change {
        grads,
        changed: HashSet::new(),
        on: change,
    };
    visit(model, &mut change);
    change.grads
}
