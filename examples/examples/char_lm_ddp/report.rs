//! What the run came to.

use burn_ddp_examples::Error;
use serde::Serialize;
use std::path::PathBuf;

#[cfg(feature = "ddp")]
use {crate::args::HookName, burn_ddp::Ddp, burn_ddp_examples::gpt::Gpt};

#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) world_size: usize,
    pub(crate) parameters: usize,
    /// The step that this run went on from.
    pub(crate) first_step: u64,
    /// The step that it ended with, the same on every rank.
    pub(crate) step: u64,
    /// Of each step of this run, in nats per character; mean over batches and ranks.
    pub(crate) losses: Vec<f64>,
    /// After the last step, over all of the validation text.
    pub(crate) validation_loss: f64,
    /// Without the first five steps of the run, evaluation and checkpoints; none when there were no others.
    pub(crate) steps_per_second: Option<f64>,
    /// Training and evaluation, without starting the processes.
    pub(crate) seconds: f64,
    pub(crate) model_path: PathBuf,
    /// Of rank 0, the prompt included.
    pub(crate) sample: Option<String>,
    #[cfg(feature = "ddp")]
    #[serde(flatten)]
    pub(crate) ddp: DdpReport,
}

impl Report {
    pub(crate) fn print(&self, json: bool) -> Result<(), Error> {
        if json {
            println!("{}", serde_json::to_string(self)?);
            return Ok(());
        }
        println!(
            "step {}: validation loss {:.4} nats per character, {:.1} s; model: {}",
            self.step,
            self.validation_loss,
            self.seconds,
            self.model_path.display()
        );
        if let Some(sample) = &self.sample {
            println!("\n{sample}");
        }
        Ok(())
    }
}

/// What the communication came to.
#[cfg(feature = "ddp")]
#[derive(Debug, Serialize)]
pub(crate) struct DdpReport {
    hook: HookName,
    /// One hash of all parameters per rank; equal, or the ranks have come apart.
    param_hashes: Vec<String>,
    /// Of the last step, before clipping; none when there was no step.
    gradient_norm: Option<f64>,
    /// Before the hook.
    gradient_bytes_per_step: usize,
    buckets: usize,
    communication_seconds: f64,
    /// Share of the communication time that lay inside backward.
    overlap_ratio: f64,
}

#[cfg(feature = "ddp")]
impl DdpReport {
    /// Collective: all ranks call it.
    pub(crate) fn new(
        ddp: &Ddp,
        hook: HookName,
        model: &Gpt,
        gradient_norm: Option<f64>,
    ) -> Result<Self, Error> {
        let stats = ddp.stats();
        Ok(Self {
            hook,
            gradient_norm,
            param_hashes: ddp.param_hashes(model)?,
            gradient_bytes_per_step: stats.gradient_bytes_per_step,
            buckets: stats.buckets,
            communication_seconds: stats.communication_seconds,
            overlap_ratio: stats.overlap_ratio,
        })
    }
}
