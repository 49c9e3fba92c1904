//! What a training script says of a step, and hears of it.

use crate::{
    Ddp, Error, NonFinite, ReducerError,
    autodiff::{join, sessions::SyncSwitch},
    group::GroupError,
};
use burn::{module::Module, optim::GradientsParams};
use std::{panic::resume_unwind, thread};

impl Ddp {
    /// Runs `f`, whose backward passes are those of `samples` samples (or tokens) of this rank.
    ///
    /// For models wrapped with [`Reduction::WeightedMean`](crate::Reduction::WeightedMean), all of whose backward passes need it. With a loss that is the mean over the rank's
    /// samples, the reduced gradient is that of the mean over the samples of all ranks, and of all passes of an accumulation window. A rank
    /// without any passes 0: its gradients, which may be no numbers then, do not count.
    ///
    /// ```
    /// # use burn::{module::{Module, Param}, optim::GradientsParams, prelude::*};
    /// # use burn_ddp::{Ddp, Reduction, WrapConfig};
    /// # #[derive(Module, Debug)]
    /// # struct Scale { w: Param<Tensor<1>> }
    /// # fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
    /// # let device = ddp.device(Device::flex())?.autodiff();
    /// # let model = Scale { w: Param::from_tensor(Tensor::ones([1], &device)) };
    /// let config = WrapConfig::new().reduction(Reduction::WeightedMean);
    /// let model = ddp.wrap_with(model, config)?;
    /// let samples = if ddp.is_main() { 1 } else { 3 };
    /// let loss = (model.w.val() * Tensor::<1>::ones([samples], &device)).mean();
    /// let grads = ddp.weighted(samples, || loss.backward());
    /// let grads = GradientsParams::from_grads(grads, &model);
    /// # assert_eq!(grads.get::<1>(model.w.id).map(|g| g.into_scalar::<f32>()), Some(1.0));
    /// # Ok(())
    /// # }
    /// # fn main() -> Result<(), burn_ddp::Error> { burn_ddp::launch(train) }
    /// ```
    pub fn weighted<R>(&self, samples: usize, f: impl FnOnce() -> R) -> R {
        struct Restore<'a>(&'a SyncSwitch, Option<u64>);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.weigh(self.1);
            }
        }
        let switch = self.switch();
        let _restore = Restore(switch, switch.weigh(Some(samples as u64)));
        f()
    }

    /// Answers the backward passes of the ranks that have more data, until all have come here. Collective in the end: every rank calls it
    /// after its last step of an epoch with uneven data; blocks until all have.
    ///
    /// Means are over the ranks that still have data. For every step that they make, `step` is called with the reduced gradients and must do
    /// what the loop does with them, the same on every rank: so the replicas, and their optimizers' states, stay equal.
    ///
    /// Other collectives of the loop (a metric, a barrier) are not answered: leave them out of loops of uneven length. Two models that are trained in
    /// turn are joined by [`join_pair`](Self::join_pair), more of them by a call each, from threads of their own.
    ///
    /// ```
    /// # use burn::{nn::LinearConfig, optim::{GradientsParams, SgdConfig}, prelude::*};
    /// # use burn_ddp::Ddp;
    /// # fn train(ddp: Ddp) -> Result<(), burn_ddp::Error> {
    /// # let device = ddp.device(Device::flex())?.autodiff();
    /// let mut model = ddp.wrap(LinearConfig::new(4, 2).init(&device))?;
    /// let mut optim = SgdConfig::new().init();
    /// for _ in 0..3 + ddp.rank() {
    ///     let loss = model.forward(Tensor::<2>::ones([8, 4], &device)).mean();
    ///     let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///     model = optim.step(0.1, model, grads);
    /// }
    /// model = ddp.join(model, |model, grads| optim.step(0.1, model, grads))?;
    /// ddp.check_replicas(&model)
    /// # }
    /// # fn main() -> Result<(), burn_ddp::Error> { burn_ddp::launch(train) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Reducer`] when a peer dies or leaves without joining, or when this rank has accumulated gradients that no pass has reduced.
    pub fn join<M: Module>(
        &self,
        model: M,
        mut step: impl FnMut(M, GradientsParams) -> M,
    ) -> Result<M, Error> {
        self.try_join(model, |model, gradients| Ok(step(model, gradients)))
    }

    /// [`join`](Self::join) with a step that can fail, such as that of [`ZeroRedundancyOptimizer`](crate::train::ZeroRedundancyOptimizer), whose collectives are
    /// the same on every rank. Collective.
    ///
    /// # Errors
    ///
    /// As for `join`, and those of `step`.
    pub fn try_join<M: Module>(
        &self,
        mut model: M,
        mut step: impl FnMut(M, GradientsParams) -> Result<M, Error>,
    ) -> Result<M, Error> {
        while let Some(gradients) = join::answer(&model, self.rank())? {
            model = step(model, gradients)?;
        }
        Ok(model)
    }

    /// [`join`](Self::join) for two wrapped models that are trained in turn, such as a generator and a discriminator. Collective in the end.
    ///
    /// The backward passes of each are answered as they come, in whatever order the others run them, the first model's on a thread of its own. So
    /// the two steps may run at the same time and must have no collectives.
    ///
    /// # Errors
    ///
    /// As for `join`; [`ReducerError::PairWithSyncBatchNorm`](crate::ReducerError::PairWithSyncBatchNorm) in a process that has such layers, whose exchanges have one
    /// order for both models; [`Error::Group`] when no thread can be started.
    pub fn join_pair<A: Module + Send, B: Module>(
        &self,
        (a, b): (A, B),
        step_a: impl FnMut(A, GradientsParams) -> A + Send,
        step_b: impl FnMut(B, GradientsParams) -> B,
    ) -> Result<(A, B), Error> {
        if self.sessions().has_gather() && self.world_size() > 1 {
            let error = ReducerError::PairWithSyncBatchNorm { rank: self.rank() };
            self.abort(&error.to_string());
            return Err(error.into());
        }
        let (a, b) = thread::scope(|scope| {
            let answer = thread::Builder::new().name("ddp-join".into());
            let answer = answer.spawn_scoped(scope, || self.join(a, step_a));
            let answer = answer.map_err(|error| GroupError::Transport {
                rank: self.rank(),
                operation: "starting a thread that joins".into(),
                cause: error.to_string(),
            })?;
            let b = self.join(b, step_b);
            let a = answer.join().unwrap_or_else(|panic| resume_unwind(panic));
            Ok::<_, GroupError>((a, b))
        })?;
        match (a, b) {
            // One of them has told the other.
            (Err(a), Err(b)) => Err(if a.is_secondary() { b } else { a }),
            (a, b) => Ok((a?, b?)),
        }
    }

    /// What was wrong with the last synchronised backward pass, if it gave no gradients because some were no numbers
    /// ([`NonFinitePolicy::Skip`](crate::NonFinitePolicy::Skip)); the same on every rank. Of several wrapped models, the first of which that is true. Local.
    pub fn non_finite(&self) -> Option<NonFinite> {
        let sessions = self.sessions().live();
        sessions.iter().find_map(|session| session.not_finite())
    }
}
