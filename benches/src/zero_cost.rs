//! What dividing Adam's state over the ranks costs per step and saves in memory.

use crate::sync_cost::{Mlp, median};
use burn::optim::{AdamConfig, GradientsParams};
use burn::prelude::*;
use burn_ddp::{
    Ddp, Error,
    train::{StateBytes, ZeroRedundancyOptimizer},
};
use serde::Serialize;
use std::time::Instant;

/// Size of the model and the measurement.
#[derive(Clone, Copy, Debug)]
pub struct ZeroSizes {
    /// Features of each layer.
    pub width: usize,
    /// Number of layers.
    pub depth: usize,
    /// Rows per rank and step.
    pub batch: usize,
    /// Steps timed of each kind.
    pub steps: usize,
    /// Whether parameters are divided too.
    pub split: bool,
}

/// The result, times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ZeroCost {
    /// Ranks.
    pub ranks: usize,
    /// Parameters of the model.
    pub params: usize,
    /// Bytes of state on this rank and on all.
    pub state: StateBytes,
    /// Median step with the plain optimizer: forward, backward, optimizer.
    pub plain_ms: f64,
    /// Median of the same step with the state divided.
    pub zero_ms: f64,
    /// The optimizer's part of `plain_ms`.
    pub plain_optimizer_ms: f64,
    /// The optimizer's part of `zero_ms`, with the exchange of parameters.
    pub zero_optimizer_ms: f64,
    /// `zero_ms / plain_ms - 1`.
    pub zero_cost: f64,
}

/// Times of one step, of all and of the optimizer alone.
#[derive(Default)]
struct Times {
    step: Vec<f64>,
    optimizer: Vec<f64>,
}

/// Measures on this rank, both kinds in turns; collective.
///
/// # Errors
///
/// When the ranks do not stay together.
pub fn measure(ddp: &Ddp, sizes: ZeroSizes) -> Result<ZeroCost, Error> {
    let device = Device::flex().autodiff();
    let start = Mlp::new(sizes.width, sizes.depth, &device);
    let params = start.num_params();
    let (mut plain, mut model) = (ddp.wrap(start.clone())?, ddp.wrap(start)?);
    let mut adam = AdamConfig::new().init();
    let mut zero = ZeroRedundancyOptimizer::new(ddp, AdamConfig::new().init());
    if sizes.split {
        zero = zero.split_parameters();
    }
    let shape = [sizes.batch, sizes.width];
    let x = Tensor::<2>::random(shape, burn::tensor::Distribution::Default, &device);
    let warm_up = 3;
    let (mut plain_times, mut zero_times) = (Times::default(), Times::default());
    for step in 0..warm_up + sizes.steps {
        ddp.barrier()?;
        let of_plain = timed(&mut plain, &x, |model, grads| {
            Ok(adam.step(1e-9, model, grads))
        })?;
        ddp.barrier()?;
        let of_zero = timed(&mut model, &x, |model, grads| zero.step(1e-9, model, grads))?;
        if step >= warm_up {
            for (times, (step, optimizer)) in
                [(&mut plain_times, of_plain), (&mut zero_times, of_zero)]
            {
                times.step.push(step);
                times.optimizer.push(optimizer);
            }
        }
    }
    let (plain_ms, zero_ms) = (median(plain_times.step), median(zero_times.step));
    Ok(ZeroCost {
        ranks: ddp.world_size(),
        params,
        state: zero.state_bytes()?,
        plain_ms,
        zero_ms,
        plain_optimizer_ms: median(plain_times.optimizer),
        zero_optimizer_ms: median(zero_times.optimizer),
        zero_cost: zero_ms / plain_ms - 1.0,
    })
}

/// Milliseconds of a step, and of the optimizer in it.
fn timed(
    model: &mut Mlp,
    x: &Tensor<2>,
    optimize: impl FnOnce(Mlp, GradientsParams) -> Result<Mlp, Error>,
) -> Result<(f64, f64), Error> {
    let begin = Instant::now();
    let loss = model.forward(x.clone()).sum();
    let grads = GradientsParams::from_grads(loss.backward(), model);
    let optimizer = Instant::now();
    *model = optimize(model.clone(), grads)?;
    let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    Ok((ms(begin), ms(optimizer)))
}
