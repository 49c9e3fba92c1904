//! Starting the ranks of one machine from the program itself.
//!
//! [`launch()`] (or [`Launcher::run`], which takes options) is called once, early in `main`, by a program that may be three things:
//!
//! - **the launcher**, if nobody has started it as a rank: it starts `nproc` copies of its own executable with the
//!   same arguments and waits for them;
//! - **a rank** of such a launcher: it runs the training function;
//! - **a rank of another launcher** (the `burn-ddp` command, torchrun, Kubeflow, mpirun, srun have set their variables): it runs the training function at once, and
//!   nothing here interferes.
//!
//! # What a rank is given
//!
//! `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` as torchrun gives them; the
//! job's secret and, on rank 0, the rendezvous socket ([`SECRET`], [`LISTEN_FD`]); and, unless
//! the user has set them, its share of the cores in [`THREAD_VARIABLES`].
//!
//! # Output
//!
//! Rank 0 has the launcher's own stdout and stderr. Each line of another rank gets `[rank N] ` in front.
//!
//! # Endings
//!
//! When a rank fails, the others have the grace period to notice and end by themselves, then they get SIGTERM and,
//! after the grace period again, SIGKILL. The failure that is reported is the first in time that is no
//! consequence of another one. SIGINT, SIGTERM and SIGHUP to the launcher are passed on, with SIGKILL after the
//! grace period or at the second signal. Each rank is the leader of a process group, and all of the group is killed
//! when the rank ends. If the launcher itself is killed, each rank kills its own group.
//!
//! # Errors and exit codes
//!
//! A training function's error ends the job on all ranks, is printed once, in the launching process's report, and decides
//! that process's exit code: the first failing rank's own (1 for an error, 101 for a panic, whatever it passed to
//! `std::process::exit`), or 128 + the number of the signal that ended the rank, or that told the launcher to stop. To see to
//! all that, [`launch()`] and [`Launcher::run`] end a process in which there is nothing left to do; [`Launcher::try_run`] returns instead.

mod blame;
mod child;
#[cfg(all(unix, feature = "cli"))]
#[doc(hidden)]
pub mod cli;
mod env;
mod error;
#[cfg(unix)]
#[cfg_attr(
    not(feature = "cli"),
    allow(dead_code, reason = "only the command starts one")
)]
mod guard;
mod member;
mod output;
mod plan;
mod process;
mod report;
mod run;
#[cfg(unix)]
mod signals;
mod spawn;
mod supervise;

pub use env::{
    GENERATION, LAUNCHER_PID, LISTEN_FD, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT,
    MAX_RANKS, NPROC, RANK, SECRET, THREAD_VARIABLES, WORLD_SIZE,
};
pub use error::{FailureReport, LaunchError, Outcome, RankFailure};
pub use run::launch;

use crate::group::host::check_variables;
use blame::Blame;
use child::{Classify, Ended};
use env::Role;
use plan::Plan;
use std::{
    any::Any,
    fmt::Display,
    sync::{Arc, mpsc::channel},
    time::Duration,
};

/// How to start the ranks of this machine. `E` is the error of the training function.
#[derive(Debug)]
#[must_use]
pub struct Launcher<E> {
    nproc: Option<usize>,
    grace: Duration,
    is_secondary: fn(&E) -> bool,
    panic_payload: fn(&(dyn Any + Send)) -> Option<(String, bool)>,
}

impl<E> Default for Launcher<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> Launcher<E> {
    /// `nproc` from `BURN_DDP_NPROC`, else 1; a grace period of 5 seconds.
    pub fn new() -> Self {
        Self {
            nproc: None,
            grace: Duration::from_secs(5),
            is_secondary: |_| false,
            panic_payload: |_| None,
        }
    }

    /// Number of ranks to start. Beats `BURN_DDP_NPROC`. With 1 the training function runs in this process. More than
    /// 64 on a machine with less than 4 cores, or 16 per core, are refused unless `BURN_DDP_MAX_RANKS` allows them.
    pub fn nproc(mut self, nproc: usize) -> Self {
        self.nproc = Some(nproc);
        self
    }

    /// How long ranks may take to end by themselves after another rank's failure, and again after a signal
    /// that asks them to.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Tells errors that are the consequence of another rank's failure (a lost peer, an abort) from a rank's
    /// own. They are not reported as the cause while there is another.
    pub fn secondary(mut self, is_secondary: fn(&E) -> bool) -> Self {
        self.is_secondary = is_secondary;
        self
    }

    /// Reads panic payloads that are no text: what to report, and whether it is the consequence of another rank's
    /// failure. Called from the panic hook, so it must not panic.
    pub fn panic_payload(mut self, read: fn(&(dyn Any + Send)) -> Option<(String, bool)>) -> Self {
        self.panic_payload = read;
        self
    }

    /// Runs `body` on each rank, without a [`Ddp`](crate::Ddp).
    ///
    /// In a rank it returns what `body` returns; in the launcher it blocks until all ranks have ended. So what comes
    /// after it in `main` runs `nproc + 1` times. Call it from a thread that lives as long as it runs.
    ///
    /// # Errors
    ///
    /// `body`'s own in a rank. In the launcher a [`LaunchError`]: its `Display` is the whole
    /// report, [`LaunchError::exit_code`] what the process should exit with.
    pub fn run_local(self, body: impl FnOnce() -> Result<(), E>) -> Result<(), E>
    where
        E: Display + From<LaunchError>,
    {
        let (is_secondary, payload) = (self.is_secondary, self.panic_payload);
        let classify = Classify {
            error: &|error| Blame::secondary(is_secondary(error)),
            panic: Arc::new(move |panic| {
                payload(panic).map(|(text, secondary)| (text, Blame::secondary(secondary)))
            }),
        };
        self.place(&classify, body)?.result()
    }

    /// Does what this process is for.
    fn place<F: Display>(
        &self,
        classify: &Classify<'_, F>,
        body: impl FnOnce() -> Result<(), F>,
    ) -> Result<Ended<F>, LaunchError> {
        match env::role() {
            Role::Rank => Ok(child::run(classify, body)),
            Role::Foreign => {
                env::check_foreign(self.nproc);
                Ok(Ended::unreported(body()))
            }
            Role::Launcher => match env::nproc(self.nproc)? {
                1 => Ok(Ended::unreported(body())),
                nproc => start(nproc, self.grace).map(|()| Ended::Well),
            },
        }
    }
}

/// Tells the launcher of a panic that passes no hook, if this thread runs the training function of one of its ranks; whether it now knows.
pub(crate) fn tell_panic(payload: &(dyn std::any::Any + Send)) -> bool {
    child::tell(payload)
}

/// Whether this process is a rank of one of this crate's launchers, which prints a report.
pub(crate) fn is_launched() -> bool {
    env::role() == Role::Rank
}

fn start(nproc: usize, grace: Duration) -> Result<(), LaunchError> {
    // A mistake in what all ranks read is reported once.
    check_variables()?;
    let (sender, events) = channel();
    // Before the first rank exists, so that no signal and no ending is missed.
    #[cfg(unix)]
    let _signals = signals::Watch::new(sender.clone()).map_err(spawn::setup("signal handlers"))?;
    // Holds the write end of the ranks' lifeline until all have ended.
    let job = spawn::Job::new(Plan::of_this_program(nproc)?, sender)?;
    let ranks = job.start()?;
    supervise::Supervisor::new(ranks, nproc, grace).run(&events)
}
