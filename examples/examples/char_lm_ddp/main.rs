//! Trains a small GPT on a play of Shakespeare, on several processes, and prints what it writes.
//!
//! ```text
//! cargo run --release --example char_lm_ddp                 # two ranks, text included
//! cargo run --release --example char_lm_ddp -- --help
//! ```
//!
//! A run that was interrupted goes on from its last checkpoint when it is started again. The
//! page `book/src/char-lm.md` goes through it.
//!
//! Without the feature `ddp` the same source is an ordinary single-process program, without
//! checkpoints:
//!
//! ```text
//! cargo run --release -p burn-ddp-examples --no-default-features --features flex --example char_lm_ddp
//! ```

mod args;
mod report;
mod training;

use args::Args;
use burn::data::dataloader::DataLoader;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{GradientsAccumulator, GradientsParams};
use burn::tensor::{Device, Tensor};
use burn_ddp_examples::data::text::{Text, TokenBatch, WindowBatcher};
use burn_ddp_examples::gpt::Gpt;
use burn_ddp_examples::steps::Steps;
use burn_ddp_examples::{Error, command};
use clap::Parser;
use report::Report;
use std::iter;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use training::Training;

#[cfg(not(feature = "ddp"))]
use burn::data::dataloader::DataLoaderBuilder;
#[cfg(feature = "ddp")]
use burn_ddp::{
    Ddp, Launcher, ReduceOp,
    data::{DistributedLoader, Tail},
    train::Norm,
};
#[cfg(feature = "ddp")]
use report::DdpReport;

/// Its position goes into checkpoints, so its type is named.
#[cfg(feature = "ddp")]
type TrainLoader = DistributedLoader<TokenBatch>;
#[cfg(not(feature = "ddp"))]
type TrainLoader = Arc<dyn DataLoader<TokenBatch>>;
type ValidationLoader = Arc<dyn DataLoader<TokenBatch>>;

fn main() -> ExitCode {
    command::exit(run(&Args::parse()))
}

fn run(args: &Args) -> Result<(), Error> {
    // Before any process starts, so that a mistake is reported once and not by each of them.
    let text = Text::coriolanus();
    args.check(&text)?;

    #[cfg(feature = "ddp")]
    Launcher::new()
        .nproc(args.nproc.get())
        .run(|ddp| train(args, &text, ddp))?;
    #[cfg(not(feature = "ddp"))]
    train(args, &text)?;

    Ok(())
}

fn train(args: &Args, text: &Text, #[cfg(feature = "ddp")] ddp: Ddp) -> Result<(), Error> {
    let plain_device = args.device.open()?;
    #[cfg(feature = "ddp")]
    let plain_device = ddp.device(plain_device)?;
    let device = plain_device.clone().autodiff();
    device.seed(args.seed);

    #[cfg(feature = "ddp")]
    let (world_size, is_main) = (ddp.world_size(), ddp.is_main());
    #[cfg(not(feature = "ddp"))]
    let (world_size, is_main) = (1, true);
    let (loader, validation_loader) = loaders(
        args,
        text,
        [&device, &plain_device],
        #[cfg(feature = "ddp")]
        &ddp,
    )?;

    let mut training = Training::new(args, text, world_size, &device)?;
    // ANCHOR: resume
    #[cfg(feature = "ddp")]
    let checkpoints = (ddp.checkpoints(&args.out))
        .every(args.checkpoint_every.get())
        .keep_last(2);
    #[cfg(feature = "ddp")]
    if let Some(saved) = checkpoints.load()? {
        training.load(&saved, &loader)?;
    }
    #[cfg(feature = "ddp")]
    let mut training = training.wrap(&ddp, args.hook)?;
    // ANCHOR_END: resume

    let passes = args.accumulate.get();
    let (first, last) = (training.step, args.end().1);
    if is_main {
        eprintln!(
            "{}: {} characters to learn from, {} parameters, {world_size} rank(s) with {passes} x {} windows a step",
            text.name,
            text.train_tokens().len(),
            training.model.num_params(),
            args.batch_size,
        );
        if first > 0 {
            let out = args.out.display();
            eprintln!("going on after step {first} of {out}; for a new run name another --out");
        }
        #[cfg(feature = "ddp")]
        if !training.changed.is_empty() {
            eprintln!(
                "warning: the run that saved it had other settings: {}; the steps from here on have those of this one",
                training.changed.join(", ")
            );
        }
        if first >= last {
            let (option, last) = args.end();
            eprintln!("no step is left to make: {option} is {last}");
        }
    }

    // ANCHOR: validate
    let validate = |model: &Gpt| -> Result<f64, Error> {
        #[allow(unused_mut)]
        let mut sums = measure(&model.valid(), validation_loader.as_ref())?;
        #[cfg(feature = "ddp")]
        ddp.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    };
    // ANCHOR_END: validate

    let mut progress = Steps::new(first, args.steps.get(), is_main);
    let (mut losses, mut reported) = (Vec::new(), 0);
    let mut validation_loss = None;
    #[cfg(feature = "ddp")]
    let mut gradient_norm = None;
    let started = Instant::now();
    let mut batches = iter::repeat_with(|| loader.iter()).flatten(); // epoch after epoch
    let mut window = GradientsAccumulator::new();
    for step in first + 1..=last {
        // ANCHOR: step
        #[cfg(feature = "ddp")]
        device.seed(ddp.step_seed(args.seed, step));
        #[allow(unused_variables)] // `pass`, without ranks
        for (pass, batch) in (1..=passes).zip(batches.by_ref()) {
            let loss = loss_of(&training.model, batch?) / passes as f64;
            progress.pass(&loss);
            #[cfg(feature = "ddp")]
            let _local = (pass < passes).then(|| ddp.no_sync());
            let grads = GradientsParams::from_grads(loss.backward(), &training.model);
            window.accumulate(&training.model, grads);
        }
        let grads = window.grads();
        #[cfg(feature = "ddp")]
        let (grads, norm) = ddp.clip_grad_norm(grads, &training.model, args.clip, Norm::L2)?;
        let rate = training.schedule.step();
        training.model = training.optim.step(rate, training.model, grads);
        // ANCHOR_END: step
        training.step = step;
        progress.step();
        #[cfg(feature = "ddp")]
        let _ = gradient_norm.insert(norm);

        let evaluates = step % args.evaluate_every == 0 || step == last;
        #[cfg(feature = "ddp")]
        let saves = checkpoints.is_due(step) || step == last;
        #[cfg(not(feature = "ddp"))]
        let saves = false;
        if !(evaluates || saves) {
            continue;
        }

        // ANCHOR: together
        #[allow(unused_mut)]
        let mut own = progress.pause(); // one for each step since the last pause
        #[cfg(feature = "ddp")]
        ddp.all_reduce(&mut own, ReduceOp::Mean)?;
        losses.extend(own);
        // ANCHOR_END: together
        if evaluates {
            let loss = validate(&training.model)?;
            progress.report(mean(&losses[reported..]), loss);
            reported = losses.len();
            validation_loss = Some(loss);
        }
        // ANCHOR: save
        #[cfg(feature = "ddp")]
        if saves {
            checkpoints.save(step, training.snapshot(&loader))?;
        }
        // ANCHOR_END: save
        progress.resume();
    }
    progress.finish();

    #[cfg(feature = "ddp")]
    let model_path = (args.out)
        .join(format!("step-{}", training.step))
        .join("model.bpk");
    #[cfg(not(feature = "ddp"))]
    let model_path = args.out.join("model.bpk");
    #[cfg(not(feature = "ddp"))]
    training.model.clone().save_file(&model_path)?;

    let validation_loss = match validation_loss {
        Some(loss) => loss,
        None => validate(&training.model)?, // there was no step left to make
    };
    let seconds = started.elapsed().as_secs_f64();

    // ANCHOR: sample
    let sample = match is_main {
        true => write(args, text, &training.model.valid(), &plain_device),
        false => None,
    };
    #[cfg(feature = "ddp")]
    ddp.monitored_barrier()?; // as long as rank 0 is writing
    // ANCHOR_END: sample

    let report = Report {
        world_size,
        parameters: training.model.num_params(),
        first_step: first,
        step: training.step,
        losses,
        validation_loss,
        steps_per_second: progress.per_second(),
        seconds,
        model_path,
        sample,
        #[cfg(feature = "ddp")]
        ddp: DdpReport::new(&ddp, args.hook, &training.model, gradient_norm)?,
    };
    if is_main {
        report.print(args.json)?;
    }
    Ok(())
}

/// For training on the first device and for measuring on the second.
fn loaders(
    args: &Args,
    text: &Text,
    [device, plain_device]: [&Device; 2],
    #[cfg(feature = "ddp")] ddp: &Ddp,
) -> Result<(TrainLoader, ValidationLoader), Error> {
    let (batch_size, context) = (args.batch_size.get(), args.context.get());
    // ANCHOR: loaders
    #[cfg(feature = "ddp")]
    let loaders: (TrainLoader, ValidationLoader) = (
        ddp.loader(text.train(context), WindowBatcher)
            .batch_size(batch_size)
            .shuffle(args.seed)
            .device(device.clone())
            .build()?,
        Arc::new(
            ddp.loader(text.validation(context), WindowBatcher)
                .batch_size(batch_size)
                .tail(Tail::Exact)
                .device(plain_device.clone())
                .build()?,
        ),
    );
    #[cfg(not(feature = "ddp"))]
    let loaders: (TrainLoader, ValidationLoader) = (
        DataLoaderBuilder::new(WindowBatcher)
            .batch_size(batch_size)
            .shuffle(args.seed)
            .set_device(device.clone())
            .build(text.train(context)),
        DataLoaderBuilder::new(WindowBatcher)
            .batch_size(batch_size)
            .set_device(plain_device.clone())
            .build(text.validation(context)),
    );
    // ANCHOR_END: loaders
    Ok(loaders)
}

/// Mean over the characters of the batch, in nats.
fn loss_of(model: &Gpt, batch: TokenBatch) -> Tensor<1> {
    let scores = model.forward(batch.tokens).flatten::<2>(0, 1);
    CrossEntropyLossConfig::new()
        .init(&scores.device())
        .forward(scores, batch.next.flatten(0, 1))
}

/// The sum of the losses of the loader's characters, and their number.
fn measure(model: &Gpt, loader: &dyn DataLoader<TokenBatch>) -> Result<[f64; 2], Error> {
    let mut sums = [0.0; 2];
    for batch in loader.iter() {
        let batch = batch?;
        let count = batch.next.shape().num_elements() as f64;
        sums[0] += loss_of(model, batch).into_scalar::<f64>() * count;
        sums[1] += count;
    }
    Ok(sums)
}

/// The prompt and what the model makes of it, if a sample is wanted.
fn write(args: &Args, text: &Text, model: &Gpt, device: &Device) -> Option<String> {
    let prompt = text.vocabulary.encode(&args.prompt).ok()?;
    device.seed(args.seed);
    (args.sample > 0).then(|| {
        let sample = model.sample(&prompt, args.sample, args.temperature);
        args.prompt.clone() + &text.vocabulary.decode(&sample)
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
