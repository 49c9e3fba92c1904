//! `gradient-memory --view`: the memory that a rank needs for a training step, with gradients copied out of the buckets or pointing into them.

use burn::{
    optim::{GradientsParams, SgdConfig},
    prelude::*,
    tensor::Distribution,
};
use burn_ddp::{Error, Launcher, WrapConfig};
use burn_ddp_benches::{memory, sync_cost::Mlp};
use clap::Parser;

/// Trains for some steps and prints how much memory rank 0 needed at its peak. Compare a run with `--view` and one without.
#[derive(Parser)]
struct Arguments {
    /// Number of processes.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Features of each layer.
    #[arg(long, default_value_t = 1024)]
    width: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Gradients point into the buckets.
    #[arg(long)]
    view: bool,
}

fn main() -> Result<(), Error> {
    let arguments = Arguments::parse();
    Launcher::new().nproc(arguments.ranks).run(|ddp| {
        let device = Device::flex().autodiff();
        let model = Mlp::new(arguments.width, arguments.depth, &device);
        let gradients = model.num_params() * size_of::<f32>();
        let config = WrapConfig::new().gradient_as_bucket_view(arguments.view);
        let mut model = ddp.wrap_with(model, config)?;
        let mut optimizer = SgdConfig::new().init();
        for _ in 0..5 {
            let x = Tensor::<2>::random([8, arguments.width], Distribution::Default, &device);
            let grads = model.forward(x).sum().backward();
            let grads = GradientsParams::from_grads(grads, &model);
            model = optimizer.step(1e-9, model, grads);
        }
        if ddp.is_main() {
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            println!(
                "ranks={} transport={} view={} gradients={:.0} MiB peak={:.0} MiB",
                ddp.world_size(),
                ddp.group().transport(),
                arguments.view,
                mib(gradients),
                memory::peak().map_or(f64::NAN, mib)
            );
        }
        ddp.barrier()
    })
}
