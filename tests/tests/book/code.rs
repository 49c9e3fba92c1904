//! The code of the book's pages, between `ANCHOR` lines, each piece in a test that runs it. [`pages`](super::pages) compares the
//! pages with it.

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::prelude::*;
use burn_ddp::data::{DistributedLoader, LoaderBuilder, LoaderState, MarkedBatch, Tail};
use burn_ddp::{Ddp, Launcher, train::Mean, try_backward};
use burn_ddp_tests::{Ending, launched, oracle::floats, ranks};
use std::{error::Error, fs, path::Path};

pub(super) type Result<T = (), E = Box<dyn Error>> = std::result::Result<T, E>;

/// One weight; the score of an item x is w * x.
#[derive(Module, Debug)]
pub(super) struct Model {
    w: Param<Tensor<1>>,
}

impl Model {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            w: Param::from_tensor(Tensor::zeros([1], device)),
        }
    }

    fn forward(&self, batch: Tensor<1>) -> Tensor<1> {
        batch * self.w.val()
    }

    pub(super) fn weight(&self) -> f32 {
        floats(self.w.val())[0]
    }
}

/// The gradient of the weight is the mean of the batch.
pub(super) fn loss_of(model: &Model, batch: Tensor<1>) -> Tensor<1> {
    model.forward(batch).mean()
}

struct Numbers;

impl Batcher<f32, Tensor<1>> for Numbers {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
        Tensor::from_data(&items[..], device)
    }
}

pub(super) fn device() -> Device {
    Device::flex().autodiff()
}

/// A loader of the numbers `0..len`, two of them in a rank's batch.
pub(super) fn numbers(ddp: &Ddp, len: usize, device: Device) -> LoaderBuilder<f32, Tensor<1>> {
    let items = (0..len).map(|item| item as f32).collect();
    ddp.loader(InMemDataset::new(items), Numbers)
        .batch_size(2)
        .device(device)
}

fn accumulate(
    ddp: &Ddp,
    loader: &DistributedLoader<Tensor<1>>,
    mut model: Model,
    (mut optim, lr, window): (ModuleOptimizer, f64, usize),
) -> Result<Model> {
    // ANCHOR: accumulate
    let batches = loader.num_batches(); // of this rank; the same on all ranks
    for (i, batch) in loader.iter().enumerate() {
        let closes = (i + 1) % window == 0 || i + 1 == batches;
        let loss = loss_of(&model, batch?) / window as f32;

        let guard = (!closes).then(|| ddp.no_sync());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        drop(guard);

        if closes {
            model = optim.step(lr, model, grads);
        }
    }
    // ANCHOR_END: accumulate
    Ok(model)
}

/// Batches of the two ranks: 0 1 | 2 3, 4 5 | 6 7, 8 9 | 10 11, in windows of two and of one. With the losses halved the
/// gradients are (0.5 + 4.5 + 2.5 + 6.5) / 4 = 3.5 and (8.5 + 10.5) / 4 = 4.75.
#[test]
fn accumulation() {
    let runs = ranks(2).run("code::accumulation", |ddp: Ddp| {
        let loader = numbers(&ddp, 12, device()).build().unwrap();
        let model = ddp.wrap(Model::new(&device())).unwrap();
        let optim = SgdConfig::new().init();
        let model = accumulate(&ddp, &loader, model, (optim, 1.0, 2)).unwrap();
        (model.weight(), ddp.stats().rounds)
    });
    for run in runs {
        assert_eq!(run, [(-8.25, 2); 2]);
    }
}

fn closure(ddp: &Ddp, model: Model, [first, second]: [Tensor<1>; 2]) -> [Option<f32>; 2] {
    let gradient = |grads: &GradientsParams| grads.get::<1>(model.w.id).map(|g| floats(g)[0]);
    // ANCHOR: without-sync
    let nothing = ddp.without_sync(|| loss_of(&model, first).backward());
    let sum = loss_of(&model, second).backward();
    // ANCHOR_END: without-sync
    [nothing, sum].map(|grads| gradient(&GradientsParams::from_grads(grads, &model)))
}

/// Rank 0 has 1 and 2, rank 1 has 3 and 8: sums of 3 and 11.
#[test]
fn a_closure_without_sync() {
    let runs = ranks(2).run("code::a_closure_without_sync", |ddp: Ddp| {
        let model = ddp.wrap(Model::new(&device())).unwrap();
        let mine = [[1.0, 2.0], [3.0, 8.0]][ddp.rank()];
        closure(&ddp, model, mine.map(|x| Tensor::from_data([x], &device())))
    });
    for run in runs {
        assert_eq!(run, [[None, Some(7.0)]; 2]);
    }
}

/// A score is an error here.
fn evaluate(ddp: Ddp, model: &Model, loader: &DistributedLoader<Tensor<1>>) -> Result<f64> {
    // ANCHOR: evaluate
    let model = model.valid();
    let mut error = Mean::default(); // a sum and a count
    for batch in loader.iter() {
        let batch = batch?;
        let [items] = batch.dims();
        error.add(model.forward(batch).sum().into_scalar(), items);
    }
    let mean_error = error.reduce(&ddp)?; // of all ranks; `None` if there is no item at all
    // ANCHOR_END: evaluate
    Ok(mean_error.unwrap())
}

fn evaluate_padded(ddp: &Ddp, model: &Model, loader: &DistributedLoader<Tensor<1>>) -> Result<f64> {
    let mut error = Mean::default();
    // ANCHOR: marked
    for batch in loader.iter_marked() {
        let MarkedBatch { batch, valid, .. } = batch?;
        let errors: Vec<f32> = model.forward(batch).into_data().try_to_vec()?;
        error.extend(errors[..valid].iter().copied().map(f64::from));
    }
    // ANCHOR_END: marked
    Ok(error.reduce(ddp)?.unwrap())
}

/// The items 0 to 6 on three ranks, weight 2: a mean of 2 * 3. The seventh item pads two ranks with the items 0 and 1.
#[test]
fn evaluation() {
    let runs = ranks(3).run("code::evaluation", |ddp: Ddp| {
        let loader = |tail| numbers(&ddp, 7, Device::flex()).tail(tail).build().unwrap();
        let mut model = Model::new(&device());
        model.w = Param::from_tensor(Tensor::from_data([2.0], &device()));
        let exact = evaluate(ddp.clone(), &model, &loader(Tail::Exact)).unwrap();
        let padded = evaluate(ddp.clone(), &model, &loader(Tail::Pad)).unwrap();
        let marked = evaluate_padded(&ddp, &model.valid(), &loader(Tail::Pad)).unwrap();
        [exact, padded, marked]
    });
    for [exact, padded, marked] in runs.into_iter().flatten() {
        assert_eq!([exact, marked], [6.0, 6.0]);
        assert!((padded - 44.0 / 9.0).abs() < 1e-12, "{padded}");
    }
}

fn save(
    ddp: &Ddp,
    dir: &Path,
    (model, optim, loader): (&Model, &ModuleOptimizer, &DistributedLoader<Tensor<1>>),
    step: usize,
) -> Result {
    // ANCHOR: save
    let state = serde_json::to_string(&loader.state())?;
    ddp.save_on_main(|| -> Result {
        let draft = dir.join("draft");
        fs::create_dir_all(&draft)?;
        model.clone().save_file(draft.join("model.bpk"))?;
        optim.save(draft.join("optimizer.bpk"))?;
        fs::write(draft.join("loader.json"), &state)?;
        Ok(fs::rename(draft, dir.join(format!("step-{step}")))?)
    })?;
    // ANCHOR_END: save
    Ok(())
}

fn resume(
    ddp: &Ddp,
    dir: &Path,
    loader: &DistributedLoader<Tensor<1>>,
    device: &Device,
) -> Result<(Model, ModuleOptimizer)> {
    let config = optimizer();
    // ANCHOR: resume
    // On every rank: the ids of the parameters, by which the optimizer finds its state, come from the model's file.
    let model = Model::new(device).try_load_file(dir.join("model.bpk"))?;
    let model = ddp.wrap(model)?;
    let optim = config.init().load(dir.join("optimizer.bpk"))?;
    let state: LoaderState = serde_json::from_str(&fs::read_to_string(dir.join("loader.json"))?)?;
    loader.restore(&state)?;
    // ANCHOR_END: resume
    Ok((model, optim))
}

pub(super) fn optimizer() -> SgdConfig {
    SgdConfig::new().with_momentum(Some(
        MomentumConfig::new().with_momentum(0.5).with_dampening(0.0),
    ))
}

/// `steps` steps with learning rate 1.
fn train(
    loader: &DistributedLoader<Tensor<1>>,
    (mut model, mut optim): (Model, ModuleOptimizer),
    steps: usize,
) -> (Model, ModuleOptimizer) {
    for batch in loader.iter().take(steps) {
        let loss = loss_of(&model, batch.unwrap());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(1.0, model, grads);
    }
    (model, optim)
}

/// Batch means over both ranks are 1.5, 5.5 and 9.5; with momentum 0.5 the steps are 1.5, 6.25 and 12.625. The second run starts
/// with other parameter ids, and without momentum its last step would be 9.5.
#[test]
fn saving_and_resuming() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let runs =
        ranks(2)
            .env("BURN_DDP_TEST_BOOK", dir)
            .run("code::saving_and_resuming", |ddp: Ddp| {
                let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
                let dir = Path::new(&dir).join(ddp.group().transport());
                let loader = || numbers(&ddp, 12, device()).build().unwrap();
                let first = loader();
                let fresh = ddp.wrap(Model::new(&device())).unwrap();
                let (model, optim) = train(&first, (fresh, optimizer().init()), 2);
                save(&ddp, &dir, (&model, &optim, &first), 2).unwrap();
                let second = loader();
                let resumed = resume(&ddp, &dir.join("step-2"), &second, &device()).unwrap();
                let start = resumed.0.weight();
                (start, train(&second, resumed, 1).0.weight())
            });
    for run in runs {
        assert_eq!(run, [(-7.75, -20.375); 2]);
    }
}

fn step(ddp: &Ddp, dir: &Path, model: Model, loss: Tensor<1>) -> Result {
    // ANCHOR: try-backward
    let grads = match try_backward(&loss) {
        Ok(grads) => grads,
        Err(error) => {
            // Nothing collective from here on: the peers may be gone.
            model.save_file(dir.join(format!("rank-{}.bpk", ddp.rank())))?;
            return Err(error.into());
        }
    };
    // ANCHOR_END: try-backward
    drop(grads);
    Ok(())
}

#[test]
fn a_failed_backward() {
    let dir = tempfile::tempdir().unwrap();
    let runs = ranks(2)
        .env("BURN_DDP_TEST_BOOK", dir.path().to_str().unwrap())
        .over("shm")
        .run_raw("code::a_failed_backward", || {
            let ddp = Ddp::from_env().unwrap();
            let dir = std::env::var("BURN_DDP_TEST_BOOK").unwrap();
            let model = ddp.wrap(Model::new(&device())).unwrap();
            if ddp.rank() == 1 {
                ddp.abort("the disk is full");
                return String::new();
            }
            let loss = loss_of(&model, Tensor::ones([2], &device()));
            let error = step(&ddp, Path::new(&dir), model, loss).unwrap_err();
            error.to_string()
        });
    for run in runs {
        assert_eq!(run[0].0, Ending::Exit(0));
        let text = run[0].1.as_deref().unwrap();
        assert!(text.starts_with("rank 0: stopped"), "{text}");
        assert!(text.contains(" because rank 1 "), "{text}");
        assert!(text.ends_with("failed: the disk is full"), "{text}");
        assert!(dir.path().join("rank-0.bpk").is_file());
    }
}

/// The page's `main`, and what it counts.
#[test]
fn before_and_after_launch() {
    fn train(_: Ddp) -> Result<(), burn_ddp::Error> {
        eprintln!("train");
        Ok(())
    }
    let ended = launched("code::before_and_after_launch", &["2", "1"], |nproc| {
        let launcher = Launcher::new().nproc(nproc.parse().unwrap());
        let run = || -> Result<(), burn_ddp::Error> {
            // ANCHOR: before-and-after
            eprintln!("before"); // nproc + 1 times: in the launching process and in each rank
            launcher.run(train)?; // `train` runs nproc times
            eprintln!("after"); // nproc + 1 times, if nothing failed
            // ANCHOR_END: before-and-after
            Ok(())
        };
        std::process::exit(i32::from(run().is_err()));
    });
    for (ended, expected) in ended.iter().zip([[3, 2, 3], [1, 1, 1]]) {
        assert_eq!(ended.code, Some(0), "{ended:#?}");
        let count = |word| {
            ended
                .stderr
                .lines()
                .filter(|line| line.ends_with(word))
                .count()
        };
        assert_eq!(
            ["before", "train", "after"].map(count),
            expected,
            "{ended:#?}"
        );
    }
}
