//! What changes from step to step, and how it goes into a checkpoint.

use crate::args::Args;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Device;
use burn_ddp_examples::data::text::Text;
use burn_ddp_examples::gpt::Gpt;
use burn_ddp_examples::{Error, schedule};

#[cfg(not(feature = "ddp"))]
use burn::grad_clipping::GradientClippingConfig;
#[cfg(feature = "ddp")]
use burn_ddp::{
    CompressHook, Ddp, PowerSgdHook, WrapConfig,
    data::DistributedLoader,
    train::{Checkpoint, LinearScaling, Snapshot},
};
#[cfg(feature = "ddp")]
use {crate::args::HookName, burn_ddp_examples::data::text::TokenBatch, std::sync::Arc};

pub(crate) struct Training {
    pub(crate) model: Gpt,
    pub(crate) optim: ModuleOptimizer,
    pub(crate) schedule: ModuleLrScheduler,
    /// Steps made.
    pub(crate) step: u64,
    /// The hook that has a state of its own, if it is the one.
    #[cfg(feature = "ddp")]
    power_sgd: Option<Arc<PowerSgdHook>>,
    /// Options and their values, for whoever goes on from a checkpoint.
    #[cfg(feature = "ddp")]
    settings: Vec<(String, String)>,
    /// In words, those that the checkpoint's run had otherwise.
    #[cfg(feature = "ddp")]
    pub(crate) changed: Vec<String>,
}

impl Training {
    pub(crate) fn new(
        args: &Args,
        text: &Text,
        world_size: usize,
        device: &Device,
    ) -> Result<Self, Error> {
        let steps = args.steps.get() as usize;
        // One step stands for so many of the batches that `--lr` is for.
        let factor = (world_size * args.accumulate.get()) as f64;
        // ANCHOR: rate
        #[cfg(feature = "ddp")]
        let schedule = LinearScaling::new(schedule::warmup_cosine(args.lr, steps)?, factor)
            .with_warm_up(steps / 10)
            .into();
        #[cfg(not(feature = "ddp"))]
        let schedule = schedule::warmup_cosine(args.lr * factor, steps)?;
        // ANCHOR_END: rate

        let optim = AdamWConfig::new().with_beta_2(0.99);
        // Burn's own clipping takes the norm of each parameter by itself.
        #[cfg(not(feature = "ddp"))]
        let optim = optim.with_grad_clipping(Some(GradientClippingConfig::Norm(args.clip as f32)));

        Ok(Self {
            model: args.model(text).init(device),
            optim: optim.init(),
            schedule,
            step: 0,
            #[cfg(feature = "ddp")]
            power_sgd: match args.hook {
                HookName::PowerSgd => Some(Arc::new(PowerSgdHook::new(args.power_sgd_rank.get()))),
                _ => None,
            },
            #[cfg(feature = "ddp")]
            settings: args.settings(world_size),
            #[cfg(feature = "ddp")]
            changed: Vec::new(),
        })
    }
}

// ANCHOR: checkpoint
#[cfg(feature = "ddp")]
impl Training {
    /// Everything that the next step depends on.
    pub(crate) fn snapshot<'a>(
        &'a self,
        loader: &'a DistributedLoader<TokenBatch>,
    ) -> Snapshot<'a> {
        let snapshot = Snapshot::new()
            .model("model", &self.model)
            .optimizer("optimizer", &self.optim)
            .scheduler("schedule", &self.schedule)
            .loader("loader", loader)
            .value("settings", &self.settings);
        match &self.power_sgd {
            Some(hook) => snapshot.power_sgd("hook", hook),
            None => snapshot,
        }
    }

    /// Goes on from a checkpoint. Before `wrap`.
    pub(crate) fn load(
        &mut self,
        saved: &Checkpoint,
        loader: &DistributedLoader<TokenBatch>,
    ) -> Result<(), Error> {
        self.model = saved.model("model", self.model.clone())?;
        self.optim = saved.optimizer("optimizer", self.optim.clone())?;
        self.schedule = saved.scheduler("schedule", self.schedule.clone())?;
        saved.loader("loader", loader)?;
        // A run may go on with another hook than before.
        if let Some(hook) = &self.power_sgd
            && saved.contains("hook")
        {
            saved.power_sgd("hook", hook)?;
        }
        let before: Vec<(String, String)> = saved.value("settings")?;
        self.changed = changes(&before, &self.settings);
        self.step = saved.step();
        Ok(())
    }
}
// ANCHOR_END: checkpoint

/// The options that are not as before, each with both values.
#[cfg(feature = "ddp")]
fn changes(before: &[(String, String)], now: &[(String, String)]) -> Vec<String> {
    let changed = now.iter().filter_map(|(option, value)| {
        let (_, old) = before.iter().find(|(name, _)| name == option)?;
        (old != value).then(|| format!("{option} {old} and not {value}"))
    });
    changed.collect()
}

#[cfg(feature = "ddp")]
impl Training {
    // ANCHOR: wrap
    /// Makes the model data-parallel.
    pub(crate) fn wrap(mut self, ddp: &Ddp, hook: HookName) -> Result<Self, Error> {
        let config = WrapConfig::new();
        let config = match (hook, &self.power_sgd) {
            (HookName::F16, _) => config.comm_hook(Arc::new(CompressHook::f16())),
            (HookName::Bf16, _) => config.comm_hook(Arc::new(CompressHook::bf16())),
            (_, Some(power_sgd)) => config.comm_hook(power_sgd.clone()),
            (_, None) => config,
        };
        self.model = ddp.wrap_with(self.model, config)?;
        Ok(self)
    }
    // ANCHOR_END: wrap
}
