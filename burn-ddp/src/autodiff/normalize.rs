//! The normalization of a batch as one operation of a graph, by statistics that are those of all ranks.

use super::{exchange::Exchange, layers::Bound};
use crate::{error::BackwardPanic, reducer::ReducerError};
use burn::backend::{
    Autodiff, Backend, Dispatch, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::tensor::{DType, FloatDType, Shape, Tensor, TensorData};
use std::sync::{Arc, Weak};

/// One use of a synchronised layer.
///
/// Weak, as a [tap](super::tap::Tap) is.
#[derive(Clone, Debug)]
pub(crate) struct Normalized {
    exchange: Weak<Exchange>,
    layer: usize,
    channels: usize,
    /// Numbers of a channel in the batches of all ranks.
    count: f64,
    /// For when the model is gone.
    gone: ReducerError,
}

impl Normalized {
    pub(crate) fn new(at: &Bound, channels: usize, count: f64) -> Self {
        let Bound { exchange, layer } = at;
        Self {
            exchange: Arc::downgrade(exchange),
            layer: *layer,
            channels,
            count,
            gone: exchange.cannot(
                *layer,
                "the wrapped model was dropped before its backward pass: keep it until then",
            ),
        }
    }

    /// The gradient of the input (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3), for that of `normalized`: `deviation` is the
    /// inverse standard deviation, of shape `[1, channels, 1, ...]`. Collective.
    fn input_gradient<B: Backend>(
        &self,
        exchange: &Exchange,
        gradient: FloatTensor<B>,
        normalized: FloatTensor<B>,
        deviation: FloatTensor<B>,
    ) -> Result<FloatTensor<B>, ReducerError> {
        let (device, dtype) = (gradient.device(), gradient.dtype());
        let wide = deviation.dtype();
        let widen = |x: FloatTensor<B>| match dtype == wide {
            true => x,
            false => B::float_cast(x, FloatDType::from(wide)),
        };
        let (gradient, normalized) = (widen(gradient), widen(normalized));
        let own = self.own_sums::<B>(exchange, gradient.clone(), normalized.clone())?;
        let sums = exchange.sums(self.layer, &own)?;
        let per_channel = deviation.shape();
        let mean = |sums: &[f64]| {
            let mean: Vec<f64> = sums.iter().map(|sum| sum / self.count).collect();
            let data = TensorData::new(mean, per_channel.clone()).convert_dtype(wide);
            B::float_from_data(data, &device)
        };
        let (plain, along) = sums.split_at(self.channels);
        let along = B::float_mul(normalized, mean(along));
        let rest = B::float_sub(B::float_sub(gradient, mean(plain)), along);
        let gradient = B::float_mul(rest, deviation);
        Ok(match dtype == wide {
            true => gradient,
            false => B::float_cast(gradient, FloatDType::from(dtype)),
        })
    }

    /// Of each channel, the sum of the gradient, then that of its product with the normalized values.
    fn own_sums<B: Backend>(
        &self,
        exchange: &Exchange,
        gradient: FloatTensor<B>,
        normalized: FloatTensor<B>,
    ) -> Result<Vec<f64>, ReducerError> {
        let rows = gradient.shape().num_elements() / self.channels.max(1);
        if rows == 0 {
            return Ok(vec![0.0; 2 * self.channels]);
        }
        let sum = |x: FloatTensor<B>| {
            let x = B::float_swap_dims(x, 0, 1);
            B::float_sum_dim(B::float_reshape(x, Shape::new([self.channels, rows])), 1)
        };
        let along = sum(B::float_mul(gradient.clone(), normalized));
        let both = B::float_cat(vec![sum(gradient), along], 0);
        let data = burn::tensor::try_read_sync(B::float_into_data(both));
        let data = data.ok_or_else(|| self.cannot(exchange, "its device cannot be read"))?;
        let data = data.map_err(|error| self.cannot(exchange, error))?;
        data.try_into_vec_as::<f64>()
            .map_err(|error| self.cannot(exchange, error))
    }

    fn cannot(&self, exchange: &Exchange, cause: impl ToString) -> ReducerError {
        exchange.cannot(self.layer, cause)
    }
}

/// The operation.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(any(feature = "wgpu", feature = "cuda")), Autodiff)]
pub(crate) trait NormalizeOps: Backend {
    /// `normalized`, which was computed from `x`; its gradient goes to `x`.
    fn ddp_normalized(
        x: FloatTensor<Self>,
        normalized: FloatTensor<Self>,
        deviation: FloatTensor<Self>,
        of: Normalized,
    ) -> FloatTensor<Self> {
        let _ = (x, deviation, of);
        normalized
    }
}

#[cfg(feature = "flex")]
impl NormalizeOps for burn::backend::Flex {}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl NormalizeOps for burn::backend::Cube {}

#[derive(Debug)]
struct Normalize;

impl<B: Backend> Backward<B, 1> for Normalize {
    type State = (FloatTensor<B>, FloatTensor<B>, Normalized);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let (normalized, deviation, of) = ops.state;
        let Some(exchange) = of.exchange.upgrade() else {
            BackwardPanic::raise(of.gone);
        };
        match of.input_gradient::<B>(&exchange, gradient, normalized, deviation) {
            Err(error) => exchange.fail(error),
            Ok(gradient) => {
                let [parent] = ops.parents;
                if let Some(parent) = parent {
                    grads.register::<B>(parent.id, gradient);
                }
            }
        }
    }
}

impl<B: Backend + NormalizeOps, C: CheckpointStrategy> NormalizeOps for Autodiff<B, C> {
    fn ddp_normalized(
        x: FloatTensor<Self>,
        normalized: FloatTensor<Self>,
        deviation: FloatTensor<Self>,
        of: Normalized,
    ) -> FloatTensor<Self> {
        let (_, node) = x.into_parts();
        let (normalized, deviation) = (normalized.into_primitive(), deviation.into_primitive());
        match Backward::<B, 1>::prepare::<C>(Normalize, [node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(ops) => ops.finish((normalized.clone(), deviation, of), normalized),
            OpsKind::UnTracked(ops) => ops.finish(normalized),
        }
    }
}

/// [`NormalizeOps::ddp_normalized`] on tensors; `normalized` and `deviation` are not tracked.
pub(crate) fn normalized<const D: usize>(
    x: Tensor<D>,
    normalized: Tensor<D>,
    deviation: Tensor<D>,
    of: Normalized,
) -> Tensor<D> {
    let (x, normalized, deviation) = (
        x.into_dispatch(),
        normalized.into_dispatch(),
        deviation.into_dispatch(),
    );
    Tensor::from_dispatch(<Dispatch as NormalizeOps>::ddp_normalized(
        x, normalized, deviation, of,
    ))
}

/// The type in which statistics of `dtype` are computed.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}
