//! Burn's own learner on several processes of this machine: metrics, checkpoints, early stopping and the summary of a training
//! on all of them.
//!
//! ```text
//! cargo run --release --example learner_ddp                # two ranks, data included
//! cargo run --release --example learner_ddp -- --help
//! ```
//!
//! Without the feature `ddp` the same source is Burn's single-device form:
//!
//! ```text
//! cargo run --release -p burn-ddp-examples --no-default-features --features flex --example learner_ddp
//! ```
//!
//! What data-parallel training adds stands behind `#[cfg(feature = "ddp")]`: starting the ranks, the loaders, and one line of the training.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, MetricEarlyStoppingStrategy, StoppingCondition,
    SupervisedTraining, TrainOutput, TrainStep,
};
use burn_ddp_examples::data::{self, Batch, ImageBatcher};
use burn_ddp_examples::device::DeviceName;
use burn_ddp_examples::{Error, command, output};
use clap::Parser;
use std::path::PathBuf;
use std::process::ExitCode;

#[cfg(not(feature = "ddp"))]
use burn::data::dataloader::DataLoaderBuilder;
#[cfg(feature = "ddp")]
use burn_ddp::{Ddp, Launcher, data::Tail};
#[cfg(feature = "ddp")]
use std::sync::Arc;

/// Trains a small convolutional network on the UCI handwritten digits (part of this program) with Burn's learner.
#[derive(Debug, Parser)]
struct Args {
    /// Number of processes (ranks).
    #[cfg(feature = "ddp")]
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    nproc: u32,
    /// Passes over the training images at the most, those before `--resume` included.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images per batch and rank.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    batch_size: u32,
    /// Learning rate.
    #[arg(long, default_value_t = 2e-3, allow_negative_numbers = true)]
    lr: f64,
    /// Ends the training when the validation loss has not improved for so many epochs.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    patience: u32,
    /// Continues after this epoch, of which the folder has a checkpoint.
    #[arg(long, value_name = "EPOCH")]
    resume: Option<usize>,
    /// Seed of the weights and of the order of the images.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "flex")]
    device: DeviceName,
    /// Folder for metrics, log and checkpoints.
    #[arg(long, default_value = "target/learner_ddp")]
    out: PathBuf,
}

#[derive(Module, Debug)]
struct Model {
    first: Conv2d,
    second: Conv2d,
    head: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let conv = |channels, stride| {
            Conv2dConfig::new(channels, [3, 3])
                .with_stride([stride, stride])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        Self {
            first: conv([1, 16], 1),
            second: conv([16, 32], 2),
            head: LinearConfig::new(32 * 4 * 4, 10).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let relu = Relu::new();
        let x = relu.forward(self.first.forward(images));
        let x = relu.forward(self.second.forward(x));
        self.head.forward(x.flatten(1, 3))
    }

    fn classify(&self, images: Tensor<4>, labels: Tensor<1, Int>) -> ClassificationOutput {
        let output = self.forward(images);
        let criterion = CrossEntropyLossConfig::new().init(&output.device());
        let loss = criterion.forward(output.clone(), labels.clone());
        ClassificationOutput::new(loss, output, labels)
    }
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch.images, batch.labels);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch.images, batch.labels)
    }
}

fn main() -> ExitCode {
    command::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Error> {
    // Before any process starts, so that a mistake is reported once and not by each of them.
    args.check()?;
    #[cfg(feature = "ddp")]
    Launcher::new()
        .nproc(args.nproc as usize)
        .run(|ddp| train(args, ddp))?;
    #[cfg(not(feature = "ddp"))]
    train(args)?;
    Ok(())
}

fn train(args: &Args, #[cfg(feature = "ddp")] ddp: Ddp) -> Result<(), Error> {
    let task = data::digits::load();
    let batcher = || ImageBatcher::new(task.shape, task.normalization);
    let batch_size = args.batch_size as usize;
    let device = args.device.open()?;
    #[cfg(feature = "ddp")]
    let device = ddp.device(device)?;
    let device = device.autodiff();
    device.seed(args.seed);

    // ANCHOR: loaders
    #[cfg(not(feature = "ddp"))]
    let (train, valid) = (
        DataLoaderBuilder::new(batcher())
            .batch_size(batch_size)
            .shuffle(args.seed)
            .build(task.train),
        DataLoaderBuilder::new(batcher())
            .batch_size(batch_size)
            .build(task.test),
    );
    #[cfg(feature = "ddp")]
    let (train, valid) = (
        Arc::new(
            ddp.loader(task.train, batcher())
                .batch_size(batch_size)
                .shuffle(args.seed)
                .build()?,
        ),
        Arc::new(
            ddp.loader(task.test, batcher())
                .batch_size(batch_size)
                .tail(Tail::Exact)
                .build()?,
        ),
    );
    // ANCHOR_END: loaders

    // ANCHOR: training
    let training = SupervisedTraining::new(&args.out, train, valid)
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Lowest,
            Split::Valid,
            StoppingCondition::NoImprovementSince {
                n_epochs: args.patience as usize,
            },
        ))
        .num_epochs(args.epochs as usize)
        .summary();
    #[cfg(feature = "ddp")]
    let training = training.with_training_strategy(ddp.strategy()); // the one line
    // ANCHOR_END: training
    let training = match args.resume {
        Some(epoch) => training.checkpoint(epoch),
        None => training,
    };

    // ANCHOR: launch
    let learner = Learner::new(
        Model::new(&device),
        AdamConfig::new().init(),
        args.lr, // or a scheduler
    );
    let result = training.launch(learner);
    match result.error {
        Some(error) => Err(Error::Training(error)),
        None => Ok(()),
    }
    // ANCHOR_END: launch
}

impl Args {
    /// What can be told to be wrong without computing anything.
    fn check(&self) -> Result<(), Error> {
        command::check_lr(self.lr)?;
        if let Some(epoch) = self.resume {
            if epoch >= self.epochs as usize {
                return Err(Error::Usage(format!(
                    "--resume {epoch} leaves nothing to train of --epochs {}, which is the number of the last epoch",
                    self.epochs
                )));
            }
            let file = self.out.join(format!("checkpoint/model-{epoch}.bpk"));
            if !file.exists() {
                return Err(Error::Usage(format!(
                    "--resume {epoch}: there is no {}",
                    file.display()
                )));
            }
        }
        self.device.open()?;
        output::check_writable(&self.out)
    }
}
