//! The command line.

use super::{
    super::env::{GENERATION, MASTER_ADDR, MASTER_PORT, NPROC, RANK, SECRET, WORLD_SIZE},
    job::{Job, Node},
};
use crate::notice;
use clap::{Args, Parser, Subcommand};
use std::{ffi::OsString, net::IpAddr, path::PathBuf, time::Duration};

/// Starts and supervises the ranks of data-parallel training.
#[derive(Debug, Parser)]
#[command(name = "burn-ddp", version, arg_required_else_help = true)]
pub(super) struct Arguments {
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    Run(Run),
}

/// Starts the ranks of this machine and waits for them.
///
/// Each rank is a copy of PROGRAM that is told who it is by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. When one
/// fails, the others are ended, and the first failure is reported.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  burn-ddp run --nproc 4 target/release/train --epochs 10

  Two machines with four ranks each, the first of them with the address 10.0.0.1:
    export BURN_DDP_SECRET=...    # the same on both, made once by `openssl rand -hex 32`
    burn-ddp run --nnodes 2 --node-rank 0 --nproc 4 --master-addr 10.0.0.1 target/release/train
    burn-ddp run --nnodes 2 --node-rank 1 --nproc 4 --master-addr 10.0.0.1 target/release/train

Exit code: that of the rank that failed first, or 128 + the number of the signal that ended it or this command; 2 for a wrong command line.")]
pub(super) struct Run {
    /// Number of machines.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    nnodes: u32,
    /// Number of this machine, from 0; rank 0 runs on machine 0.
    #[arg(long, value_name = "R")]
    node_rank: Option<u32>,
    /// Number of ranks on each machine, the same on all [default: $BURN_DDP_NPROC, else 1].
    #[arg(long, value_name = "N", alias = "nproc-per-node", value_parser = clap::value_parser!(u32).range(1..))]
    nproc: Option<u32>,
    /// Address or name of machine 0, as all machines can reach it [default: $MASTER_ADDR; not needed on one machine].
    #[arg(long, value_name = "ADDRESS")]
    master_addr: Option<String>,
    /// Port on which rank 0 listens [default: $MASTER_PORT, else 29500; one that is free on one machine].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    master_port: Option<u16>,
    /// How often all ranks are started again after a failure. Give it on every machine.
    #[arg(long, value_name = "K", default_value_t = 0)]
    max_restarts: u32,
    /// Keep each rank's output in FOLDER/generation-G/rank-R.log too.
    #[arg(long, value_name = "FOLDER")]
    log_dir: Option<PathBuf>,
    /// How long ranks may take to end by themselves after a failure, and again after SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    grace: u64,
    /// The program and its arguments.
    #[arg(
        value_name = "PROGRAM",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<OsString>,
}

/// What is wrong with the command line, as far as it takes more than one option to see.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum UsageError {
    #[error("--nnodes {nnodes} needs --{option}: {meaning}")]
    Needed {
        nnodes: u32,
        option: &'static str,
        meaning: &'static str,
    },
    #[error("--node-rank {node_rank} is too large for --nnodes {nnodes}: machines count from 0 to {}", nnodes - 1)]
    NodeRank { node_rank: u32, nnodes: u32 },
    #[error(
        "several machines need a common secret, which keeps strangers out of the job. Make one, for example by `openssl rand -hex 32`, and \
        set BURN_DDP_SECRET to it on all machines"
    )]
    Secret,
    #[error("{variable} is {value:?}, which is not {expected}")]
    Variable {
        variable: &'static str,
        value: String,
        expected: &'static str,
    },
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Run {
    /// The job that is meant, with the environment for what the options leave open.
    pub(super) fn job(self, lookup: Lookup<'_>) -> Result<Job, UsageError> {
        let Self { nnodes, .. } = self;
        let needed = |option, meaning| UsageError::Needed {
            nnodes,
            option,
            meaning,
        };
        let node_rank = match self.node_rank {
            Some(node_rank) if node_rank >= nnodes => {
                return Err(UsageError::NodeRank { node_rank, nnodes });
            }
            Some(node_rank) => node_rank,
            None if nnodes == 1 => 0,
            None => return Err(needed("node-rank", "the number of this machine, from 0")),
        };
        let nproc = match self.nproc {
            Some(nproc) => nproc as usize,
            None => number(lookup, NPROC, "a number of ranks")?.unwrap_or(1),
        };
        let secret = lookup(SECRET);
        let master = if nnodes > 1 {
            let addr = self.master_addr.or_else(|| lookup(MASTER_ADDR));
            let addr = addr.ok_or(needed("master-addr", "the address of machine 0"))?;
            let port = match self.master_port {
                Some(port) => port,
                None => number(lookup, MASTER_PORT, "a port number")?.unwrap_or(29500),
            };
            if secret.is_none() {
                return Err(UsageError::Secret);
            }
            if is_loopback(&addr) {
                notice::warn(format_args!(
                    "--master-addr {addr} means each machine itself: that is right only if all {nnodes} are this one"
                ));
            }
            Some((addr, port))
        } else {
            warn_of_a_job_around(lookup);
            let addr = self.master_addr.unwrap_or("127.0.0.1".to_owned());
            self.master_port.map(|port| (addr, port))
        };
        let mut command = self.command.into_iter();
        Ok(Job {
            program: command.next().unwrap_or_default(),
            arguments: command.collect(),
            node: Node {
                rank: node_rank as usize,
                count: nnodes as usize,
            },
            nproc,
            master,
            secret,
            generation: number(lookup, GENERATION, "a whole number")?.unwrap_or(0),
            max_restarts: self.max_restarts,
            log_dir: self.log_dir,
            grace: Duration::from_secs(self.grace),
        })
    }
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_matches(['[', ']']);
    bare == "localhost" || bare.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// Of one machine, where the variables say that there are more (Kubeflow sets them to the numbers of the pods).
fn warn_of_a_job_around(lookup: Lookup<'_>) {
    if let (Some(rank), Some(size)) = (lookup(RANK), lookup(WORLD_SIZE))
        && size.trim() != "1"
    {
        notice::warn(format_args!(
            "{WORLD_SIZE} is {size} and {RANK} is {rank}, but this starts a job of this machine alone; for a job of all of them add --nnodes {size} \
             --node-rank {rank}"
        ));
    }
}

fn number<T: std::str::FromStr>(
    lookup: Lookup<'_>,
    variable: &'static str,
    expected: &'static str,
) -> Result<Option<T>, UsageError> {
    let Some(value) = lookup(variable) else {
        return Ok(None);
    };
    let parsed = value.trim().parse().ok();
    parsed.map(Some).ok_or(UsageError::Variable {
        variable,
        value,
        expected,
    })
}

#[cfg(test)]
#[path = "args_tests.rs"]
mod tests;
