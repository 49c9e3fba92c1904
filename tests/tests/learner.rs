//! Burn's learner on real ranks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::data::{
    dataloader::batcher::Batcher,
    dataset::{Dataset, DatasetError},
};
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::optim::{ModuleOptimizer, SgdConfig, momentum::MomentumConfig};
use burn::prelude::*;
use burn::train::{
    ClassificationOutput, InferenceStep, Interrupter, Learner, LearningResult,
    MetricEarlyStoppingStrategy, RegressionOutput, StoppingCondition, SupervisedTraining,
    TrainOutput, TrainStep,
    metric::{
        AccuracyMetric, LossMetric,
        store::{Aggregate, Direction, Split},
    },
};
use burn_ddp::{
    Ddp,
    data::{LoaderBuilder, Tail},
    train::{Mean, SyncBatchNorm},
};
use burn_ddp_tests::{Ending, in_rank, oracle::floats, ranks};
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::{Duration, Instant},
};

/// One weight. The loss of an item is `w * x` in training and `-w * x` in validation; items above 0.5 are classified right.
#[derive(Module, Debug)]
struct Model {
    w: Param<Tensor<1>>,
}

impl Model {
    fn new(w: f32) -> Self {
        let device = Device::flex().autodiff();
        Self {
            w: Param::from_tensor(Tensor::from_data([w], &device)),
        }
    }

    fn output(&self, batch: Tensor<1>, sign: f32) -> ClassificationOutput {
        let right = batch.clone().unsqueeze_dim::<2>(1);
        let output = Tensor::cat(vec![right.ones_like() * 0.5, right], 1);
        let targets = batch.ones_like().int();
        ClassificationOutput::new((batch * self.w.val()).mean() * sign, output, targets)
    }
}

/// What this process's steps saw, in their order: gradient rounds before each.
static ROUNDS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Items of each training batch.
static ITEMS: Mutex<Vec<Vec<f32>>> = Mutex::new(Vec::new());
static DDP: OnceLock<Ddp> = OnceLock::new();
/// Whom to stop, in which step (from 1).
static STOP: Mutex<Option<(Interrupter, usize)>> = Mutex::new(None);
/// The step, from 1, in which this process ends.
static DIE: Mutex<Option<usize>> = Mutex::new(None);

impl TrainStep for Model {
    type Input = Tensor<1>;
    type Output = ClassificationOutput;

    fn step(&self, batch: Tensor<1>) -> TrainOutput<ClassificationOutput> {
        ROUNDS
            .lock()
            .unwrap()
            .push(DDP.get().unwrap().stats().rounds);
        ITEMS.lock().unwrap().push(floats(batch.clone()));
        if *DIE.lock().unwrap() == Some(ROUNDS.lock().unwrap().len()) {
            std::process::exit(7);
        }
        let output = self.output(batch, 1.0);
        let grads = output.loss.backward();
        if let Some((interrupter, step)) = &*STOP.lock().unwrap()
            && ROUNDS.lock().unwrap().len() == *step
        {
            interrupter.stop(Some("enough"));
        }
        TrainOutput::new(self, grads, output)
    }
}

impl InferenceStep for Model {
    type Input = Tensor<1>;
    type Output = ClassificationOutput;

    fn step(&self, batch: Tensor<1>) -> ClassificationOutput {
        self.output(batch, -1.0)
    }
}

struct Numbers;

impl Batcher<f32, Tensor<1>> for Numbers {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
        Tensor::from_data(&items[..], device)
    }
}

/// Item `broken` cannot be read.
struct Items {
    items: Vec<f32>,
    broken: Option<usize>,
}

impl Dataset<f32> for Items {
    fn get(&self, index: usize) -> Result<f32, DatasetError> {
        if self.broken == Some(index) {
            return Err(DatasetError::new(std::io::Error::other("the disk is gone")));
        }
        Ok(self.items[index])
    }

    fn len(&self) -> usize {
        self.items.len()
    }
}

fn loader(ddp: &Ddp, items: &[f32]) -> LoaderBuilder<f32, Tensor<1>> {
    let items = items.to_vec();
    ddp.loader(
        Items {
            items,
            broken: None,
        },
        Numbers,
    )
}

type Training = SupervisedTraining<Model>;

fn training(
    ddp: &Ddp,
    directory: &Path,
    train: LoaderBuilder<f32, Tensor<1>>,
    valid: &[f32],
) -> Training {
    DDP.set(ddp.clone()).ok();
    let valid = loader(ddp, valid).tail(Tail::Exact).build().unwrap();
    SupervisedTraining::new(directory, Arc::new(train.build().unwrap()), Arc::new(valid))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_training_strategy(ddp.strategy())
}

fn learner(lr: f64) -> Learner<Model> {
    Learner::new(Model::new(0.0), SgdConfig::new().init(), lr)
}

/// The weight, and the error or else the interruption.
fn outcome(result: LearningResult<Model>) -> (f32, Option<String>) {
    let error = result.error.map(|error| error.to_string());
    let interrupted = result.interrupted.and_then(|stop| stop.reason);
    (floats(result.model.w.val())[0], error.or(interrupted))
}

/// A folder for all ranks of a test.
const FOLDER: &str = "BURN_DDP_TEST_FOLDER";

fn folder() -> PathBuf {
    std::env::var_os(FOLDER).unwrap().into()
}

fn temporary() -> (Option<tempfile::TempDir>, String) {
    if in_rank() {
        return (None, String::new());
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap().to_owned();
    (Some(directory), path)
}

/// The value of a metric over an epoch, which is its file's last line.
fn metric(directory: &Path, split: &str, epoch: usize, name: &str) -> f64 {
    let path = directory.join(format!("{split}/epoch-{epoch}/{name}.log"));
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let last = text.lines().next_back().unwrap();
    let value = last
        .strip_suffix(",final")
        .unwrap_or_else(|| panic!("{text}"));
    value.parse().unwrap()
}

/// Files below `directory`, sorted.
fn files(directory: &Path) -> Vec<String> {
    fn walk(directory: &Path, root: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(&path, root, found),
                false => found.push(path.strip_prefix(root).unwrap().to_str().unwrap().into()),
            }
        }
    }
    let mut found = Vec::new();
    walk(directory, directory, &mut found);
    found.sort();
    found
}

/// Items 0 to 4, of which 0 is classified wrongly, and is what the padding repeats.
#[test]
fn ddp_19_metrics_of_all_ranks_without_padding() {
    let (_directory, path) = temporary();
    let test = "ddp_19_metrics_of_all_ranks_without_padding";
    ranks(2).over("shm").env(FOLDER, &path).run(test, |ddp| {
        let items = [0.0, 1.0, 2.0, 3.0, 4.0];
        let train = loader(&ddp, &items).batch_size(2);
        let result = training(&ddp, &folder(), train, &items[..3])
            .summary()
            .launch(Learner::new(Model::new(1.0), SgdConfig::new().init(), 0.0));
        assert_eq!(outcome(result), (1.0, None));
    });
    let Some(directory) = _directory else { return };
    let value = |split, name| metric(directory.path(), split, 1, name);
    // Batches 0 1 2 3 and 4 (and 0).
    assert!((value("train", "Accuracy") - 80.0).abs() < 1e-9);
    assert_eq!(value("train", "Loss"), (1.5 + 4.0) / 2.0);
    // Batches 0 1 and 2, of one item a rank; rank 1 has one batch less.
    assert!((value("valid", "Accuracy") - 200.0 / 3.0).abs() < 1e-4);
    assert_eq!(value("valid", "Loss"), (-0.5 - 2.0) / 2.0);
    let expected = [
        "experiment.log",
        "train/epoch-1/Accuracy.log",
        "train/epoch-1/Loss.log",
        "valid/epoch-1/Accuracy.log",
        "valid/epoch-1/Loss.log",
    ];
    assert_eq!(files(directory.path()), expected);
    let log = fs::read_to_string(directory.path().join("train/epoch-1/Loss.log")).unwrap();
    // Two steps and the epoch, once.
    assert_eq!(log.lines().count(), 3, "{log}");
}

/// Windows of two and one: (1 + 2) / 2 + (3 + 4) / 2 and (5 + 6) / 2.
#[test]
fn accumulation_reduces_once_a_window() {
    ranks(2).run("accumulation_reduces_once_a_window", |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let train = loader(&ddp, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let result = training(&ddp, directory.path(), train, &[1.0])
            .grads_accumulation(2)
            .num_epochs(2)
            .launch(learner(1.0));
        assert_eq!(outcome(result), (-21.0, None));
        assert_eq!(*ROUNDS.lock().unwrap(), [0, 0, 1, 2, 2, 3]);
    });
}

/// Rank 0's own validation loss falls all the time, that of both ranks rises.
#[test]
fn early_stopping_looks_at_all_ranks_and_stops_all() {
    let test = "early_stopping_looks_at_all_ranks_and_stops_all";
    ranks(2).run(test, |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let train = loader(&ddp, &[1.0, 2.0]);
        let result = training(&ddp, directory.path(), train, &[-1.0, 3.0])
            .num_epochs(10)
            .early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::new(),
                Aggregate::Mean,
                Direction::Lowest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs: 1 },
            ))
            .launch(learner(1.0));
        assert_eq!(outcome(result), (-3.0, None));
        assert_eq!(ROUNDS.lock().unwrap().len(), 2);
        // Only one has something to write.
        let written = directory.path().join("train").exists();
        assert_eq!(written, ddp.is_main());
    });
}

#[test]
fn an_item_that_one_rank_cannot_read_stops_all() {
    let start = Instant::now();
    let test = "an_item_that_one_rank_cannot_read_stops_all";
    let runs = ranks(2).run(test, |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let items = Items {
            items: vec![1.0; 8],
            broken: (ddp.rank() == 1).then_some(5),
        };
        let train = ddp.loader(items, Numbers);
        outcome(training(&ddp, directory.path(), train, &[1.0]).launch(learner(1.0)))
    });
    if in_rank() {
        return;
    }
    // Far below the operation time-out of 20 seconds, twice.
    assert!(start.elapsed() < Duration::from_secs(20));
    for run in runs {
        let [(first, others), (second, own)] = &run[..] else {
            panic!()
        };
        assert_eq!((*first, *second), (-2.0, -2.0));
        let (others, own) = (others.as_deref().unwrap(), own.as_deref().unwrap());
        assert!(
            own.starts_with("Dataset error") && own.contains("the disk is gone"),
            "{own}"
        );
        assert_eq!(
            others,
            format!("training worker on device 1 failed: rank 1 has stopped: {own}")
        );
    }
}

#[test]
fn an_interrupted_rank_stops_all_after_the_same_step() {
    let test = "an_interrupted_rank_stops_all_after_the_same_step";
    let runs = ranks(2).run(test, |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let training = training(&ddp, directory.path(), loader(&ddp, &[1.0; 8]), &[1.0]);
        if ddp.rank() == 1 {
            *STOP.lock().unwrap() = Some((training.interrupter(), 3));
        }
        outcome(training.num_epochs(2).launch(learner(1.0)))
    });
    for run in runs {
        let reason = |text: &str| Some(text.to_owned());
        assert_eq!(
            run,
            [(-3.0, reason("rank 1: enough")), (-3.0, reason("enough"))]
        );
    }
}

#[test]
fn trainings_that_differ() {
    let runs = ranks(2).run("trainings_that_differ", |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let epochs = training(&ddp, directory.path(), loader(&ddp, &[1.0; 2]), &[1.0])
            .num_epochs(2 + ddp.rank())
            .launch(learner(1.0));
        // Three batches on rank 0, two on rank 1.
        let train = loader(&ddp, &[1.0; 5]).tail(Tail::Exact);
        let batches = training(&ddp, directory.path(), train, &[1.0]).launch(learner(1.0));
        (outcome(epochs), outcome(batches))
    });
    for (rank, ((_, epochs), batches)) in runs.iter().flat_map(|run| run.iter().enumerate()) {
        assert_eq!(
            epochs.as_deref().unwrap(),
            format!(
                "training worker on device 1 failed: rank {rank}: the ranks train differently: the number of epochs is 3 on rank 1 but 2 on \
                 rank 0. Give every rank the same settings"
            )
        );
        assert_eq!(batches.0, -2.0);
        let text = batches.1.as_deref().unwrap();
        let expected = "have different numbers of batches: rank 1 has none left, rank 0 has 1 more for this step";
        assert!(text.contains(expected), "{text}");
    }
}

fn momentum() -> ModuleOptimizer {
    let momentum = MomentumConfig::new().with_momentum(0.5);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// Shuffled data and momentum, stopped after two of four epochs.
#[test]
fn a_resumed_training_is_the_uninterrupted_one() {
    let (_directory, path) = temporary();
    let test = "a_resumed_training_is_the_uninterrupted_one";
    ranks(2).over("shm").env(FOLDER, &path).run(test, |ddp| {
        let items = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
        let run = |name: &str, epochs, checkpoint: Option<usize>| {
            ITEMS.lock().unwrap().clear();
            let train = loader(&ddp, &items).shuffle(3);
            let mut training = training(&ddp, &folder().join(name), train, &[1.0])
                .num_epochs(epochs)
                .with_application_logger(None)
                .with_default_checkpointers();
            if let Some(epoch) = checkpoint {
                training = training.checkpoint(epoch);
            }
            // Other weights on rank 1 and in the second life.
            let start = (ddp.rank() + checkpoint.unwrap_or(0)) as f32;
            let result = training.launch(Learner::new(Model::new(start), momentum(), 0.25));
            ddp.check_replicas(&result.model).unwrap();
            (outcome(result), ITEMS.lock().unwrap().clone())
        };
        let (whole, seen) = run("whole", 4, None);
        run("parts", 2, None);
        let (resumed, seen_again) = run("parts", 4, Some(2));
        assert_eq!((whole.1, resumed.1), (None, None));
        assert_eq!(seen_again, seen[8..]);
        assert_eq!(whole.0.to_bits(), resumed.0.to_bits());
    });
    let Some(directory) = _directory else { return };
    let found = files(&directory.path().join("parts/checkpoint"));
    // The last two, once; the first of the later metrics is best for no other reason than its being kept.
    for name in ["model", "optim", "scheduler"] {
        for epoch in [3, 4] {
            let file = format!("{name}-{epoch}.bpk");
            assert!(found.contains(&file), "{found:?}");
        }
    }
}

/// Batch normalizations before the weight of [`Model`].
#[derive(Module, Debug)]
struct Normed {
    norm: BatchNorm,
    sync: SyncBatchNorm,
    w: Param<Tensor<1>>,
}

impl TrainStep for Normed {
    type Input = Tensor<1>;
    type Output = RegressionOutput;

    fn step(&self, batch: Tensor<1>) -> TrainOutput<RegressionOutput> {
        let x = batch.unsqueeze_dim::<2>(1);
        let x = self.norm.forward(x.clone()) + self.sync.forward(x);
        let output = x * self.w.val().unsqueeze();
        let loss = output.clone().mean();
        let grads = loss.backward();
        TrainOutput::new(
            self,
            grads,
            RegressionOutput::new(loss, output.clone(), output),
        )
    }
}

impl InferenceStep for Normed {
    type Input = Tensor<1>;
    type Output = ();

    fn step(&self, _: Tensor<1>) {}
}

/// Batches with the means 2 and 8: one step from 0 gives 0.2 and 0.8.
#[test]
fn running_statistics_are_those_of_all_ranks() {
    let runs = ranks(2).run("running_statistics_are_those_of_all_ranks", |ddp| {
        let directory = tempfile::tempdir().unwrap();
        let device = Device::flex().autodiff();
        let model = Normed {
            norm: BatchNormConfig::new(1).init(&device),
            sync: SyncBatchNorm::new(BatchNormConfig::new(1).init(&device)),
            w: Param::from_tensor(Tensor::ones([1], &device)),
        };
        let train = loader(&ddp, &[1.0, 3.0, 7.0, 9.0]).batch_size(2);
        let valid = loader(&ddp, &[1.0]).tail(Tail::Exact).build().unwrap();
        let loaders = (Arc::new(train.build().unwrap()), Arc::new(valid));
        let result = SupervisedTraining::<Normed>::new(directory.path(), loaders.0, loaders.1)
            .metric_train_numeric(LossMetric::new())
            .with_training_strategy(ddp.strategy())
            .launch(Learner::new(model, SgdConfig::new().init(), 0.5));
        assert!(result.error.is_none());
        ddp.check_replicas(&result.model).unwrap();
        let Normed { norm, sync, .. } = result.model;
        [norm, sync.into_batch_norm()].map(|norm| {
            let [mean, var] = [norm.running_mean, norm.running_var];
            [floats(mean.value())[0], floats(var.value())[0]]
        })
    });
    for [norm, sync] in runs.into_iter().flatten() {
        assert!((norm[0] - 0.5).abs() < 1e-6, "{norm:?}");
        assert!((norm[1] - 1.0).abs() < 1e-6, "{norm:?}");
        assert!((sync[0] - 0.5).abs() < 1e-6, "{sync:?}");
        // 0.9 + 0.1 * (16 + 4 + 4 + 16) / 4.
        assert!((sync[1] - 1.9).abs() < 1e-6, "{sync:?}");
    }
}

/// Two fields with one parameter, and one that rank 1 alone uses.
#[derive(Module, Debug)]
struct Tied {
    a: Param<Tensor<1>>,
    b: Param<Tensor<1>>,
    c: Param<Tensor<1>>,
}

impl TrainStep for Tied {
    type Input = Tensor<1>;
    type Output = ();

    fn step(&self, x: Tensor<1>) -> TrainOutput<()> {
        let mut loss = x.clone() * self.a.val() + x.clone() * self.b.val();
        if !DDP.get().unwrap().is_main() {
            loss = loss + x * self.c.val();
        }
        TrainOutput::new(self, loss.mean().backward(), ())
    }
}

impl InferenceStep for Tied {
    type Input = Tensor<1>;
    type Output = ();

    fn step(&self, _: Tensor<1>) {}
}

/// x is 1 on rank 0 and 3 on rank 1: gradients of 2 * 2 for what is tied and of 3 / 2 for the rest, in each of two steps.
#[test]
fn tied_fields_and_those_of_one_rank() {
    let runs = ranks(2).run("tied_fields_and_those_of_one_rank", |ddp| {
        DDP.set(ddp.clone()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let device = Device::flex().autodiff();
        let zero = || Param::from_tensor(Tensor::zeros([1], &device));
        let (a, c) = (zero(), zero());
        let model = Tied { b: a.clone(), a, c };
        let loaders = [(); 2].map(|()| Arc::new(loader(&ddp, &[1.0, 3.0]).build().unwrap()));
        let [train, valid] = loaders;
        let result = SupervisedTraining::<Tied>::new(directory.path(), train, valid)
            .num_epochs(2)
            .with_training_strategy(ddp.strategy())
            .launch(Learner::new(model, SgdConfig::new().init(), 1.0));
        assert!(result.error.is_none());
        let Tied { a, b, c } = result.model;
        [a, b, c].map(|w| floats(w.val())[0])
    });
    for weights in runs.into_iter().flatten() {
        assert_eq!(weights, [-8.0, -8.0, -3.0]);
    }
}

#[test]
fn a_rank_that_dies_is_an_error_of_the_others() {
    let test = "a_rank_that_dies_is_an_error_of_the_others";
    let runs = ranks(2).run_raw(test, || {
        let ddp = Ddp::from_env().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let training = training(&ddp, directory.path(), loader(&ddp, &[1.0; 8]), &[1.0]);
        if ddp.rank() == 1 {
            *DIE.lock().unwrap() = Some(3);
        }
        outcome(training.launch(learner(1.0)))
    });
    for run in runs {
        let [
            (Ending::Exit(0), Some((weight, error))),
            (Ending::Exit(7), None),
        ] = &run[..]
        else {
            panic!("{run:?}")
        };
        assert_eq!(*weight, -2.0);
        assert!(error.as_deref().unwrap().contains("rank 1"), "{error:?}");
    }
}

/// Three items with a mean of 2 on rank 0, one of value 6 on rank 1; no item of another kind anywhere.
#[test]
fn means_over_ranks() {
    let runs = ranks(2).run("means_over_ranks", |ddp| {
        let (mut loss, mut none) = (Mean::default(), Mean::default());
        match ddp.is_main() {
            true => loss.add(6.0, 3),
            false => loss.extend([6.0]),
        }
        none.add(f64::NAN, 0);
        let single = loss.reduce(&ddp).unwrap();
        (Mean::reduce_all(&ddp, [loss, none]).unwrap(), single)
    });
    for ([loss, none], single) in runs.into_iter().flatten() {
        assert_eq!((loss, none, single), (Some(3.0), None, Some(3.0)));
    }
}
