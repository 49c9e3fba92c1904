//! What a run that counts in steps shows while it works, and its clock.

use crate::progress::{DRAW_EVERY, bar};
use burn::tensor::Tensor;
use indicatif::{HumanDuration, ProgressBar};
use std::time::{Duration, Instant};

/// Steps after the start that the clock leaves out: memory is allocated and kernels are chosen in them.
const UNCOUNTED: u64 = 5;

/// Progress of a training run on stderr: a bar on a terminal, else one line a report.
///
/// Losses stay on their device until [`pause`](Self::pause) reads them, for reading one makes a GPU wait.
#[derive(Debug)]
pub struct Steps {
    total: u64,
    speaks: bool,
    bar: ProgressBar,
    drawn: Instant,
    /// Of the step under way: the sum over its passes so far.
    passes: Option<Tensor<1>>,
    unread: Vec<Tensor<1>>,
    uncounted: u64,
    counted: u64,
    running: Option<Instant>,
    elapsed: Duration,
}

impl Steps {
    /// A display for a run that has made `first` of `total` steps. Without `speaks` nothing is shown, but time and losses are still kept.
    pub fn new(first: u64, total: u64, speaks: bool) -> Self {
        let bar = bar(total, speaks);
        bar.set_position(first);
        bar.reset_eta();
        Self {
            total,
            speaks,
            bar,
            drawn: Instant::now(),
            passes: None,
            unread: Vec::new(),
            uncounted: UNCOUNTED,
            counted: 0,
            running: None,
            elapsed: Duration::ZERO,
        }
    }

    /// Adds the loss of one pass to its step.
    pub fn pass(&mut self, loss: &Tensor<1>) {
        let loss = loss.clone().inner();
        self.passes = Some(match self.passes.take() {
            Some(sum) => sum + loss,
            None => loss,
        });
    }

    /// Ends a step: its loss is the sum of those of its passes.
    pub fn step(&mut self) {
        let Some(loss) = self.passes.take() else {
            return;
        };
        self.bar.inc(1);
        if self.uncounted > 0 {
            self.uncounted -= 1;
            if self.uncounted == 0 {
                wait_for(&loss);
                self.running = Some(Instant::now());
            }
        } else {
            self.counted += 1;
        }
        if !self.bar.is_hidden() && self.drawn.elapsed() >= DRAW_EVERY {
            self.drawn = Instant::now();
            self.bar.set_message(format!(
                "step {}/{}  loss {:.4}  {:#} left",
                self.bar.position(),
                self.total,
                wait_for(&loss),
                HumanDuration(self.bar.eta())
            ));
        }
        self.unread.push(loss);
    }

    /// Stops the clock; the losses of the steps since it was last called, on this rank.
    pub fn pause(&mut self) -> Vec<f64> {
        let losses = self.unread.drain(..).map(|loss| wait_for(&loss)).collect();
        self.elapsed += self
            .running
            .take()
            .map_or(Duration::ZERO, |at| at.elapsed());
        losses
    }

    /// Starts the clock again.
    pub fn resume(&mut self) {
        self.running = (self.uncounted == 0).then(Instant::now);
    }

    /// Shows the mean loss since the last report, and what was measured.
    pub fn report(&self, loss: f64, validation_loss: f64) {
        let line = format!(
            "step {:>5}/{}  loss {loss:.4}  validation loss {validation_loss:.4}{}",
            self.bar.position(),
            self.total,
            match self.per_second() {
                Some(steps) => format!("  {steps:.2} steps/s"),
                None => String::new(),
            }
        );
        if !self.bar.is_hidden() {
            self.bar.println(line);
        } else if self.speaks {
            eprintln!("{line}");
        }
    }

    /// Steps per second while the clock ran, without the first five of the run; `None` when there were no others.
    pub fn per_second(&self) -> Option<f64> {
        let seconds = self.elapsed.as_secs_f64();
        (self.counted > 0 && seconds > 0.0).then(|| self.counted as f64 / seconds)
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

/// The value of `loss`, once its device has computed it.
fn wait_for(loss: &Tensor<1>) -> f64 {
    loss.clone().into_scalar()
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn step(steps: &mut Steps, passes: &[f32]) {
        for &pass in passes {
            let device = Device::flex().autodiff();
            steps.pass(&Tensor::from_floats([pass], &device));
        }
        steps.step();
    }

    #[test]
    fn a_steps_loss_is_the_sum_of_its_passes_and_is_read_once() {
        let mut steps = Steps::new(0, 4, false);
        step(&mut steps, &[1.0, 2.0]);
        step(&mut steps, &[0.5]);
        assert_eq!(steps.pause(), [3.0, 0.5]);
        assert!(steps.pause().is_empty());
        steps.resume();
        step(&mut steps, &[4.0]);
        assert_eq!(steps.pause(), [4.0]);
    }

    #[test]
    fn the_first_five_steps_and_pauses_do_not_count() {
        let mut steps = Steps::new(0, 8, false);
        for _ in 0..5 {
            step(&mut steps, &[1.0]);
        }
        steps.pause();
        assert_eq!(steps.per_second(), None);
        steps.resume();
        for _ in 0..2 {
            step(&mut steps, &[1.0]);
        }
        steps.pause();
        let elapsed = steps.elapsed;
        assert_eq!(steps.per_second(), Some(2.0 / elapsed.as_secs_f64()));
        // Paused: the clock stands still.
        steps.pause();
        assert_eq!(steps.elapsed, elapsed);
    }
}
