//! The ranks of one machine, started again after failures.
//!
//! # Restarts
//!
//! A failure anywhere ends all ranks everywhere, so every machine's launcher sees it by its own ranks, and starts
//! them again as the next generation. Launchers do not talk to each other. What keeps them together is the rendezvous:
//!
//! - a rank of an older generation than rank 0's is refused; a rank 0 of an older generation than a caller's gives up. Both hand
//!   the newer generation to their launcher, which goes on with that one;
//! - a launcher that has ended (its budget is spent, it was told to stop, it was killed) takes its ranks along. The others' next generation waits
//!   for them until the rendezvous time-out, fails, and spends one more restart. Should the launcher be started again meanwhile, by
//!   hand or by a cluster's software, then its ranks join.
//!
//! So the restarts of a machine never exceed its budget, and ranks of different generations never train together.

use super::{
    super::{
        LaunchError, env,
        error::FailureReport,
        guard::Guard,
        plan::{Master, Plan},
        signals::Watch,
        spawn,
        supervise::{Event, Supervisor},
    },
    GUARD,
};
use crate::{group::host::check_variables, notice};
use std::{
    ffi::OsString,
    path::PathBuf,
    sync::{
        Arc,
        mpsc::{Receiver, channel},
    },
    time::Duration,
};

/// One machine among those of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) rank: usize,
    pub(super) count: usize,
}

#[derive(Debug)]
pub(super) struct Job {
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    pub(super) node: Node,
    /// Ranks on each machine.
    pub(super) nproc: usize,
    /// `None`: here, at a port that the system picks.
    pub(super) master: Option<(String, u16)>,
    /// `None`: one is made.
    pub(super) secret: Option<String>,
    /// The first.
    pub(super) generation: u32,
    pub(super) max_restarts: u32,
    pub(super) log_dir: Option<PathBuf>,
    pub(super) grace: Duration,
}

impl Job {
    /// Returns when the ranks of the last generation have ended.
    pub(super) fn run(mut self) -> Result<(), LaunchError> {
        check_variables()?;
        self.nproc = env::nproc(Some(self.nproc))?;
        self.secret = Some(self.secret.take().map_or_else(env::secret, Ok)?);
        let (sender, mut events) = channel();
        // Before the first rank exists, so that no signal and no ending is missed.
        let watch = Watch::new(sender.clone()).map_err(spawn::setup("signal handlers"))?;
        let guard =
            Guard::start(GUARD).map_err(spawn::setup("the process that guards the ranks"))?;
        let guard = Arc::new(guard);
        let mut job = Some(spawn::Job::new(self.plan(self.generation)?, sender)?);
        let (mut generation, mut restarts) = (self.generation, 0);
        while let Some(current) = job.take() {
            let current = current.guarded(guard.clone());
            let ranks = current.start()?;
            let ended = Supervisor::new(ranks, self.world_size(), self.grace).run(&events);
            let report = match ended {
                Err(LaunchError::Failed(report)) if restarts < self.max_restarts => report,
                ended => return ended,
            };
            restarts += 1;
            generation = next(generation, &report);
            let (sender, next_events) = channel();
            watch.redirect(sender.clone());
            if let Some(signal) = signal(&events) {
                return Err(LaunchError::Signalled { signal });
            }
            events = next_events;
            notice::warn(format_args!(
                "{report}\nburn-ddp: starting the ranks of this machine again: restart {restarts} of {}, generation {generation}",
                self.max_restarts
            ));
            job = Some(spawn::Job::new(self.plan(generation)?, sender)?);
        }
        Ok(())
    }

    fn world_size(&self) -> usize {
        self.nproc * self.node.count
    }

    fn plan(&self, generation: u32) -> Result<Plan, LaunchError> {
        let first = self.nproc * self.node.rank;
        let master = match &self.master {
            Some((addr, port)) => Master::At(addr.clone(), *port),
            None => Master::here()?,
        };
        let secret = self.secret.clone().unwrap_or_default();
        let logs = self.log_dir.as_ref();
        Ok(Plan {
            program: self.program.clone(),
            arguments: self.arguments.clone(),
            ranks: first..first + self.nproc,
            world_size: self.world_size(),
            master,
            variables: vec![
                (env::SECRET, secret),
                (env::GENERATION, generation.to_string()),
                (env::GROUP_RANK, self.node.rank.to_string()),
                (env::GROUP_WORLD_SIZE, self.node.count.to_string()),
            ],
            logs: logs.map(|folder| folder.join(format!("generation-{generation}"))),
        })
    }
}

/// The one that comes next here, or the one in which the others are already.
fn next(generation: u32, report: &FailureReport) -> u32 {
    generation
        .saturating_add(1)
        .max(report.generation.unwrap_or(0))
}

/// One that came after the last rank had ended.
fn signal(events: &Receiver<Event>) -> Option<i32> {
    events.try_iter().find_map(|event| match event {
        Event::Signal(signal) => Some(signal),
        _ => None,
    })
}
