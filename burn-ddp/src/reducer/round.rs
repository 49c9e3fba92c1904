//! What the buckets of one round have in common.

use super::{comm_hook::CommHook, control::Contribution};
use crate::{config::Reduction, group::ReduceOp};
use std::sync::{Arc, OnceLock};

/// How a model's gradients are reduced; equal on all ranks.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) reduction: Reduction,
    /// Look for NaN and infinities.
    pub(crate) check_finite: bool,
    pub(crate) hook: Option<Arc<dyn CommHook>>,
    /// Gradients point into the buckets.
    pub(crate) views: bool,
}

/// One round on its way through the communication thread, which takes the buckets in index order.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) rule: Rule,
    world_size: usize,
    /// Samples behind a weight of 1.
    pub(super) weight_unit: f64,
    /// Known once the first bucket is back.
    contributions: OnceLock<Vec<Contribution>>,
}

impl Round {
    pub(super) fn new(rule: Rule, world_size: usize, weight_unit: f64) -> Self {
        Self {
            rule,
            world_size,
            weight_unit,
            contributions: OnceLock::new(),
        }
    }

    pub(super) fn collective(&self) -> ReduceOp {
        match self.rule.reduction {
            Reduction::Sum if self.rule.hook.is_none() => ReduceOp::Sum,
            // A sum over samples or active ranks is made of the mean, which does not overflow 16 bits.
            _ => ReduceOp::Mean,
        }
    }

    /// What a tail element of a reduced bucket is to be multiplied with to have the sum over ranks.
    pub(super) fn to_sum(&self) -> f64 {
        match self.collective() {
            ReduceOp::Sum => 1.0,
            _ => self.world_size as f64,
        }
    }

    pub(super) fn learn(&self, contributions: Vec<Contribution>) {
        let _ = self.contributions.set(contributions);
    }

    pub(super) fn contributions(&self) -> &[Contribution] {
        self.contributions.get().map_or(&[], Vec::as_slice)
    }

    /// What turns the reduced data into the gradient; `None` if no sample is behind it anywhere.
    pub(super) fn factor(&self) -> Option<f64> {
        let all = self.contributions();
        let per = |divisor: f64| (divisor > 0.0).then(|| self.world_size as f64 / divisor);
        match self.rule.reduction {
            Reduction::Sum => Some(self.to_sum()),
            Reduction::Mean => per(all.iter().filter(|rank| rank.active).count() as f64),
            Reduction::WeightedMean => {
                let samples: f64 = all.iter().map(|rank| rank.samples as f64).sum();
                per(samples / self.weight_unit)
            }
        }
    }
}
