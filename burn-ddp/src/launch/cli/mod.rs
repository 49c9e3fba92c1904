//! The `burn-ddp` command.

mod args;
mod job;

use super::guard;
use args::{Arguments, Command};
use clap::{CommandFactory, Parser, error::ErrorKind};
use std::{io, process};

/// Asks this executable to be a [guard].
const GUARD: &str = "__guard";

/// `main` of the command. Ends the process if ranks have failed, or the command line is wrong.
pub fn main() {
    if std::env::args_os().skip(1).eq([GUARD]) {
        return guard::serve(io::stdin().lock());
    }
    let Command::Run(run) = Arguments::parse().command;
    let job = run.job(&|name| std::env::var(name).ok());
    let job = job.unwrap_or_else(|error| {
        let mut command = Arguments::command();
        command.build();
        let run = command.find_subcommand_mut("run").cloned();
        run.unwrap_or(command)
            .error(ErrorKind::ValueValidation, error)
            .exit()
    });
    if let Err(error) = job.run() {
        error.exit();
    }
    process::exit(0)
}
