//! Batch norm over the batches of all ranks.

use crate::{
    Error,
    autodiff::{
        exchange::Statistics,
        layers::{Bound, Link},
        normalize::{Normalized, normalized, wide},
    },
    error::BackwardPanic,
    reducer::ReducerError,
};
use burn::{
    module::{Flag, Module, Param, RunningState},
    nn::BatchNorm,
    tensor::{Tensor, TensorData},
};

/// Burn's [`BatchNorm`] with the statistics of all ranks' batches: output, gradients and running statistics are those of one process on the
/// concatenated batch.
///
/// Takes the place of `BatchNorm` in a model; their records are the same. Until the model is [wrapped](crate::Ddp::wrap), in evaluation and in a world of one it
/// is Burn's layer. In a wrapped model in training, each forward pass and each backward pass through it has one all-gather of two f64 numbers a
/// channel (of the model's widest such layer), for which the ranks wait for each other: all ranks must come through the same such layers in the same
/// order, which is checked.
///
/// Ranks may have batches of different sizes, or empty ones. Gradients are right for a loss that is a mean over the rank's samples under
/// [`Reduction::Mean`](crate::Reduction::Mean) (the mean of the ranks' losses) and, in [`Ddp::weighted`](crate::Ddp::weighted), under `WeightedMean` (the mean
/// over samples). [`Ddp::join`](crate::Ddp::join) answers for it, whatever the other ranks do in a step. Statistics of 16-bit inputs are computed in f32, and
/// put together in f64.
///
/// S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015; the parts are put together as in T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and
/// a Pairwise Algorithm for Computing Sample Variances", 1979.
///
/// ```
/// # use burn::{nn::BatchNormConfig, prelude::*};
/// # use burn_ddp::{Ddp, train::SyncBatchNorm};
/// # fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
/// # let device = ddp.device(Device::flex())?.autodiff();
/// let norm = SyncBatchNorm::new(BatchNormConfig::new(4).init(&device));
/// let norm = ddp.wrap(norm)?;
/// let y = norm.forward(Tensor::<2>::ones([8, 4], &device));
/// # Ok(())
/// # }
/// # fn main() -> Result<(), burn_ddp::Error> { burn_ddp::launch(train) }
/// ```
#[derive(Module, Debug)]
pub struct SyncBatchNorm {
    /// The learnable weight gamma.
    pub gamma: Param<Tensor<1>>,
    /// The learnable weight beta.
    pub beta: Param<Tensor<1>>,
    /// Whether the layer takes part in training; if not, it uses the running statistics.
    pub training: Param<Flag>,
    /// The running mean.
    pub running_mean: RunningState<Tensor<1>>,
    /// The running variance.
    pub running_var: RunningState<Tensor<1>>,
    /// Share of the newest batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub epsilon: f64,
    link: Link,
}

impl From<BatchNorm> for SyncBatchNorm {
    fn from(norm: BatchNorm) -> Self {
        Self::new(norm)
    }
}

impl SyncBatchNorm {
    /// The same layer over all ranks, from `wrap` on. Local.
    pub fn new(norm: BatchNorm) -> Self {
        Self {
            link: Link::new(norm.gamma.shape().num_elements()),
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
        }
    }

    /// Burn's layer with the same parameters and running statistics. Local.
    pub fn into_batch_norm(self) -> BatchNorm {
        BatchNorm {
            gamma: self.gamma,
            beta: self.beta,
            training: self.training,
            running_mean: self.running_mean,
            running_var: self.running_var,
            momentum: self.momentum,
            epsilon: self.epsilon,
        }
    }

    /// `[samples, channels, ...]` to the same shape. Collective in training, in a wrapped model; so is the backward pass through it.
    ///
    /// # Panics
    ///
    /// As [`BatchNorm::forward`] over wrong shapes. Where [`try_forward`](Self::try_forward) returns an error, with a payload that is a
    /// [`BackwardPanic`].
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self.train_or_infer(input) {
            Ok(output) => output,
            Err(error) => BackwardPanic::raise(error),
        }
    }

    /// [`forward`](Self::forward) with the loss of a peer as an error. Collective in training, in a wrapped model.
    ///
    /// # Errors
    ///
    /// [`Error::Reducer`] when a peer is lost, does not come in time, or comes with another layer. The job cannot go on.
    pub fn try_forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, Error> {
        Ok(self.train_or_infer(input)?)
    }

    fn train_or_infer<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, ReducerError> {
        let channels = self.gamma.shape().num_elements();
        let trains = input.device().is_autodiff() && self.training.is_enabled();
        // Burn's layer also says what is wrong with a shape.
        let fits = D >= 2 && input.dims().get(1) == Some(&channels);
        match self.link.bound().filter(|_| trains && fits) {
            None => Ok(self.clone().into_batch_norm().forward(input)),
            Some(at) => {
                let output = self.train(input, at, channels);
                output.inspect_err(|error| at.exchange.abort(error))
            }
        }
    }

    fn train<const D: usize>(
        &self,
        input: Tensor<D>,
        at: &Bound,
        channels: usize,
    ) -> Result<Tensor<D>, ReducerError> {
        let (device, dtype) = (input.device(), input.dtype());
        let x = input.clone().detach().cast(wide(dtype));
        let own =
            own_statistics(x.clone(), channels).map_err(|e| at.exchange.cannot(at.layer, e))?;
        let all = at.exchange.statistics(at.layer, &own)?;
        let per_channel = |values: Vec<f64>| {
            let data = TensorData::new(values, [channels]).convert_dtype(wide(dtype));
            Tensor::<1>::from_data(data, (&device, wide(dtype)))
        };
        let mut shape = [1; D];
        shape[1] = channels;
        let deviation = all
            .variance
            .iter()
            .map(|v| (v + self.epsilon).sqrt().recip());
        let deviation = per_channel(deviation.collect()).reshape(shape);
        let mean = per_channel(all.mean);
        let normal = (x - mean.clone().reshape(shape)) * deviation.clone();
        if all.count > 0.0 {
            self.update(&self.running_mean, mean);
            self.update(&self.running_var, per_channel(all.variance));
        }
        let of = Normalized::new(at, channels, all.count);
        let normal = normalized(input, normal.cast(dtype), deviation, of);
        Ok(normal * self.gamma.val().reshape(shape) + self.beta.val().reshape(shape))
    }

    fn update(&self, running: &RunningState<Tensor<1>>, batch: Tensor<1>) {
        let old = running.value_sync().to_device(&batch.device());
        let kept = old
            .clone()
            .cast(batch.dtype())
            .mul_scalar(1.0 - self.momentum);
        let new = kept + batch.mul_scalar(self.momentum);
        running.update(new.cast(old.dtype()).detach());
    }
}

/// Of this rank's batch, which may be empty: the deviations are taken from the mean, not from zero.
fn own_statistics<const D: usize>(x: Tensor<D>, channels: usize) -> Result<Statistics, String> {
    let count = x.shape().num_elements() / channels.max(1);
    if count == 0 {
        return Ok(Statistics::empty(channels));
    }
    let rows = x.swap_dims(0, 1).reshape([channels, count]);
    let mean = rows.clone().mean_dim(1);
    let apart = rows - mean.clone();
    let variance = (apart.clone() * apart).mean_dim(1);
    let both = Tensor::cat(vec![mean, variance], 0);
    let mut values = both.try_into_vec_as::<f64>().map_err(|e| e.to_string())?;
    let variance = values.split_off(channels);
    Ok(Statistics {
        count: count as f64,
        mean: values,
        variance,
    })
}
