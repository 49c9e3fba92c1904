//! The learning rate over one training run.

use crate::Error;
use burn::lr_scheduler::LrSchedulerConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::lr_scheduler::sequential::SequentialLrSchedulerConfig;

/// Linear warm-up from a tenth of `lr` to `lr` over the first tenth of `steps`, then a cosine
/// down to nothing (Goyal et al. 2017, section 2.2; Loshchilov and Hutter 2017).
///
/// `steps` is the number of optimizer steps of the whole run. It is the same on every rank, since
/// each step consumes one batch of each rank.
///
/// # Errors
///
/// When `lr` is outside of (0, 1], the range that Burn's schedulers take.
pub fn warmup_cosine(lr: f64, steps: usize) -> Result<ModuleLrScheduler, Error> {
    let warmup = (steps / 10).max(1);
    SequentialLrSchedulerConfig::new(
        vec![
            LrSchedulerConfig::Linear(LinearLrSchedulerConfig::new(lr / 10.0, lr, warmup)),
            LrSchedulerConfig::Cosine(CosineAnnealingLrSchedulerConfig::new(
                lr,
                steps.saturating_sub(warmup).max(1),
            )),
        ],
        vec![warmup],
    )
    .init()
    .map_err(|reason| Error::Usage(format!("--lr {lr}: {reason}")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn warms_up_then_falls_to_nothing() {
        let mut schedule = warmup_cosine(0.1, 20).unwrap();
        let rates: Vec<f64> = (0..20).map(|_| schedule.step().base()).collect();

        // Two steps of warm-up: 0.01, then half way from 0.01 to 0.1.
        assert!((rates[0] - 0.01).abs() < 1e-12);
        assert!((rates[1] - 0.055).abs() < 1e-12);
        // The cosine over the remaining 18: lr at its start, half of it in its middle.
        assert!((rates[2] - 0.1).abs() < 1e-12);
        assert!((rates[11] - 0.05).abs() < 1e-12);
        // Its last step is at 17/18 of the half period: 0.05 * (1 - cos(pi / 18)).
        assert!((rates[19] - 0.05 * (1.0 - (std::f64::consts::PI / 18.0).cos())).abs() < 1e-12);
    }

    #[test]
    fn a_run_of_one_step_has_a_schedule() {
        assert!(warmup_cosine(0.1, 1).is_ok());
    }

    #[test]
    fn refuses_a_rate_out_of_range() {
        let error = warmup_cosine(2.0, 10).err().unwrap();
        assert!(error.to_string().starts_with("--lr 2: "), "{error}");
    }
}
