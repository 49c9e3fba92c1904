//! Batch norm over the batches of all ranks.

use crate::{Ddp, Error, autodiff::gather::Gather, error::BackwardPanic, group::GroupError};
use burn::{
    module::{Flag, Module, Param, RunningState},
    nn::BatchNorm,
    tensor::{DType, Tensor, TensorData, assert_shape},
};

/// Burn's [`BatchNorm`] with the statistics of all ranks' batches: output, gradients and running statistics are those of one process on the
/// concatenated batch.
///
/// Takes the place of `BatchNorm` in a model; their records are the same. In training each forward pass and each backward pass through it has one collective of
/// two numbers a channel (and rank, in backward), for which the ranks wait for each other: all ranks must come through the same such
/// layers in the same order. In evaluation, and in a world of one, it is Burn's own.
///
/// Ranks may have batches of different sizes, and none. Gradients are right for a loss that is a mean over the rank's samples under
/// [`Reduction::Mean`](crate::Reduction::Mean) (the mean of the ranks' losses) and, in [`Ddp::weighted`], under `WeightedMean` (the mean over samples). [`Ddp::join`]
/// answers for it: a rank that has run out of data repeats the exchanges of its own last step with no samples. So it needs to have made one, and the others' steps must have as many
/// passes: leave a short last window out. Rows that count nothing under a weight of 0 still are in the statistics, but give no gradient to those before them: leave them out of the batch. Statistics
/// of 16-bit inputs are computed in f32.
///
/// S. Ioffe and C. Szegedy, "Batch Normalization", ICML 2015; the parts are put together as in T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and
/// a Pairwise Algorithm for Computing Sample Variances", 1979.
///
/// ```
/// # use burn::{nn::BatchNormConfig, prelude::*};
/// # use burn_ddp::{Ddp, train::SyncBatchNorm};
/// # fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
/// # let device = ddp.device(Device::flex())?.autodiff();
/// let norm = SyncBatchNorm::new(BatchNormConfig::new(4).init(&device), &ddp)?;
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
    #[module(skip)]
    gather: Gather,
}

impl SyncBatchNorm {
    /// The same layer over all ranks. The first one of a process is collective, and all ranks make the same layers in the same order.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] when the peers do not make the same call.
    pub fn new(norm: BatchNorm, ddp: &Ddp) -> Result<Self, Error> {
        Ok(Self {
            gamma: norm.gamma,
            beta: norm.beta,
            training: norm.training,
            running_mean: norm.running_mean,
            running_var: norm.running_var,
            momentum: norm.momentum,
            epsilon: norm.epsilon,
            gather: ddp.gather()?.next(),
        })
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

    /// `[samples, channels, ...]` to the same shape. Collective in training; so is the backward pass through it.
    ///
    /// # Panics
    ///
    /// As [`BatchNorm::forward`] over wrong shapes. Where [`try_forward`](Self::try_forward) returns an error, with a payload that is a
    /// [`BackwardPanic`].
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self.train_or_infer(input) {
            Ok(output) => output,
            Err(error) => BackwardPanic::raise(error.into()),
        }
    }

    /// [`forward`](Self::forward) with the loss of a peer as an error. Collective in training.
    ///
    /// # Errors
    ///
    /// [`Error::Group`] when a peer is lost, does not come in time, or comes with another layer.
    pub fn try_forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, Error> {
        Ok(self.train_or_infer(input)?)
    }

    fn train_or_infer<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, GroupError> {
        let train = input.device().is_autodiff() && self.training.is_enabled();
        match train && self.gather.world_size() > 1 {
            true => self.train(input),
            false => Ok(self.clone().into_batch_norm().forward(input)),
        }
    }

    fn train<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, GroupError> {
        let [channels] = self.gamma.shape().dims();
        assert_shape!(input, [_, channels, ..]);
        let (dims, input_dtype) = (input.dims(), input.dtype());
        let wide = match input_dtype {
            DType::F16 | DType::BF16 => input.cast(DType::F32),
            _ => input,
        };
        let samples = wide.shape().num_elements() / dims[1].max(1);
        let rows = wide.clone().swap_dims(0, 1).reshape([dims[1], samples]);
        let mean = rows.clone().mean_dim(1);
        let centered = rows - mean.clone();
        let variance = (centered.clone() * centered).mean_dim(1);
        let own = Tensor::cat(vec![mean, variance], 1).swap_dims(0, 1);
        let (all, counts) = self
            .gather
            .statistics(own.reshape([2 * dims[1]]), samples as u64)?;

        let ranks = counts.len();
        let total: u64 = counts.iter().sum();
        let shares = counts.iter().map(|n| *n as f64 / total.max(1) as f64);
        let shares = TensorData::new(shares.collect::<Vec<f64>>(), [ranks, 1]);
        let dtype = all.dtype();
        let shares = Tensor::<2>::from_data(shares.convert_dtype(dtype), (&all.device(), dtype));
        let means = all.clone().slice([0..ranks, 0..channels]);
        let variances = all.slice([0..ranks, channels..2 * channels]);
        let mean = (means.clone() * shares.clone()).sum_dim(0);
        let apart = means - mean.clone();
        let variance = ((variances + apart.clone() * apart) * shares).sum_dim(0);

        self.update(&self.running_mean, mean.clone());
        self.update(&self.running_var, variance.clone());
        let mut shape = [1; D];
        shape[1] = channels;
        let scale = variance.add_scalar(self.epsilon).sqrt();
        let normal = (wide - mean.reshape(shape)) / scale.reshape(shape);
        let normal = normal.cast(input_dtype);
        Ok(normal * self.gamma.val().reshape(shape) + self.beta.val().reshape(shape))
    }

    fn update(&self, running: &RunningState<Tensor<1>>, batch: Tensor<2>) {
        let old = running.value_sync().to_device(&batch.device());
        let batch = batch.detach().squeeze::<1>().cast(old.dtype());
        let new = old.mul_scalar(1.0 - self.momentum) + batch.mul_scalar(self.momentum);
        running.update(new.detach());
    }
}
