//! The code of the page on optimizers.

use burn::lr_scheduler::{LrScheduler, cosine::CosineAnnealingLrSchedulerConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn_ddp::Ddp;
use burn_ddp::train::{
    Checkpoint, CheckpointManager, LinearScaling, LossScaler, Norm, Snapshot,
    ZeroRedundancyOptimizer,
};
use burn_ddp_tests::{models::Mlp, oracle::*, ranks};
use std::{error::Error, path::Path};

type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

fn loss_of(ddp: &Ddp, model: &Mlp, step: u64) -> Tensor<1> {
    let rows = ddp.rank() * 4..(ddp.rank() + 1) * 4;
    square(model.forward(batch(step, rows, [0, 8], &device())))
}

/// Trains on the batches `steps`; the norms of the gradients.
fn train(
    ddp: &Ddp,
    mut model: Mlp,
    mut optim: ZeroRedundancyOptimizer,
    steps: std::ops::Range<u64>,
) -> Result<(Mlp, ZeroRedundancyOptimizer, Vec<f64>)> {
    let mut norms = Vec::new();
    let lr = 0.01;
    for step in steps {
        let loss = loss_of(ddp, &model, step);
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let (grads, norm) = ddp.clip_grad_norm(grads, &model, 1.0, Norm::L2)?;
        // ANCHOR: zero_step
        model = optim.step(lr, model, grads)?; // collective
        // ANCHOR_END: zero_step
        norms.push(norm);
    }
    Ok((model, optim, norms))
}

/// [`train`] with Burn's own optimizer.
fn train_plain(
    ddp: &Ddp,
    mut model: Mlp,
    mut optim: ModuleOptimizer,
    steps: std::ops::Range<u64>,
) -> Result<(Mlp, Vec<f64>)> {
    let mut norms = Vec::new();
    let lr = 0.01;
    for step in steps {
        let loss = loss_of(ddp, &model, step);
        // ANCHOR: clip
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let (grads, norm) = ddp.clip_grad_norm(grads, &model, 1.0, Norm::L2)?;
        model = optim.step(lr, model, grads);
        // ANCHOR_END: clip
        norms.push(norm);
    }
    Ok((model, norms))
}

fn divided(ddp: Ddp) -> ZeroRedundancyOptimizer {
    // ANCHOR: zero
    let optim = ZeroRedundancyOptimizer::new(&ddp, AdamWConfig::new().init());
    // ANCHOR_END: zero
    optim
}

fn save(
    checkpoints: &CheckpointManager,
    step: u64,
    (model, optim): (Mlp, &ZeroRedundancyOptimizer),
) -> Result {
    // ANCHOR: save
    let record = optim.to_record()?; // collective; on rank 0 only there is one
    let snapshot = Snapshot::new()
        .model("model", &model)
        .optimizer_record("optimizer", record);
    checkpoints.save(step, snapshot)?;
    // ANCHOR_END: save
    Ok(())
}

fn resume(ddp: &Ddp, saved: &Checkpoint) -> Result<(Mlp, ZeroRedundancyOptimizer)> {
    let optim = divided(ddp.clone());
    let model = Mlp::new(&device());
    // ANCHOR: resume
    let model = ddp.wrap(saved.model("model", model)?)?;
    let optim = optim.load_record(saved.optimizer_record("optimizer")?, &model)?;
    // ANCHOR_END: resume
    Ok((model, optim))
}

/// Saved after two steps and resumed, the run ends with the same bits as the one that goes on.
#[test]
fn dividing_the_state() {
    let dir = tempfile::tempdir().unwrap();
    ranks(2)
        .env("BURN_DDP_TEST_BOOK", dir.path().to_str().unwrap())
        .run("optimizers::dividing_the_state", |ddp: Ddp| {
            let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
            let dir = Path::new(&dir).join(ddp.group().transport());
            let checkpoints = ddp.checkpoints(dir);
            let model = ddp.wrap(Mlp::new(&device())).unwrap();
            let plain = AdamWConfig::new().init();
            let (plain, expected) = train_plain(&ddp, model.clone(), plain, 0..2).unwrap();
            let (model, optim, norms) = train(&ddp, model, divided(ddp.clone()), 0..2).unwrap();
            assert!(norms.iter().all(|norm| *norm > 0.0));
            assert_eq!(norms, expected);
            assert_eq!(fingerprint(&model), fingerprint(&plain));
            save(&checkpoints, 2, (model.clone(), &optim)).unwrap();
            let saved = checkpoints.load().unwrap().unwrap();
            let (resumed, again) = resume(&ddp, &saved).unwrap();
            let [one, other] = [(model, optim), (resumed, again)].map(|(model, optim)| {
                let (model, optim, _) = train(&ddp, model, optim, 2..4).unwrap();
                (fingerprint(&model), optim.state_bytes().unwrap())
            });
            assert_eq!(one, other);
            assert!(one.1.held < one.1.whole);
        });
}

fn scaled_step(
    ddp: Ddp,
    mut model: Mlp,
    (optim, scaler): (&mut ModuleOptimizer, &mut LossScaler),
    (loss, lr): (Tensor<1>, f64),
) -> Result<Mlp> {
    // ANCHOR: scale
    let grads = GradientsParams::from_grads(scaler.scale(loss).backward(), &model);
    if let Some(grads) = scaler.unscale(&ddp, grads, &model)? {
        let (grads, _) = ddp.clip_grad_norm(grads, &model, 1.0, Norm::L2)?;
        model = optim.step(lr, model, grads);
    } // else all ranks leave out this step
    // ANCHOR_END: scale
    Ok(model)
}

/// With a scale beyond f32 the first step is left out, on all ranks.
#[test]
fn scaling_the_loss() {
    ranks(2).run("optimizers::scaling_the_loss", |ddp: Ddp| {
        let mut model = ddp.wrap(Mlp::new(&device())).unwrap();
        let mut optim = AdamWConfig::new().init();
        for (scale, steps) in [(1e39, false), (65536.0, true)] {
            let mut scaler = LossScaler::new().with_scale(scale);
            let before = fingerprint(&model);
            let loss = loss_of(&ddp, &model, 0);
            let state = (&mut optim, &mut scaler);
            model = scaled_step(ddp.clone(), model, state, (loss, 0.01)).unwrap();
            assert_eq!(fingerprint(&model) != before, steps);
            assert_eq!(
                scaler.current_scale(),
                if steps { scale } else { scale / 2.0 }
            );
        }
    });
}

#[test]
fn a_rate_for_a_larger_batch() {
    let runs = ranks(2).run("optimizers::a_rate_for_a_larger_batch", |ddp: Ddp| {
        let rates = |factor: f64| {
            // ANCHOR: rate
            let schedule = CosineAnnealingLrSchedulerConfig::new(0.1, 1000)
                .init()
                .unwrap();
            let mut schedule = LinearScaling::new(schedule, factor).with_warm_up(100);
            // once per optimizer step, as ever:
            let lr = schedule.step();
            // ANCHOR_END: rate
            let rest: Vec<f64> = (1..=100).map(|_| schedule.step()).collect();
            [lr, rest[99]]
        };
        [rates(1.0), rates(ddp.world_size() as f64)]
    });
    for [[first, later], [first_of_two, later_of_two]] in runs.into_iter().flatten() {
        assert_eq!([first, later * 2.0], [first_of_two, later_of_two]);
    }
}
