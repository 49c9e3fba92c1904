//! The code of the pages on uneven data, decisions and hooks; see [`code`](super::code).

use burn::module::{Lora, Module, ModuleMapper, Param};
use burn::nn::{BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::Tolerance;
use burn_ddp::{
    BufferPolicy, CommHook, CompressHook, Ddp, GradBucket, NonFinitePolicy, PowerSgdHook, ReduceOp,
    Reduction, WrapConfig,
    group::GroupError,
    train::{Snapshot, SyncBatchNorm},
};
use burn_ddp_tests::{models::Scalar, oracle::floats, ranks};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::{error::Error, path::Path};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

fn device() -> Device {
    Device::flex().autodiff()
}

/// The gradient of the weight is the mean of the batch.
fn loss_of(model: &Scalar, batch: &[f32]) -> Tensor<1> {
    (Tensor::<1>::from_data(batch, &device()) * model.w.val()).mean()
}

fn uneven(
    ddp: &Ddp,
    mut model: Scalar,
    mut optim: ModuleOptimizer,
    batches: &[&[f32]],
) -> Result<Scalar> {
    let lr = 1.0;
    // ANCHOR: join
    for batch in batches {
        let loss = loss_of(&model, batch);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(lr, model, grads);
    }
    model = ddp.join(model, |model, grads| optim.step(lr, model, grads))?;
    // ANCHOR_END: join
    Ok(model)
}

/// Steps of (2 + 4) / 2 and 6: rank 0 has one batch, rank 1 has two.
#[test]
fn join() {
    ranks(2).run("steps::join", |ddp: Ddp| {
        let model = ddp.wrap(Scalar::new(0.0, &device())).unwrap();
        let mine: &[&[f32]] = if ddp.is_main() {
            &[&[2.0]]
        } else {
            &[&[4.0], &[6.0]]
        };
        let model = uneven(&ddp, model, SgdConfig::new().init(), mine).unwrap();
        assert_eq!(floats(model.w.val()), [-9.0]);
    });
}

#[test]
fn ddp_16_a_stream() {
    fn run(ddp: &Ddp, lines: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut mine = Vec::new();
        // ANCHOR: shard
        for line in ddp.shard(lines) {
            // every world_size-th, beginning with this rank's
            mine.push(line);
        }
        // ANCHOR_END: shard
        mine
    }
    ranks(2).run("steps::ddp_16_a_stream", |ddp: Ddp| {
        let mine = run(&ddp, 0..7);
        assert_eq!(mine, [[0, 2, 4], [1, 3, 5]][ddp.rank()]);
    });
}

/// As [`join`] for two models; the second has half the gradient.
#[test]
fn join_pair() {
    fn run(ddp: &Ddp, batches: &[&[f32]]) -> Result<(Scalar, Scalar)> {
        let [generator, discriminator] = [0.0, 0.0].map(|w| Scalar::new(w, &device()));
        let (mut generator, mut discriminator) = (ddp.wrap(generator)?, ddp.wrap(discriminator)?);
        let (mut optim_g, mut optim_d) = (SgdConfig::new().init(), SgdConfig::new().init());
        let lr = 1.0;
        for batch in batches {
            let loss = loss_of(&discriminator, batch) / 2.0;
            let grads = GradientsParams::from_grads(loss.backward(), &discriminator);
            discriminator = optim_d.step(lr, discriminator, grads);
            let loss = loss_of(&generator, batch);
            let grads = GradientsParams::from_grads(loss.backward(), &generator);
            generator = optim_g.step(lr, generator, grads);
        }
        // ANCHOR: join_pair
        (generator, discriminator) = ddp.join_pair(
            (generator, discriminator),
            |model, grads| optim_g.step(lr, model, grads),
            |model, grads| optim_d.step(lr, model, grads),
        )?;
        // ANCHOR_END: join_pair
        Ok((generator, discriminator))
    }
    ranks(2).run("steps::join_pair", |ddp: Ddp| {
        let mine: &[&[f32]] = if ddp.is_main() {
            &[&[2.0]]
        } else {
            &[&[4.0], &[6.0]]
        };
        let (generator, discriminator) = run(&ddp, mine).unwrap();
        assert_eq!(floats(generator.w.val()), [-9.0]);
        assert_eq!(floats(discriminator.w.val()), [-4.5]);
    });
}

/// Rank 0 has one sample, rank 1 three: the mean over samples is 2, that over ranks 4.
#[test]
fn weighted() {
    fn run(ddp: &Ddp, model: Scalar, batch: &[f32]) -> Result<Option<f32>> {
        // ANCHOR: weighted
        let config = WrapConfig::new().reduction(Reduction::WeightedMean);
        let model = ddp.wrap_with(model, config)?;

        let loss = loss_of(&model, batch); // a mean over this rank's samples
        let grads = ddp.weighted(batch.len(), || loss.backward());
        let grads = GradientsParams::from_grads(grads, &model);
        // ANCHOR_END: weighted
        Ok(model.gradient(&grads))
    }
    ranks(2).run("steps::weighted", |ddp: Ddp| {
        let mine: &[f32] = if ddp.is_main() {
            &[8.0]
        } else {
            &[0.0, 0.0, 0.0]
        };
        let gradient = run(&ddp, Scalar::new(0.0, &device()), mine).unwrap();
        assert_eq!(gradient, Some(2.0));
    });
}

/// Rank 1's second batch has a NaN: no rank steps on it.
#[test]
fn skipping() {
    fn run(
        ddp: &Ddp,
        model: Scalar,
        mut optim: ModuleOptimizer,
        batches: [&[f32]; 3],
    ) -> Result<(Scalar, Vec<String>)> {
        let (lr, mut log) = (1.0, Vec::new());
        // ANCHOR: skip
        let config = WrapConfig::new().non_finite(NonFinitePolicy::Skip);
        let mut model = ddp.wrap_with(model, config)?;
        for batch in batches {
            let loss = loss_of(&model, batch);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(lr, model, grads); // does nothing when the gradients are withheld
            if let Some(verdict) = ddp.non_finite() {
                log.push(verdict.to_string()); // the same on every rank
            }
        }
        // ANCHOR_END: skip
        Ok((model, log))
    }
    ranks(2).run("steps::skipping", |ddp: Ddp| {
        let bad = if ddp.is_main() { 1.0 } else { f32::NAN };
        let batches: [&[f32]; 3] = [&[1.0], &[bad], &[2.0]];
        let model = Scalar::new(0.0, &device());
        let (model, log) = run(&ddp, model, SgdConfig::new().init(), batches).unwrap();
        assert_eq!(floats(model.w.val()), [-3.0]);
        let text = "backward pass 2: the gradient of `w` is not finite; it came from rank(s) [1]";
        assert_eq!(log, [text]);
    });
}

/// Losses of 0.10 and 0.20 with a threshold of 0.15: both ranks go on, since rank 1 is not good enough.
#[test]
fn ddp_12_stopping() {
    fn run(ddp: &Ddp, own_loss: f64, threshold: f64) -> Result<[bool; 3]> {
        // ANCHOR: agree
        let by_mean = ddp.mean(own_loss)? < threshold; // all ranks compare the same number
        let all_agree = ddp.all(own_loss < threshold)?;
        let main_says = ddp.broadcast(own_loss < threshold)?; // rank 0's view, on every rank
        // ANCHOR_END: agree
        Ok([by_mean, all_agree, main_says])
    }
    ranks(2).run("steps::ddp_12_stopping", |ddp: Ddp| {
        let own_loss = [0.10, 0.20][ddp.rank()];
        assert_eq!(run(&ddp, own_loss, 0.15).unwrap(), [false, false, true]);
        assert_eq!(run(&ddp, own_loss, 0.16).unwrap(), [true, false, true]);
    });
}

/// 1.003 is no bf16 number.
#[test]
fn sixteen_bits() {
    fn run(ddp: &Ddp, model: Scalar) -> Result<Scalar> {
        // ANCHOR: bf16
        let config = WrapConfig::new().comm_hook(Arc::new(CompressHook::bf16()));
        let model = ddp.wrap_with(model, config)?;
        // ANCHOR_END: bf16
        Ok(model)
    }
    ranks(2).run("steps::sixteen_bits", |ddp: Ddp| {
        let model = run(&ddp, Scalar::new(0.0, &device())).unwrap();
        let grads = loss_of(&model, &[1.003]).backward();
        let grads = GradientsParams::from_grads(grads, &model);
        assert_eq!(model.gradient(&grads), Some(1.0));
    });
}

/// A matrix of rank 1 arrives as it is: x^T times ones.
#[test]
fn power_sgd() {
    fn run(ddp: &Ddp, model: Linear, dir: &Path) -> Result<Linear> {
        // ANCHOR: power_sgd
        let checkpoints = ddp.checkpoints(dir);
        let hook = Arc::new(PowerSgdHook::new(4)); // matrices of rank 4
        if let Some(saved) = checkpoints.load()? {
            saved.power_sgd("hook", &hook)?; // before the first backward pass
        }
        let config = WrapConfig::new().comm_hook(hook.clone());
        let model = ddp.wrap_with(model, config)?;
        // ANCHOR_END: power_sgd
        let x = [1.0, 3.0][ddp.rank()];
        let x = Tensor::<2>::full([1, 32], x, &device());
        let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
        let weight = grads.get::<2>(model.weight.id).unwrap();
        let expected = TensorData::new(vec![2.0_f32; 1024], [32, 32]);
        let tolerance = Tolerance::<f32>::default();
        weight
            .into_data()
            .assert_approx_eq::<f32>(&expected, tolerance);
        checkpoints.save(1, Snapshot::new().power_sgd("hook", &hook))?;
        Ok(model)
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    ranks(2)
        .env("BURN_DDP_TEST_BOOK", dir)
        .run("steps::power_sgd", |ddp: Ddp| {
            let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
            let dir = Path::new(&dir).join(ddp.group().transport());
            for _ in 0..2 {
                let model = LinearConfig::new(32, 32).init(&device());
                run(&ddp, model, &dir).unwrap();
            }
        });
}

// ANCHOR: hook
/// Sends gradients beyond a limit as the limit.
#[derive(Debug)]
struct Clamp(f32);

impl CommHook for Clamp {
    fn describe(&self) -> String {
        format!("clamp to {}", self.0)
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        let (group, dtype) = (bucket.group(), bucket.dtype());
        // This model's gradients are all f32.
        for x in bytemuck::cast_slice_mut::<u8, f32>(bucket.data_mut()) {
            *x = x.clamp(-self.0, self.0);
        }
        group.all_reduce(bucket.data_mut(), dtype, ReduceOp::Mean)
    }
}
// ANCHOR_END: hook

#[test]
fn a_hook_of_ones_own() {
    ranks(2).run("steps::a_hook_of_ones_own", |ddp: Ddp| {
        let config = WrapConfig::new().comm_hook(Arc::new(Clamp(3.0)));
        let model = ddp.wrap_with(Scalar::new(0.0, &device()), config).unwrap();
        let own = [1.0, 100.0][ddp.rank()];
        let grads = GradientsParams::from_grads(loss_of(&model, &[own]).backward(), &model);
        assert_eq!(model.gradient(&grads), Some(2.0));
    });
}

// ANCHOR: memory
/// Sends multiples of a step, and adds what they leave out to the next gradient.
#[derive(Debug)]
struct Multiples {
    step: f32,
    left: Mutex<HashMap<String, Vec<f32>>>, // by path
}

impl CommHook for Multiples {
    fn describe(&self) -> String {
        format!("multiples of {}", self.step)
    }

    fn reduce(&self, bucket: &mut GradBucket<'_>) -> Result<(), GroupError> {
        let (group, dtype) = (bucket.group(), bucket.dtype());
        let factor = bucket.factor() as f32; // from the bucket's unit to the gradient's
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody has used gets no gradient: what is left of it stays for later.
        for parameter in bucket.parameters().filter(|parameter| parameter.used) {
            let data = &mut bucket.data_mut()[parameter.range];
            let data = bytemuck::cast_slice_mut::<u8, f32>(data);
            let left = left.entry(parameter.path.into()).or_default();
            left.resize(data.len(), 0.0);
            for (x, left) in data.iter_mut().zip(left) {
                let whole = *x * factor + *left;
                let sent = (whole / self.step).round() * self.step;
                (*x, *left) = (sent / factor, whole - sent);
            }
        }
        group.all_reduce(bucket.data_mut(), dtype, ReduceOp::Mean)
    }
}
// ANCHOR_END: memory

/// Multiples of 1. Rank 0 sends 0 of 0.4 and then 1 of 0.8, rank 1 sends 1 of 1 twice.
#[test]
fn a_hook_with_a_memory() {
    ranks(2).run("steps::a_hook_with_a_memory", |ddp: Ddp| {
        let (step, left) = (1.0, Mutex::default());
        let config = WrapConfig::new().comm_hook(Arc::new(Multiples { step, left }));
        let model = ddp.wrap_with(Scalar::new(0.0, &device()), config).unwrap();
        let own = [0.4, 1.0][ddp.rank()];
        for expected in [0.5, 1.0] {
            let grads = GradientsParams::from_grads(loss_of(&model, &[own]).backward(), &model);
            assert_eq!(model.gradient(&grads), Some(expected));
        }
    });
}

/// One sample of 0.4 on rank 0 and three of 1 on rank 1: their parts of the mean are 0.1 and 0.75, of which the ranks send, on two ranks, 0 of 0.2 and 2 of 1.5.
#[test]
fn a_hook_with_a_memory_of_weighted_gradients() {
    ranks(2).run(
        "steps::a_hook_with_a_memory_of_weighted_gradients",
        |ddp: Ddp| {
            let (step, left) = (1.0, Mutex::default());
            let config = WrapConfig::new()
                .comm_hook(Arc::new(Multiples { step, left }))
                .reduction(Reduction::WeightedMean);
            let model = ddp.wrap_with(Scalar::new(0.0, &device()), config).unwrap();
            let mine: &[f32] = [&[0.4][..], &[1.0; 3]][ddp.rank()];
            let loss = loss_of(&model, mine);
            let grads = ddp.weighted(mine.len(), || loss.backward());
            let grads = GradientsParams::from_grads(grads, &model);
            assert_eq!(model.gradient(&grads), Some(1.0));
        },
    );
}

// ANCHOR: sync_field
#[derive(Module, Debug)]
struct Block {
    layer: Linear,
    norm: SyncBatchNorm, // was `BatchNorm`
}
// ANCHOR_END: sync_field

/// Two samples on each rank; the mean of all is 3 and their variance 5.
#[test]
fn batch_norm() {
    fn wrap(ddp: &Ddp, model: Scalar) -> Result<Scalar> {
        // ANCHOR: buffers
        let config = WrapConfig::new().buffers(BufferPolicy::Broadcast); // rank 0's, as in PyTorch
        let model = ddp.wrap_with(model, config)?;
        // ANCHOR_END: buffers
        Ok(model)
    }
    fn run(ddp: Ddp, device: Device, input: Tensor<2>) -> Result<Tensor<2>> {
        // ANCHOR: sync_batch_norm
        let norm = BatchNormConfig::new(2).init(&device);
        let model = Block {
            layer: LinearConfig::new(2, 1).init(&device),
            norm: SyncBatchNorm::new(norm), // same parameters, same records
        };
        let model = ddp.wrap(model)?;
        // ANCHOR_END: sync_batch_norm
        let input = model.norm.forward(input);
        assert_eq!(model.layer.forward(input.clone()).dims(), [2, 1]);
        Ok(input)
    }
    ranks(2).run("steps::batch_norm", |ddp: Ddp| {
        wrap(&ddp, Scalar::new(0.0, &device())).unwrap();
        let rows = [[0.0, 2.0], [4.0, 6.0]][ddp.rank()];
        let input = Tensor::<2>::from_floats(rows.map(|x| [x; 2]), &device());
        let output = floats(run(ddp, device(), input).unwrap());
        for (output, x) in output.chunks(2).zip(rows) {
            assert!((output[0] - (x - 3.0) / 5.00001_f32.sqrt()).abs() < 1e-6);
            assert_eq!(output[0], output[1]);
        }
    });
}

#[test]
fn the_same_in_every_step() {
    fn view(ddp: &Ddp, model: Scalar) -> Result<Scalar> {
        // ANCHOR: view
        let config = WrapConfig::new().gradient_as_bucket_view(true);
        let model = ddp.wrap_with(model, config)?;
        // ANCHOR_END: view
        Ok(model)
    }
    fn static_graph(ddp: &Ddp, model: Scalar) -> Result<Scalar> {
        // ANCHOR: static_graph
        let config = WrapConfig::new().static_graph(true);
        let model = ddp.wrap_with(model, config)?;
        // ANCHOR_END: static_graph
        Ok(model)
    }
    ranks(2).run("steps::the_same_in_every_step", |ddp: Ddp| {
        for wrap in [view, static_graph] {
            let model = wrap(&ddp, Scalar::new(0.0, &device())).unwrap();
            let own = [1.0, 3.0][ddp.rank()];
            let grads = GradientsParams::from_grads(loss_of(&model, &[own]).backward(), &model);
            assert_eq!(model.gradient(&grads), Some(2.0));
        }
    });
}

// ANCHOR: unfreeze
struct Unfreeze;

impl ModuleMapper for Unfreeze {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.set_require_grad(true)
    }
}
// ANCHOR_END: unfreeze

#[test]
fn unfreezing() {
    fn run(ddp: &Ddp, model: Scalar, other: Scalar) -> Result<Option<f32>> {
        #[derive(Module, Debug)]
        struct Both {
            backbone: Scalar,
            head: Scalar,
        }
        let (backbone, head) = (model, other);
        // ANCHOR: freeze
        let backbone = backbone.no_grad(); // before or after `wrap`
        let mut model = ddp.wrap(Both { backbone, head })?;
        // ... and some epochs later, on all ranks before the same step:
        model.backbone = model.backbone.map(&mut Unfreeze);
        // ANCHOR_END: freeze
        let loss = model.backbone.w.val() * [1.0, 3.0][ddp.rank()];
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        Ok(model.backbone.gradient(&grads))
    }
    ranks(2).run("steps::unfreezing", |ddp: Ddp| {
        let new = || Scalar::new(0.0, &device());
        assert_eq!(run(&ddp, new(), new()).unwrap(), Some(2.0));
    });
}

/// Factors a and b = 0 of rank 1: the first step is one of b, by -2 (a0 + a1), since the mean of 1 and 3 is the weight's gradient.
#[test]
fn lora() {
    fn run(ddp: &Ddp, model: Linear, batches: &[Tensor<2>]) -> Result<(Linear, Tensor<2>)> {
        let (mut optim, lr) = (SgdConfig::new().init(), 1.0);
        // ANCHOR: lora
        let model = model.apply_lora(Lora::new(1, 1.0)); // freezes the base; before `wrap`
        let mut model = ddp.wrap(model)?;
        // ANCHOR_END: lora
        let a = model.weight.adapter().ok_or("no adapter")?.a.base();
        let right = model.weight.base() - a.clone() * a.sum().reshape([1, 1]) * 2.0;
        // ANCHOR: lora_train
        for batch in batches {
            let loss = model.forward(batch.clone()).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model); // of the factors
            model = optim.step(lr, model, grads);
        }
        let merged = ddp.unwrap(model); // a plain model with the factors in its weights
        // ANCHOR_END: lora_train
        Ok((merged, right))
    }
    ranks(2).run("steps::lora", |ddp: Ddp| {
        let linear = LinearConfig::new(2, 1).with_bias(false).init(&device());
        let batch = Tensor::full([1, 2], [1.0, 3.0][ddp.rank()], &device());
        let (merged, right) = run(&ddp, linear, &[batch]).unwrap();
        let merged = merged.weight.val().into_data();
        merged.assert_approx_eq::<f32>(&right.into_data(), Tolerance::absolute(1e-5));
    });
}
