//! The code of the page on checkpoints.

use super::code::{Model, Result, device, loss_of, numbers, optimizer};
use burn::optim::GradientsParams;
use burn_ddp::{Ddp, train::Snapshot};
use burn_ddp_tests::ranks;
use std::path::Path;

/// Returns the first step, the weight, and the best loss.
fn train(ddp: &Ddp, dir: &Path, epochs: u64) -> Result<(u64, f32, f64)> {
    let (device, config) = (device(), optimizer());
    let loader = numbers(ddp, 12, device.clone()).build()?;
    // ANCHOR: load
    let checkpoints = ddp.checkpoints(dir).every(2).keep_last(3);
    let mut model = Model::new(&device);
    let mut optim = config.init();
    let (mut step, mut best) = (0, f64::INFINITY);
    if let Some(saved) = checkpoints.load()? {
        model = saved.model("model", model)?; // before `wrap`
        optim = saved.optimizer("optimizer", optim)?;
        saved.loader("loader", &loader)?;
        best = saved.value("best")?;
        step = saved.step();
    }
    let mut model = ddp.wrap(model)?;
    // ANCHOR_END: load
    let start = step;
    // ANCHOR: save
    while loader.state().epoch < epochs {
        for batch in loader.iter() {
            device.seed(ddp.step_seed(42, step)); // dropout and augmentation of this step on this rank
            let loss = loss_of(&model, batch?);
            best = best.min(ddp.mean(loss.clone().into_scalar())?);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(1.0, model, grads);
            step += 1;
            if checkpoints.is_due(step) {
                let snapshot = Snapshot::new()
                    .model("model", &model)
                    .optimizer("optimizer", &optim)
                    .loader("loader", &loader)
                    .value("best", &best);
                checkpoints.save(step, snapshot)?;
            }
        }
    }
    // ANCHOR_END: save
    Ok((start, model.weight(), best))
}

/// As in `saving_and_resuming`: after three steps the weight is -20.375. The second run begins with the checkpoint of step 2 and does step 3 again, with a
/// weight of -7.75 and a mean of 9.5. The third does another epoch: means of 1.5, 5.5 and 9.5 with momentum 0.5 from a velocity of 12.625 are
/// steps of 7.8125, 9.40625 and 14.203125, the last from a weight of -37.59375.
#[test]
fn checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let runs =
        ranks(2)
            .env("BURN_DDP_TEST_BOOK", dir)
            .run("checkpoints::checkpoints", |ddp: Ddp| {
                let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
                let dir = Path::new(&dir).join(ddp.group().transport());
                let run = |epochs| train(&ddp, &dir, epochs).unwrap();
                [run(1), run(1), run(2)]
            });
    for run in runs.into_iter().flatten() {
        let expected = [
            (0, -20.375, -73.625),
            (2, -20.375, -73.625),
            (2, -51.796875, -357.140625),
        ];
        assert_eq!(run, expected);
    }
}
