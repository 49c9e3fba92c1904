//! The code of the page on checkpoints.

use super::code::{Model, Result, device, loss_of, numbers, optimizer};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::optim::GradientsParams;
use burn_ddp::{Ddp, train::Snapshot};
use burn_ddp_tests::ranks;
use std::{fs, path::Path};

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

/// Entries of the other kinds: saved, and loaded over what differs. The next rate, this rank's noise, the bytes.
fn others(ddp: &Ddp, dir: &Path, vocabulary: &Path) -> Result<(f64, Vec<u64>, Vec<u8>)> {
    let checkpoints = ddp.checkpoints(dir);
    let config = ExponentialLrSchedulerConfig::new(1.0, 0.5);
    let mut schedule = config.init()?;
    schedule.step();
    let mut noise = vec![7, ddp.rank() as u64];
    let step = 1;
    // ANCHOR: others
    let snapshot = Snapshot::new()
        .scheduler("schedule", &schedule) // as `init` of its configuration gives it
        .rank_value("noise", &noise) // each rank's own
        .bytes("vocabulary", || fs::read(vocabulary)); // read on rank 0 alone
    checkpoints.save(step, snapshot)?;
    // ANCHOR_END: others
    (schedule, noise) = (config.init()?, Vec::new());
    let saved = checkpoints.load()?.ok_or("no checkpoint")?;
    // ANCHOR: others_load
    schedule = saved.scheduler("schedule", schedule)?;
    if let Some(own) = saved.rank_value("noise")? {
        noise = own; // there is none on a rank that there was not before
    }
    let vocabulary: Vec<u8> = saved.bytes("vocabulary")?;
    // ANCHOR_END: others_load
    Ok((schedule.step().base(), noise, vocabulary))
}

/// Rates of 1, 1/2, ...; the file is there before any rank.
#[test]
fn entries_of_other_kinds() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("vocabulary"), "abc").unwrap();
    let dir = dir.path().to_str().unwrap();
    let runs = ranks(2).env("BURN_DDP_TEST_BOOK", dir).run(
        "checkpoints::entries_of_other_kinds",
        |ddp: Ddp| {
            let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
            let vocabulary = Path::new(&dir).join("vocabulary");
            let dir = Path::new(&dir).join(ddp.group().transport());
            others(&ddp, &dir, &vocabulary).unwrap()
        },
    );
    for run in runs {
        let of = |rank| (0.5, vec![7, rank], b"abc".to_vec());
        assert_eq!(run, [of(0), of(1)]);
    }
}
