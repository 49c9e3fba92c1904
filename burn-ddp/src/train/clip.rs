//! Gradient clipping over the whole model, on averaged gradients.

use super::{
    OptimizerError,
    params::{FloatVisitor, TiedFields, visit},
};
use crate::{Ddp, Error};
use burn::backend::DispatchDevice;
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor, TensorData};
use half::{bf16, f16};
use macerator::{Simd, with_simd};
use std::{borrow::Cow, collections::HashSet};

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
            grads,
            norm,
            tied: TiedFields::default(),
            total: 0.0,
            failure: None,
        };
        visit(model, &mut measure);
        if let Some(failure) = measure.failure {
            return Err(failure);
        }
        let (grads, total) = match norm {
            Norm::L2 => (measure.grads, measure.total.sqrt()),
            Norm::Inf => (measure.grads, measure.total),
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

struct Measure {
    rank: usize,
    grads: GradientsParams,
    norm: Norm,
    tied: TiedFields,
    /// The sum of squares, or the largest absolute value.
    total: f64,
    failure: Option<Error>,
}

impl FloatVisitor for Measure {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let tied = self.tied.is_tied(param.id);
        if tied || self.failure.is_some() {
            return;
        }
        let Some(gradient) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let (rank, path) = (self.rank, path.to_string());
        let (device, dtype) = (gradient.device(), gradient.dtype());
        let on_host = is_host(&device);
        // Where a tensor is host memory, its only owner reads and remakes it without a copy.
        if !on_host {
            self.grads.register(param.id, gradient.clone());
        }
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
                if on_host {
                    let gradient = Tensor::<D>::from_data(data, (&device, dtype));
                    self.grads.register(param.id, gradient);
                }
            }
        }
    }
}

/// Whether the device's tensors lie in host memory.
fn is_host(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        DispatchDevice::Flex(_) => true,
        _ => false,
    }
}

/// The sum of squares or the largest absolute value; not finite when any element is not.
fn size(data: &TensorData, norm: Norm) -> f64 {
    fn of<E: bytemuck::Pod + Into<f64>>(bytes: &[u8], norm: Norm) -> f64 {
        let aligned = bytemuck::try_cast_slice(bytes).map(Cow::Borrowed);
        let values = aligned.unwrap_or_else(|_| Cow::Owned(bytemuck::pod_collect_to_vec(bytes)));
        match norm {
            Norm::L2 => sum_of_squares::<E>(&values),
            Norm::Inf => largest::<E>(&values),
        }
    }

    let bytes = data.as_bytes();
    match data.dtype() {
        DType::F64 => of::<f64>(bytes, norm),
        DType::F16 => of::<f16>(bytes, norm),
        DType::BF16 => of::<bf16>(bytes, norm),
        _ => of::<f32>(bytes, norm),
    }
}

#[with_simd]
#[allow(
    clippy::extra_unused_type_parameters,
    reason = "`with_simd` wants the level's type, though only the compiler makes vectors here"
)]
fn sum_of_squares<S: Simd, E: Copy + Into<f64>>(values: &[E]) -> f64 {
    /// Sums that are independent of each other, so that the order of additions is the same with vectors of any width.
    const LANES: usize = 8;

    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            let x: f64 = (*x).into();
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        let x: f64 = (*x).into();
        *sum += x * x;
    }
    sums.iter().sum()
}

fn largest<E: Copy + Into<f64>>(values: &[E]) -> f64 {
    let absolute = values.iter().map(|x| (*x).into().abs());
    absolute.fold(0.0, |largest, x| match x.is_nan() {
        // `max` would drop it.
        true => f64::INFINITY,
        false => largest.max(x),
    })
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
