//! What gradient synchronisation adds to a training step.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Relu};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn_ddp::{Ddp, RoundTrace, WrapConfig};
use serde::Serialize;
use std::time::Instant;

/// `depth` times Linear(width, width) and ReLU, as in the PyTorch script this is compared with.
#[derive(Module, Debug)]
pub struct Mlp {
    layers: Vec<Linear>,
    act: Relu,
}

impl Mlp {
    /// With random weights on `device`.
    pub fn new(width: usize, depth: usize, device: &Device) -> Self {
        let layer = |_| LinearConfig::new(width, width).init(device);
        Self {
            layers: (0..depth).map(layer).collect(),
            act: Relu::new(),
        }
    }

    /// `[rows, width]` to `[rows, width]`.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers
            .iter()
            .fold(x, |x, layer| self.act.forward(layer.forward(x)))
    }
}

/// Size of the model and the measurement.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Features of each layer.
    pub width: usize,
    /// Number of layers.
    pub depth: usize,
    /// Rows per rank and step.
    pub batch: usize,
    /// Steps timed of each kind.
    pub steps: usize,
    /// Gradient bytes of a bucket.
    pub bucket_bytes: usize,
}

/// The result, times in milliseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SyncCost {
    /// Ranks.
    pub ranks: usize,
    /// Parameters of the model.
    pub params: usize,
    /// Median step: forward, backward with synchronisation, optimizer.
    pub step_ms: f64,
    /// Median of the same step without synchronisation.
    pub no_sync_ms: f64,
    /// Median of the same step of the model that was not wrapped.
    pub plain_ms: f64,
    /// `step_ms / no_sync_ms - 1`.
    pub sync_cost: f64,
    /// Share of communication time inside backward.
    pub overlap_ratio: f64,
}

/// Measures on this rank; collective. Also the timeline of the last synchronised step.
///
/// # Errors
///
/// When the ranks do not stay together.
pub fn measure(ddp: &Ddp, sizes: Sizes) -> Result<(SyncCost, Option<RoundTrace>), burn_ddp::Error> {
    let device = Device::flex().autodiff();
    let plain = Mlp::new(sizes.width, sizes.depth, &device);
    let config = WrapConfig::new().bucket_bytes(sizes.bucket_bytes);
    let model = ddp.wrap_with(plain.clone(), config)?;
    let params = model.num_params();
    let x = Tensor::<2>::random(
        [sizes.batch, sizes.width],
        burn::tensor::Distribution::Default,
        &device,
    );
    let bench = |model| Bench {
        model,
        optimizer: SgdConfig::new().init(),
        x: x.clone(),
    };
    let (mut plain, mut bench) = (bench(plain), bench(model));
    let warm_up = 3;
    let (mut sync, mut local, mut unwrapped) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..warm_up + sizes.steps {
        ddp.barrier()?;
        let (with_sync, grads) = bench.step(None);
        ddp.barrier()?;
        // The first pass of a window: it keeps its gradients and adds nothing. Its optimizer makes the same step as the
        // synchronised one, with the gradients of that.
        let guard = ddp.no_sync();
        let (without_sync, _) = bench.step(Some(grads));
        drop(guard);
        // Closes the window, untimed.
        bench.model.forward(bench.x.clone()).sum().backward();
        ddp.barrier()?;
        let (without_hooks, _) = plain.step(None);
        if step >= warm_up {
            unwrapped.push(without_hooks);
            sync.push(with_sync);
            local.push(without_sync);
        }
    }
    let (step_ms, no_sync_ms, plain_ms) = (median(sync), median(local), median(unwrapped));
    let cost = SyncCost {
        ranks: ddp.world_size(),
        params,
        step_ms,
        no_sync_ms,
        plain_ms,
        sync_cost: step_ms / no_sync_ms - 1.0,
        overlap_ratio: ddp.stats().overlap_ratio,
    };
    Ok((cost, ddp.traces().pop()))
}

struct Bench {
    model: Mlp,
    optimizer: ModuleOptimizer,
    x: Tensor<2>,
}

impl Bench {
    /// Milliseconds of one step, and its gradients. With `instead`, the optimizer uses those.
    fn step(&mut self, instead: Option<GradientsParams>) -> (f64, GradientsParams) {
        let begin = Instant::now();
        let loss = self.model.forward(self.x.clone()).sum();
        let own = GradientsParams::from_grads(loss.backward(), &self.model);
        let grads = instead.unwrap_or(own);
        let kept = copy(&grads, &self.model);
        self.model = self.optimizer.step(1e-9, self.model.clone(), grads);
        (begin.elapsed().as_secs_f64() * 1e3, kept)
    }
}

/// Another handle to the same gradients; copies nothing.
fn copy(grads: &GradientsParams, model: &Mlp) -> GradientsParams {
    let mut copy = GradientsParams::new();
    for layer in &model.layers {
        if let Some(gradient) = grads.get::<2>(layer.weight.id) {
            copy.register(layer.weight.id, gradient);
        }
        if let Some((id, gradient)) = layer
            .bias
            .as_ref()
            .and_then(|b| Some((b.id, grads.get::<1>(b.id)?)))
        {
            copy.register(id, gradient);
        }
    }
    copy
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
