//! What a training run shows while it works.

use burn::tensor::Tensor;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle};
use std::fmt;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often a progress bar is drawn, and with it how often a loss is read back from the device.
pub(crate) const DRAW_EVERY: Duration = Duration::from_millis(200);

/// A bar on stderr for `steps` steps, hidden without `speaks` and where no terminal is.
pub(crate) fn bar(steps: u64, speaks: bool) -> ProgressBar {
    let bar = if speaks && std::io::stderr().is_terminal() {
        ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
            .with_finish(ProgressFinish::AndClear)
    } else {
        ProgressBar::hidden()
    };
    // All text is in the message, which is cut to the terminal: a line that wraps would leave its first part behind.
    // The template is a constant; were it wrong, the default bar is good enough.
    if let Ok(style) = ProgressStyle::with_template("{bar:16.cyan/blue} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

/// Progress of a training run on stderr: bars on a terminal, else one line an epoch.
#[derive(Debug)]
pub struct Progress {
    epochs: usize,
    steps: usize,
    images: usize,
    speaks: bool,
    bar: ProgressBar,
    epoch: usize,
    loss: Option<Tensor<1>>,
    done: usize,
    drawn: Instant,
    started: Instant,
    training: Duration,
}

/// The figures of one epoch.
#[derive(Debug, Clone, Copy)]
pub struct Epoch {
    /// Counted from one.
    pub number: usize,
    /// Mean loss of its steps.
    pub train_loss: f64,
    /// Share of the test images that are classified right.
    pub test_accuracy: f64,
}

impl Progress {
    /// A display for a run of `epochs` times `steps`, over `images` images an epoch on all ranks
    /// together. Without `speaks` nothing is shown, but time and loss are still measured.
    pub fn new(epochs: usize, steps: usize, images: usize, speaks: bool) -> Self {
        let bar = bar((epochs * steps) as u64, speaks);
        let now = Instant::now();
        Self {
            epochs,
            steps,
            images,
            speaks,
            bar,
            epoch: 0,
            loss: None,
            done: 0,
            drawn: now,
            started: now,
            training: Duration::ZERO,
        }
    }

    /// Begins an epoch, counted from one.
    pub fn begin_epoch(&mut self, number: usize) {
        self.epoch = number;
        self.say("");
        self.loss = None;
        self.done = 0;
        self.started = Instant::now();
    }

    /// Counts one step. The loss stays on its device until it is shown: reading it at every step
    /// would make a GPU wait.
    pub fn step(&mut self, loss: &Tensor<1>) {
        let loss = loss.clone().inner();
        self.loss = Some(match self.loss.take() {
            Some(sum) => sum + loss,
            None => loss,
        });
        self.done += 1;
        self.bar.inc(1);
        if !self.bar.is_hidden() && self.drawn.elapsed() >= DRAW_EVERY {
            self.drawn = Instant::now();
            let images = self.images as f64 * self.done as f64 / self.steps as f64;
            self.say(&format!(
                "loss {:.4}  {:.0} images/s  {:#} left",
                self.mean_loss(),
                images / self.started.elapsed().as_secs_f64(),
                HumanDuration(self.bar.eta())
            ));
        }
    }

    /// Ends the training part of an epoch; returns the mean loss of its steps on this rank.
    pub fn end_epoch(&mut self) -> f64 {
        let loss = self.mean_loss();
        self.training += self.started.elapsed();
        self.say("evaluating");
        loss
    }

    /// Shows the figures of an epoch.
    pub fn report(&self, epoch: Epoch) {
        let line = format!(
            "epoch {:>3}/{}  {epoch}  {:.0} images/s",
            epoch.number,
            self.epochs,
            self.images_per_second(epoch.number),
        );
        if !self.bar.is_hidden() {
            self.bar.println(line);
        } else if self.speaks {
            eprintln!("{line}");
        }
    }

    /// Images per second of all ranks together over `epochs` epochs, evaluation not counted.
    pub fn images_per_second(&self, epochs: usize) -> f64 {
        (self.images * epochs) as f64 / self.training.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn say(&self, what: &str) {
        let Self { epoch, epochs, .. } = self;
        let (step, steps) = (self.bar.position(), self.epochs * self.steps);
        self.bar.set_message(format!(
            "epoch {epoch}/{epochs}  step {step}/{steps}  {what}"
        ));
    }

    fn mean_loss(&self) -> f64 {
        match &self.loss {
            Some(sum) => sum.clone().into_scalar::<f64>() / self.done as f64,
            None => f64::NAN,
        }
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "loss {:.4}  test accuracy {:.2} %",
            self.train_loss,
            self.test_accuracy * 100.0
        )
    }
}
