//! `zero-cost --ranks 4 --width 1024 --depth 8 --batch 64 --json`: what dividing Adam's state over the ranks costs and saves.

use burn_ddp::{Error, Launcher};
use burn_ddp_benches::zero_cost::{ZeroSizes, measure};
use clap::Parser;

/// Measures a training step with Adam against one with its state divided over the ranks.
#[derive(Parser)]
struct Arguments {
    /// Number of processes.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Features of each layer.
    #[arg(long, default_value_t = 1024)]
    width: usize,
    /// Number of layers.
    #[arg(long, default_value_t = 8)]
    depth: usize,
    /// Rows per rank and step.
    #[arg(long, default_value_t = 64)]
    batch: usize,
    /// Steps timed of each kind.
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Divides parameters, not whole ones between ranks.
    #[arg(long)]
    split: bool,
    /// One JSON object.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<(), Error> {
    let arguments = Arguments::parse();
    let sizes = ZeroSizes {
        width: arguments.width,
        depth: arguments.depth,
        batch: arguments.batch,
        steps: arguments.steps,
        split: arguments.split,
    };
    Launcher::new().nproc(arguments.ranks).run(|ddp| {
        let cost = measure(&ddp, sizes)?;
        if ddp.is_main() {
            match serde_json::to_string(&cost) {
                Ok(line) if arguments.json => println!("{line}"),
                _ => println!(
                    "ranks={} params={} batch={} plain_ms={:.1} ({:.1} in the optimizer) zero_ms={:.1} ({:.1}) zero_cost={:.1}% state={:.1}%",
                    cost.ranks,
                    cost.params,
                    sizes.batch,
                    cost.plain_ms,
                    cost.plain_optimizer_ms,
                    cost.zero_ms,
                    cost.zero_optimizer_ms,
                    cost.zero_cost * 100.0,
                    cost.state.held as f64 / cost.state.whole as f64 * 100.0
                ),
            }
        }
        ddp.barrier()
    })
}
