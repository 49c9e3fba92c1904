//! Training in which one rank dies (DDP-03).

use crate::{mark, models::Mlp, oracle::batch};
use burn::optim::{GradientsParams, SgdConfig};
use burn::prelude::*;
use burn::tensor::activation::relu;
use burn_ddp::{Ddp, Error, WrapConfig, try_backward};
use rustix::process::{Signal, getpid, kill_process};

/// The rank that dies.
pub const VICTIM: usize = 2;
/// The step at which it does.
pub const STEP: u64 = 3;

/// Where in its step the victim dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// After forward.
    Before,
    /// In backward, between the two layers, when the buckets of the second layer are under way.
    During,
    /// Before the optimizer's step.
    After,
}

/// A way to die: `abort`, `panic`, `exit` (with code 0) or `kill`.
pub fn way(name: &str) -> fn() {
    match name {
        "abort" => || std::process::abort(),
        "panic" => || panic!("on purpose"),
        "exit" => || std::process::exit(0),
        "kill" => || kill_process(getpid(), Signal::KILL).unwrap(),
        other => panic!("no way {other}"),
    }
}

/// Trains an [`Mlp`], every parameter in a bucket of its own, until [`VICTIM`] dies.
///
/// # Errors
///
/// What the survivors are told.
pub fn train(ddp: &Ddp, moment: Moment, die: fn()) -> Result<(), Error> {
    let device = Device::flex().autodiff();
    let config = WrapConfig::new().first_bucket_bytes(1).bucket_bytes(1);
    let mut model = ddp.wrap_with(Mlp::new(&device), config)?;
    let mut optim = SgdConfig::new().init();
    for step in 0..STEP + 3 {
        let dies = |at| step == STEP && ddp.rank() == VICTIM && moment == at;
        let row = ddp.rank();
        let mut hidden = relu(model.a.forward(batch(step, row..row + 1, [0, 8], &device)));
        if dies(Moment::During) {
            hidden = mark(hidden, die);
        }
        let loss = model.b.forward(hidden).powf_scalar(2.0).mean();
        if dies(Moment::Before) {
            die();
        }
        let grads = try_backward(&loss)?;
        if dies(Moment::After) {
            die();
        }
        let grads = GradientsParams::from_grads(grads, &model);
        model = optim.step(0.05, model, grads);
    }
    Ok(())
}
