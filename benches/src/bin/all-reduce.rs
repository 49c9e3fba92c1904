//! `all-reduce --ranks 2 --bytes 4096,26214400 --buffer group --json`: the time of an f32 all-reduce
//! between processes of this machine, one line a size. Under mpirun, between its processes.

use burn_ddp::{
    Ddp,
    group::GroupError,
    launch::{LaunchError, Launcher},
};
use burn_ddp_benches::all_reduce::{Buffer, measure};
use clap::Parser;
use std::{
    io::{self, Write},
    process::ExitCode,
};

/// Measures the all-reduce of burn-ddp's host group; under mpirun, built with `--features burn-ddp/mpi`, of its MPI group.
#[derive(Parser)]
struct Arguments {
    /// Number of processes.
    #[arg(long, default_value_t = 2, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    ranks: usize,
    /// Sizes in bytes, multiples of 4.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4096,65536,1048576,26214400,104857600"
    )]
    bytes: Vec<usize>,
    /// Whose memory is reduced: the group's own, where buckets live, or any.
    #[arg(long, value_enum, default_value_t = Buffer::Group)]
    buffer: Buffer,
    /// One JSON object a size.
    #[arg(long)]
    json: bool,
}

/// One line of the output.
#[derive(serde::Serialize)]
struct Line {
    ranks: usize,
    bytes: usize,
    buffer: Buffer,
    median_us: f64,
    algbw_gbps: f64,
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Join(#[from] burn_ddp::Error),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error("writing the result: {0}")]
    Output(#[from] io::Error),
    #[error("writing the result: {0}")]
    Json(#[from] serde_json::Error),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let launcher = Launcher::new().nproc(arguments.ranks);
    match launcher.run_local(|| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let ddp = Ddp::from_env()?;
    let group = ddp.group();
    for &bytes in &arguments.bytes {
        let seconds = measure(&**group, bytes, arguments.buffer)?.as_secs_f64();
        if group.rank() != 0 {
            continue;
        }
        let line = Line {
            ranks: group.world_size(),
            bytes,
            buffer: arguments.buffer,
            median_us: seconds * 1e6,
            algbw_gbps: bytes as f64 / seconds / 1e9,
        };
        let mut out = io::stdout().lock();
        if arguments.json {
            writeln!(out, "{}", serde_json::to_string(&line)?)?;
        } else {
            writeln!(
                out,
                "burn-ddp {} ranks={} bytes={} median_us={:.1} algbw_GBps={:.3}",
                group.transport(),
                line.ranks,
                line.bytes,
                line.median_us,
                line.algbw_gbps
            )?;
        }
    }
    // Nobody leaves while another still measures.
    Ok(group.barrier()?)
}
