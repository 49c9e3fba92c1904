//! Dynamic loss scaling.

use super::{
    OptimizerError,
    clip::{OnGradient, map_grads},
    params::{FloatVisitor, visit},
};
use crate::{Ddp, Error};
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

/// Scales the loss of a model that computes in f16, so that small gradients do not become zero, and follows the largest scale that does
/// not overflow (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2).
///
/// ```
/// # use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, prelude::*};
/// # use burn_ddp::{Ddp, train::LossScaler};
/// # fn main() -> Result<(), burn_ddp::Error> { burn_ddp::launch(train) }
/// # fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
/// # let device = Device::flex().autodiff();
/// # let mut model = ddp.wrap(LinearConfig::new(4, 2).init(&device))?;
/// # let mut optim = SgdConfig::new().init();
/// let mut scaler = LossScaler::new();
/// # for _ in 0..2 {
/// # let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).mean();
/// let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
/// if let Some(grads) = scaler.unscale(&ddp, grads, &model)? {
///     model = optim.step(0.1, model, grads);
/// } // else: the scale was too large, and the step is left out
/// # }
/// # Ok(())
/// # }
/// ```
///
/// The rule is PyTorch's: the scale begins at 65536, is halved after each step whose gradients are not finite, and doubled after
/// 2000 steps in a row whose gradients were.
///
/// # All ranks decide alike
///
/// `unscale` looks at averaged gradients, and those are the same bits on every rank: an infinity that one rank's backward produced is
/// in the mean of all. So all ranks leave out the same steps and have the same scale, without a message for it. With gradients that are not
/// averaged they would not: call `scale` and `unscale` on every rank, on a wrapped model. [`check`](Self::check) compares them.
///
/// # What has which type
///
/// Keep the parameters in f32 and cast them, and the input, in the forward pass: then their gradients are f32, and dividing by the scale loses nothing.
/// The gradient of a parameter that is f16 itself is divided in f16. bf16 has the range of f32 and needs no scaling.
///
/// The value is the whole state: serialise it into the checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScaler {
    scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
    /// Steps since the scale was changed.
    good_steps: u32,
}

impl Default for LossScaler {
    fn default() -> Self {
        Self {
            scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            good_steps: 0,
        }
    }
}

impl LossScaler {
    /// The defaults of PyTorch's `GradScaler`.
    pub fn new() -> Self {
        Self::default()
    }

    /// The scale to begin with (default 65536).
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = scale;
        self
    }

    /// Multiplies the scale after `growth_interval` good steps (default 2). A power of two changes exponents only.
    pub fn with_growth_factor(mut self, factor: f64) -> Self {
        self.growth_factor = factor;
        self
    }

    /// Multiplies the scale after a step that overflowed (default 0.5).
    pub fn with_backoff_factor(mut self, factor: f64) -> Self {
        self.backoff_factor = factor;
        self
    }

    /// Good steps in a row after which the scale grows (default 2000).
    pub fn with_growth_interval(mut self, steps: u32) -> Self {
        self.growth_interval = steps;
        self
    }

    /// The present scale.
    pub fn current_scale(&self) -> f64 {
        self.scale
    }

    /// The loss to call `backward` on. An f16 loss is cast to f32 first: its range ends below the scale.
    pub fn scale<const D: usize>(&self, loss: Tensor<D>) -> Tensor<D> {
        let loss = match loss.dtype() {
            DType::F16 => loss.cast(FloatDType::F32),
            _ => loss,
        };
        loss.mul_scalar(self.scale)
    }

    /// The gradients of the loss itself, from averaged gradients of the scaled one; `None` when they are not finite and the step is to be left out, on
    /// all ranks alike. Adjusts the scale for the next step. Local; once per optimizer step, on every rank, before clipping.
    ///
    /// # Errors
    ///
    /// [`Error::Read`] when a gradient cannot be read from its device.
    pub fn unscale<M: Module>(
        &mut self,
        ddp: &Ddp,
        grads: GradientsParams,
        model: &M,
    ) -> Result<Option<GradientsParams>, Error> {
        let mut search = FiniteCheck {
            rank: ddp.rank(),
            grads: &grads,
            finite: Ok(true),
        };
        visit(model, &mut search);
        let finite = search.finite?;
        let scale = self.scale;
        self.update(finite);
        Ok(finite.then(|| map_grads(grads, model, Divide(scale))))
    }

    fn update(&mut self, finite: bool) {
        if !finite {
            self.scale *= self.backoff_factor;
            self.good_steps = 0;
            return;
        }
        self.good_steps += 1;
        if self.good_steps >= self.growth_interval {
            self.good_steps = 0;
            let grown = self.scale * self.growth_factor;
            // An infinite scale would never come back.
            if grown.is_finite() {
                self.scale = grown;
            }
        }
    }

    /// Compares the scalers of all ranks. Collective; for tests, and after a checkpoint was loaded.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::ScalersDiffer`] on every rank that differs from rank 0 and, with the first of them, on rank 0; [`Error::Group`].
    pub fn check(&self, ddp: &Ddp) -> Result<(), Error> {
        let all = ddp.all_gather(self)?;
        let rank = ddp.rank();
        let differs = |peer: usize| all[peer] != *self;
        match (0..all.len()).find(|&peer| differs(peer)) {
            None => Ok(()),
            Some(peer) => Err(OptimizerError::ScalersDiffer {
                rank,
                peer,
                ours: self.describe(),
                theirs: all[peer].describe(),
            }
            .into()),
        }
    }

    fn describe(&self) -> String {
        let Self {
            scale, good_steps, ..
        } = self;
        format!("a scale of {scale} for {good_steps} steps")
    }
}

struct FiniteCheck<'a> {
    rank: usize,
    grads: &'a GradientsParams,
    finite: Result<bool, Error>,
}

impl FloatVisitor for FiniteCheck<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if !matches!(self.finite, Ok(true)) {
            return;
        }
        let Some(gradient) = self.grads.get::<D>(param.id) else {
            return;
        };
        let data = gradient.is_finite().all().try_into_data();
        self.finite = match data {
            Ok(data) => Ok(data.iter::<bool>().all(|finite| finite)),
            Err(cause) => Err(Error::Read {
                rank: self.rank,
                path: path.to_string(),
                cause: cause.to_string(),
            }),
        };
    }
}

struct Divide(f64);

impl OnGradient for Divide {
    fn apply<const D: usize>(&self, gradient: Tensor<D>) -> Tensor<D> {
        gradient.mul_scalar(1.0 / self.0)
    }
}
