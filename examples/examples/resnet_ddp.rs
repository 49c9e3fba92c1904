//! Trains a residual network with batch normalization on several processes of this machine.
//!
//! ```text
//! cargo run --release --example resnet_ddp                 # two ranks, data included
//! cargo run --release --example resnet_ddp -- --help
//! ```
//!
//! Without the feature `ddp` the same source is an ordinary single-process program:
//!
//! ```text
//! cargo run --release -p burn-ddp-examples --no-default-features --features flex --example resnet_ddp
//! ```
//!
//! What data-parallel training adds stands behind `#[cfg(feature = "ddp")]`. The model, the batch
//! loop and the evaluation loop have none of it.

use burn::data::dataloader::DataLoader;
use burn::data::dataset::Dataset;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{GradientsParams, SgdConfig, decay::WeightDecayConfig};
use burn::tensor::{ElementConversion, Int, Tensor};
use burn_ddp_examples::data::{self, Batch, ImageBatcher, Recipe};
use burn_ddp_examples::device::DeviceName;
use burn_ddp_examples::model::{ResNet, ResNetConfig};
use burn_ddp_examples::progress::{Epoch, Progress};
use burn_ddp_examples::{Error, command, output, schedule};
use clap::Parser;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

#[cfg(not(feature = "ddp"))]
use burn::data::dataloader::DataLoaderBuilder;
// ANCHOR: names
#[cfg(feature = "ddp")]
use burn_ddp::{Ddp, Launcher, ReduceOp, data::Tail};
// ANCHOR_END: names

/// Trains a ResNet-18 on the UCI handwritten digits (part of this program) or on CIFAR-10.
#[derive(Debug, Parser)]
struct Args {
    /// Number of processes (ranks).
    #[cfg(feature = "ddp")]
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    nproc: u32,
    /// Passes over the training images [default: 12, CIFAR-10: 30].
    #[arg(long)]
    epochs: Option<usize>,
    /// Images per batch and rank [default: 32, CIFAR-10: 64].
    #[arg(long)]
    batch_size: Option<usize>,
    /// Highest learning rate, taken as it is whatever the number of ranks [default: 0.1].
    #[arg(long, allow_negative_numbers = true)]
    lr: Option<f64>,
    /// Seed of the weights, the order of the images and their random changes.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// Folder with CIFAR-10's binary files, instead of the digits.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "flex")]
    device: DeviceName,
    /// Folder for the best model.
    #[arg(long, default_value = "target/resnet_ddp")]
    out: PathBuf,
    /// Print one JSON object as the last line on stdout.
    #[arg(long)]
    json: bool,
}

type Loader = Arc<dyn DataLoader<Batch>>;

fn main() -> ExitCode {
    command::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Error> {
    // Before any process starts, so that a mistake is reported once and not by each of them.
    args.check()?;

    // ANCHOR: launch
    #[cfg(feature = "ddp")]
    Launcher::new()
        .nproc(args.nproc as usize)
        .run(|ddp| train(args, ddp))?;
    #[cfg(not(feature = "ddp"))]
    train(args)?;
    // ANCHOR_END: launch

    Ok(())
}

fn train(args: &Args, #[cfg(feature = "ddp")] ddp: Ddp) -> Result<(), Error> {
    let task = match &args.data {
        Some(dir) => data::cifar10::load(dir)?,
        None => data::digits::load(),
    };
    let recipe = args.recipe(task.recipe);
    let images = task.train.len();
    let batcher =
        ImageBatcher::new(task.shape, task.normalization).augment(task.augmentation, args.seed);
    let test_batcher = ImageBatcher::new(task.shape, task.normalization);

    // ANCHOR: device
    let device = args.device.open()?;
    #[cfg(feature = "ddp")]
    let device = ddp.device(device)?;
    let test_device = device.clone();
    let device = device.autodiff();
    device.seed(args.seed);
    // ANCHOR_END: device

    let model = ResNetConfig::new(task.shape[0], task.classes)
        .with_widths(recipe.widths)
        .init(&device);

    // ANCHOR: wrap
    #[cfg(feature = "ddp")]
    let (mut model, world_size, is_main) = (ddp.wrap(model)?, ddp.world_size(), ddp.is_main());
    #[cfg(not(feature = "ddp"))]
    let (mut model, world_size, is_main) = (model, 1, true);
    // ANCHOR_END: wrap

    // ANCHOR: loaders
    #[cfg(feature = "ddp")]
    let (train_loader, test_loader): (Loader, Loader) = (
        Arc::new(
            ddp.loader(task.train, batcher)
                .batch_size(recipe.batch_size)
                .shuffle(args.seed)
                .device(device.clone())
                .build()?,
        ),
        Arc::new(
            ddp.loader(task.test, test_batcher)
                .batch_size(recipe.batch_size)
                .tail(Tail::Exact)
                .device(test_device)
                .build()?,
        ),
    );
    #[cfg(not(feature = "ddp"))]
    let (train_loader, test_loader): (Loader, Loader) = (
        DataLoaderBuilder::new(batcher)
            .batch_size(recipe.batch_size)
            .shuffle(args.seed)
            .set_device(device.clone())
            .build(task.train),
        DataLoaderBuilder::new(test_batcher)
            .batch_size(recipe.batch_size)
            .set_device(test_device)
            .build(task.test),
    );
    // ANCHOR_END: loaders

    let model_path = args.out.join("resnet.bpk");
    if is_main {
        eprintln!(
            "{}: {images} images to learn from, {} parameters and buffers, {world_size} rank(s) with {} \
             images a batch",
            task.name,
            model.num_params(),
            recipe.batch_size,
        );
    }

    let share = train_loader.num_items();
    if is_main && recipe.batch_size > share {
        eprintln!(
            "warning: a batch of {} images is more than the {share} that each rank has: every epoch is one step with {share}",
            recipe.batch_size
        );
    }

    let steps_per_epoch = train_loader.num_items().div_ceil(recipe.batch_size);
    let steps = recipe.epochs * steps_per_epoch;
    let mut schedule = schedule::warmup_cosine(recipe.lr, steps)?;
    let mut optim = SgdConfig::new()
        .with_momentum(Some(
            MomentumConfig::new()
                .with_dampening(0.0)
                .with_nesterov(true),
        ))
        .with_weight_decay(Some(WeightDecayConfig::new(5e-4)))
        .init();
    let criterion = CrossEntropyLossConfig::new().init(&device);
    let mut progress = Progress::new(recipe.epochs, steps_per_epoch, images, is_main);
    let mut best: Option<Epoch> = None;
    let mut train_loss = f64::NAN;
    let started = Instant::now();

    for number in 1..=recipe.epochs {
        progress.begin_epoch(number);
        // ANCHOR: loop
        for batch in train_loader.iter() {
            let batch = batch?;
            let loss = criterion.forward(model.forward(batch.images), batch.labels);
            progress.step(&loss);
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optim.step(schedule.step(), model, grads);
        }
        train_loss = progress.end_epoch();
        // ANCHOR_END: loop

        // ANCHOR: together
        // Each rank has seen and counted its own share; here the shares come together.
        #[cfg(feature = "ddp")]
        {
            train_loss = ddp.mean(train_loss)?;
        }
        let [correct, count] = {
            #[allow(unused_mut)]
            let mut counts = evaluate(&model.valid(), test_loader.as_ref())?;
            #[cfg(feature = "ddp")]
            ddp.all_reduce(&mut counts, ReduceOp::Sum)?;
            counts
        };
        // ANCHOR_END: together

        let epoch = Epoch {
            number,
            train_loss,
            test_accuracy: correct / count,
        };
        progress.report(epoch);

        // ANCHOR: save
        // The accuracy is that of all ranks, so they agree whether this is the best one.
        if best.is_none_or(|best| epoch.test_accuracy > best.test_accuracy) {
            best = Some(epoch);
            let save = || Ok::<_, Error>(model.clone().save_file(&model_path)?);
            #[cfg(feature = "ddp")]
            ddp.save_on_main(save)?;
            #[cfg(not(feature = "ddp"))]
            save()?;
        }
        // ANCHOR_END: save
    }
    progress.finish();

    let report = Report {
        world_size,
        epochs: recipe.epochs,
        steps,
        best_epoch: best.map(|epoch| epoch.number),
        test_accuracy: best.map(|epoch| epoch.test_accuracy),
        train_loss,
        images_per_second: progress.images_per_second(recipe.epochs),
        seconds: started.elapsed().as_secs_f64(),
        model_path,
        #[cfg(feature = "ddp")]
        ddp: DdpReport::new(&ddp, &model)?,
    };
    if is_main {
        report.print(args.json)?;
    }
    Ok(())
}

/// How many images of the loader the model classifies right, and how many there are.
fn evaluate(model: &ResNet, loader: &dyn DataLoader<Batch>) -> Result<[f64; 2], Error> {
    let mut counts = [0.0; 2];
    for batch in loader.iter() {
        let batch = batch?;
        let [count] = batch.labels.dims();
        let guess: Tensor<1, Int> = model.forward(batch.images).argmax(1).squeeze_dim(1);
        let correct = guess.equal(batch.labels).int().sum();
        counts[0] += correct.into_scalar::<i64>().elem::<f64>();
        counts[1] += count as f64;
    }
    Ok(counts)
}

impl Args {
    /// What can be told to be wrong without computing anything.
    fn check(&self) -> Result<(), Error> {
        for (option, value) in [("--epochs", self.epochs), ("--batch-size", self.batch_size)] {
            if value == Some(0) {
                return Err(Error::Usage(format!("{option} must be at least 1")));
            }
        }
        if let Some(lr) = self.lr {
            command::check_lr(lr)?;
        }
        self.device.open()?;
        if let Some(dir) = &self.data {
            data::cifar10::check(dir)?;
        }
        output::check_writable(&self.out)
    }

    /// The task's own settings, with those of the command line put over them.
    fn recipe(&self, measured: Recipe) -> Recipe {
        Recipe {
            epochs: self.epochs.unwrap_or(measured.epochs),
            batch_size: self.batch_size.unwrap_or(measured.batch_size),
            lr: self.lr.unwrap_or(measured.lr),
            ..measured
        }
    }
}

/// What the run came to.
#[derive(Debug, Serialize)]
struct Report {
    world_size: usize,
    epochs: usize,
    /// Optimizer steps, the same on every rank.
    steps: usize,
    best_epoch: Option<usize>,
    /// Of the best epoch, which is the model at `model_path`.
    test_accuracy: Option<f64>,
    /// Mean over the steps of the last epoch and over the ranks.
    train_loss: f64,
    /// Of all ranks together, evaluation not counted.
    images_per_second: f64,
    /// Training and evaluation, without starting the processes.
    seconds: f64,
    model_path: PathBuf,
    #[cfg(feature = "ddp")]
    #[serde(flatten)]
    ddp: DdpReport,
}

impl Report {
    fn print(&self, json: bool) -> Result<(), Error> {
        if json {
            println!("{}", serde_json::to_string(self)?);
        } else {
            println!(
                "test accuracy {:.2} % (epoch {}), {:.0} images/s, {:.1} s; model: {}",
                self.test_accuracy.unwrap_or(f64::NAN) * 100.0,
                self.best_epoch.unwrap_or(0),
                self.images_per_second,
                self.seconds,
                self.model_path.display()
            );
        }
        Ok(())
    }
}

/// What the communication came to.
#[cfg(feature = "ddp")]
#[derive(Debug, Serialize)]
struct DdpReport {
    /// One hash of all parameters and buffers per rank; equal, or the ranks have come apart.
    param_hashes: Vec<String>,
    gradient_bytes_per_step: usize,
    buckets: usize,
    /// Share of the communication time that lay inside backward.
    overlap_ratio: f64,
}

#[cfg(feature = "ddp")]
impl DdpReport {
    /// Collective: all ranks call it.
    fn new(ddp: &Ddp, model: &ResNet) -> Result<Self, Error> {
        let stats = ddp.stats();
        Ok(Self {
            param_hashes: ddp.param_hashes(model)?,
            gradient_bytes_per_step: stats.gradient_bytes_per_step,
            buckets: stats.buckets,
            overlap_ratio: stats.overlap_ratio,
        })
    }
}
