//! Gradients that point into the buckets.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::{
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, SgdConfig, momentum::MomentumConfig},
    prelude::*,
};
use burn_ddp::{CompressHook, Ddp, NonFinitePolicy, PowerSgdHook, Reduction, WrapConfig};
use burn_ddp_tests::{models::TwoHeads, oracle::*, ranks};
use peak_alloc::PeakAlloc;
use std::sync::Arc;

/// Counts what is on the heap, where tensors are too.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const WIDTH: usize = 256;
const LAYERS: usize = 8;

#[derive(Module, Debug)]
struct Chain {
    layers: Vec<Linear>,
}

impl Chain {
    fn new(device: &Device) -> Self {
        let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        Self {
            layers: (0..LAYERS).map(|_| config.init(device)).collect(),
        }
    }

    fn loss(&self, step: u64, rank: usize) -> Tensor<1> {
        let x = batch(step, rank..rank + 1, [0, WIDTH], &device());
        square(self.layers.iter().fold(x, |x, layer| layer.forward(x)))
    }
}

/// Most bytes on the heap during a backward pass beyond those before it.
fn peak(ddp: &Ddp, views: bool) -> usize {
    let config = WrapConfig::new()
        .first_bucket_bytes(1)
        .bucket_bytes(1)
        .gradient_as_bucket_view(views);
    let model = ddp.wrap_with(Chain::new(&device()), config).unwrap();
    let mut peak = 0;
    for step in 0..3 {
        let loss = model.loss(step, ddp.rank());
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        assert_eq!(grads.len(), LAYERS);
        peak = HEAP.peak_usage() - before;
    }
    peak
}

#[test]
fn the_memory_of_the_gradients_is_saved() {
    let all = LAYERS * WIDTH * WIDTH * 4;
    let runs = ranks(2).run("the_memory_of_the_gradients_is_saved", |ddp: Ddp| {
        (peak(&ddp, false), peak(&ddp, true))
    });
    for (copies, views) in runs.into_iter().flatten() {
        // Copies: every local gradient stays until the reduced one is written over it. Views: two of them on their way, at most.
        assert!(copies >= all, "{copies} of {all}");
        assert!(views <= all * 3 / LAYERS, "{views} of {all}");
    }
}

/// One step after the other, with everything that happens to gradients.
#[test]
fn views_have_the_same_bits_as_copies() {
    type Change = fn(WrapConfig) -> WrapConfig;
    let changes: [Change; 6] = [
        |config| config,
        |config| config.first_bucket_bytes(1).bucket_bytes(1),
        |config| config.reduction(Reduction::Sum),
        |config| config.reduction(Reduction::WeightedMean),
        |config| config.comm_hook(Arc::new(CompressHook::bf16())),
        |config| {
            config
                .comm_hook(Arc::new(PowerSgdHook::new(2).min_compression_rate(1.0)))
                .non_finite(NonFinitePolicy::Skip)
        },
    ];
    ranks(3).run("views_have_the_same_bits_as_copies", |ddp: Ddp| {
        let start = ddp.unwrap(ddp.wrap(TwoHeads::new(&device())).unwrap());
        let train = |index: usize, views: bool| {
            let config = changes[index](WrapConfig::new().gradient_as_bucket_view(views));
            let weighted = index == 3;
            let mut model = ddp.wrap_with(start.clone(), config).unwrap();
            let mut adam = AdamWConfig::new().init();
            for step in 0..6 {
                let x = batch(
                    step,
                    ddp.rank() * 4..(ddp.rank() + 1) * 4,
                    [0, 8],
                    &device(),
                );
                // A head that only rank 0 uses, and a step that is spoilt.
                let mut loss = square(model.forward(x, ddp.is_main()));
                if step == 3 && ddp.rank() == 2 && index == 5 {
                    loss = loss * f32::NAN;
                }
                let grads = match weighted {
                    true => ddp.weighted(ddp.rank() + 1, || loss.backward()),
                    false => loss.backward(),
                };
                let grads = GradientsParams::from_grads(grads, &model);
                model = adam.step(0.01, model, grads);
                assert_same_bits(&ddp, &model);
            }
            let model = ddp
                .join(model, |model, grads| adam.step(0.01, model, grads))
                .unwrap();
            fingerprint(&model)
        };
        for index in 0..changes.len() {
            assert_eq!(train(index, true), train(index, false), "{index}");
        }
    });
}

#[test]
fn ddp_38_a_kept_gradient_is_not_overwritten() {
    ranks(2).run("ddp_38_a_kept_gradient_is_not_overwritten", |ddp: Ddp| {
        let config = WrapConfig::new().gradient_as_bucket_view(true);
        let mut model = ddp.wrap_with(Chain::new(&device()), config).unwrap();
        let momentum = MomentumConfig::new().with_momentum(0.9);
        let mut optim = SgdConfig::new().with_momentum(Some(momentum)).init();
        let mut kept = Vec::new();
        for step in 0..4 {
            let grads = model.loss(step, ddp.rank()).backward();
            let grads = GradientsParams::from_grads(grads, &model);
            // The tensors themselves, and their bytes at this time.
            let tensors: Vec<Tensor<2>> = model
                .layers
                .iter()
                .map(|layer| grads.get::<2>(layer.weight.id).unwrap())
                .collect();
            let bytes = tensors.iter().map(|t| t.to_data()).collect::<Vec<_>>();
            kept.push((tensors, bytes));
            model = optim.step(0.01, model, grads);
        }
        for (tensors, bytes) in kept {
            for (tensor, bytes) in tensors.into_iter().zip(bytes) {
                assert_eq!(tensor.into_data(), bytes);
            }
        }
    });
}

/// What one holder writes is not seen by the other.
#[test]
fn writing_to_a_view_makes_a_copy() {
    ranks(2).run("writing_to_a_view_makes_a_copy", |ddp: Ddp| {
        let config = WrapConfig::new().gradient_as_bucket_view(true);
        let model = ddp.wrap_with(Chain::new(&device()), config).unwrap();
        let grads = model.loss(0, ddp.rank()).backward();
        let mut grads = GradientsParams::from_grads(grads, &model);
        let ids = [0, 1].map(|layer| model.layers[layer].weight.id);
        let first = grads.remove::<2>(ids[0]).unwrap();
        let before = grads.get::<2>(ids[1]).unwrap().to_data();
        let expected = first
            .to_data()
            .iter::<f32>()
            .map(|x| x * 2.0)
            .collect::<Vec<_>>();
        // Alone in its tensor, so that Burn may write in place.
        assert_eq!(floats(first.mul_scalar(2.0)), expected);
        assert_eq!(grads.get::<2>(ids[1]).unwrap().to_data(), before);
    });
}
