//! The command line.

use burn_ddp_examples::data::text::Text;
use burn_ddp_examples::device::DeviceName;
use burn_ddp_examples::gpt::GptConfig;
use burn_ddp_examples::{Error, command, output};
use clap::Parser;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

/// Trains a GPT on the characters of Shakespeare's Coriolanus (part of this program).
#[derive(Debug, Parser)]
pub(crate) struct Args {
    /// Number of processes (ranks).
    #[cfg(feature = "ddp")]
    #[arg(long, default_value = "2")]
    pub(crate) nproc: NonZeroUsize,
    /// Optimizer steps of the whole run.
    #[arg(long, default_value = "800")]
    pub(crate) steps: NonZeroU64,
    /// End after this step with a checkpoint, for a job whose time is limited; the next run goes on there.
    #[cfg(feature = "ddp")]
    #[arg(long, value_name = "STEP")]
    pub(crate) stop_after: Option<NonZeroU64>,
    /// Windows of text per batch and rank.
    #[arg(long, default_value = "2")]
    pub(crate) batch_size: NonZeroUsize,
    /// Batches per step and rank; their gradients are accumulated.
    #[arg(long, default_value = "2")]
    pub(crate) accumulate: NonZeroUsize,
    /// Highest learning rate for one batch of one rank; it is multiplied by the number of batches in a step of all ranks.
    #[arg(long, default_value_t = 1e-3, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// Largest norm of the gradient of all parameters together.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub(crate) clip: f64,
    /// How gradients travel.
    #[cfg(feature = "ddp")]
    #[arg(long, value_enum, default_value = "bf16")]
    pub(crate) hook: HookName,
    /// Rank of the matrices that `--hook power-sgd` sends.
    #[cfg(feature = "ddp")]
    #[arg(long, value_name = "RANK", default_value = "4")]
    pub(crate) power_sgd_rank: NonZeroUsize,
    /// Transformer blocks.
    #[arg(long, default_value = "3")]
    pub(crate) layers: NonZeroUsize,
    /// Size of a character's vector.
    #[arg(long, default_value = "128")]
    pub(crate) width: NonZeroUsize,
    /// Attention heads; the width must be a multiple of their number.
    #[arg(long, default_value = "4")]
    pub(crate) heads: NonZeroUsize,
    /// How many characters the model sees.
    #[arg(long, default_value = "64")]
    pub(crate) context: NonZeroUsize,
    /// Share of the activations that are dropped in training.
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) dropout: f64,
    /// Seed of the weights, the order of the windows, dropout and the sample.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Steps between two looks at the validation loss.
    #[arg(long, value_name = "STEPS", default_value = "100")]
    pub(crate) evaluate_every: NonZeroU64,
    /// Steps between two checkpoints; there is always one at the end.
    #[cfg(feature = "ddp")]
    #[arg(long, value_name = "STEPS", default_value = "100")]
    pub(crate) checkpoint_every: NonZeroU64,
    /// Length of the sample in characters; 0 for none.
    #[arg(long, value_name = "LENGTH", default_value_t = 400)]
    pub(crate) sample: usize,
    /// What the sample goes on from.
    #[arg(long, default_value = "MENENIUS:\n")]
    pub(crate) prompt: String,
    /// Below 1 the sample keeps closer to what is likely, above 1 it is more varied; at 0 it is the likeliest character each time.
    #[arg(long, default_value_t = 0.8, allow_negative_numbers = true)]
    pub(crate) temperature: f64,
    /// Where to compute.
    #[arg(long, value_enum, default_value = "flex")]
    pub(crate) device: DeviceName,
    /// Folder for the model and for checkpoints; a run goes on from the newest one in it.
    #[arg(long, default_value = "target/char_lm_ddp")]
    pub(crate) out: PathBuf,
    /// Print one JSON object as the last line on stdout.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Values of `--hook`.
#[cfg(feature = "ddp")]
#[derive(Debug, Clone, Copy, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HookName {
    /// As they are, in 32 bits.
    None,
    /// In 16 bits, IEEE half precision.
    F16,
    /// In 16 bits, bfloat16.
    Bf16,
    /// As the product of two thin matrices.
    PowerSgd,
}

impl Args {
    /// What can be told to be wrong without computing anything.
    pub(crate) fn check(&self, text: &Text) -> Result<(), Error> {
        let wrong = |message: String| Err(Error::Usage(message));
        command::check_lr(self.lr)?;
        if self.clip.is_nan() || self.clip <= 0.0 {
            return wrong(format!("--clip is {}, but must be above 0", self.clip));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let dropout = self.dropout;
            return wrong(format!(
                "--dropout is {dropout}, but must be at least 0 and below 1"
            ));
        }
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            let temperature = self.temperature;
            return wrong(format!(
                "--temperature is {temperature}, but must be 0 or above"
            ));
        }
        if !self.width.get().is_multiple_of(self.heads.get()) {
            let (width, heads) = (self.width, self.heads);
            return wrong(format!("--width {width} is no multiple of --heads {heads}"));
        }
        let longest = text.validation_tokens().len() - 1;
        if self.context.get() > longest {
            let context = self.context;
            return wrong(format!(
                "--context is {context}, but the text has windows of at most {longest} characters"
            ));
        }
        match text.vocabulary.encode(&self.prompt) {
            Ok(prompt) if prompt.is_empty() => {
                return wrong("--prompt must have a character to go on from".into());
            }
            Ok(_) => {}
            Err(c) => return wrong(format!("--prompt has {c:?}, which is not in the text")),
        }
        self.device.open()?;
        output::check_writable(&self.out)
    }

    /// The model's shape.
    pub(crate) fn model(&self, text: &Text) -> GptConfig {
        GptConfig::new(text.vocabulary.size(), self.context.get())
            .with_layers(self.layers.get())
            .with_width(self.width.get())
            .with_heads(self.heads.get())
            .with_dropout(self.dropout)
    }

    /// The step with which this run ends, and the option that says so.
    pub(crate) fn end(&self) -> (&'static str, u64) {
        #[cfg(feature = "ddp")]
        if let Some(stop) = self.stop_after.filter(|stop| *stop < self.steps) {
            return ("--stop-after", stop.get());
        }
        ("--steps", self.steps.get())
    }

    /// What a run that goes on from a checkpoint should have as it was: the options by which a training is another one, and their values.
    #[cfg(feature = "ddp")]
    pub(crate) fn settings(&self, world_size: usize) -> Vec<(String, String)> {
        let hook = match self.hook {
            HookName::PowerSgd => format!("power-sgd of rank {}", self.power_sgd_rank),
            hook => format!("{hook:?}").to_lowercase(),
        };
        let settings = [
            ("--nproc", world_size.to_string()),
            ("--steps", self.steps.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--accumulate", self.accumulate.to_string()),
            ("--lr", self.lr.to_string()),
            ("--clip", self.clip.to_string()),
            ("--dropout", self.dropout.to_string()),
            ("--hook", hook),
        ];
        settings
            .map(|(option, value)| (option.into(), value))
            .into()
    }
}
