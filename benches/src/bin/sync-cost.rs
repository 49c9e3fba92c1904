//! `sync-cost --ranks 2 --width 1024 --depth 8 --batch 64 --json`: what gradient synchronisation adds to a training step.

use burn_ddp::{Error, Launcher};
use burn_ddp_benches::{
    sync_cost::{Sizes, measure},
    timeline,
};
use clap::Parser;
use std::path::PathBuf;

/// Measures what gradient synchronisation adds to a training step.
#[derive(Parser)]
struct Arguments {
    /// Number of processes.
    #[arg(long, default_value_t = 2)]
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
    /// Gradient bytes of a bucket.
    #[arg(long, default_value_t = 25 << 20)]
    bucket_bytes: usize,
    /// One JSON object.
    #[arg(long)]
    json: bool,
    /// Draws the last synchronised step of rank 0 as an SVG file.
    #[arg(long)]
    svg: Option<PathBuf>,
}

fn main() -> Result<(), Error> {
    let arguments = Arguments::parse();
    let sizes = Sizes {
        width: arguments.width,
        depth: arguments.depth,
        batch: arguments.batch,
        steps: arguments.steps,
        bucket_bytes: arguments.bucket_bytes,
    };
    Launcher::new().nproc(arguments.ranks).run(|ddp| {
        let (cost, trace) = measure(&ddp, sizes)?;
        if let (true, Some(path), Some(trace)) = (ddp.is_main(), &arguments.svg, trace) {
            let title = format!("{} x Linear {}, batch {}, {} ranks", sizes.depth, sizes.width, sizes.batch, cost.ranks);
            if let Err(error) = std::fs::write(path, timeline::svg(&trace, &title)) {
                eprintln!("cannot write {}: {error}", path.display());
            }
        }
        if ddp.is_main() {
            match serde_json::to_string(&cost) {
                Ok(line) if arguments.json => println!("{line}"),
                _ => println!(
                    "ranks={} params={} batch={} step_ms={:.2} no_sync_ms={:.2} sync_cost={:.1}% overlap={:.0}%",
                    cost.ranks,
                    cost.params,
                    sizes.batch,
                    cost.step_ms,
                    cost.no_sync_ms,
                    cost.sync_cost * 100.0,
                    cost.overlap_ratio * 100.0
                ),
            }
        }
        ddp.barrier()
    })
}
