//! Waiting for the ranks, and ending those that are left after a failure or a signal.

use super::{
    LaunchError,
    error::{FailureReport, Outcome, RankFailure},
    member::{End, Member},
    process::{is_stopped, kill, terminate},
    report::{self, Kind, Record},
    spawn::Rank,
};
use std::{
    collections::BTreeMap,
    process::Child,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

/// How long the launcher waits for a process after SIGKILL: one that hangs in a driver may never end.
const KILL_PATIENCE: Duration = Duration::from_secs(10);
/// How long it waits for the last output and reports of processes that have ended. Only a process that left its
/// rank's group can hold a pipe longer.
const DRAIN_PATIENCE: Duration = Duration::from_secs(2);
/// How often it looks at its children. Where SIGCHLD says when to look, only a safeguard.
const SCAN: Duration = Duration::from_millis(if cfg!(unix) { 1000 } else { 50 });

pub(super) enum Event {
    /// A child may have ended.
    #[cfg(unix)]
    ChildChanged,
    /// The launcher got a signal.
    #[cfg(unix)]
    Signal(i32),
    /// A rank says why it is failing.
    Report(usize, Record),
    /// One of the ranks' pipes has ended.
    ReaderDone,
}

/// How far the ending of the ranks has gone.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// All is well.
    Running,
    /// A rank failed: the others notice by themselves, normally, and say why they end.
    Grace(Instant),
    /// They have been asked to end.
    Asked(Instant),
    /// They have been killed.
    Killed(Instant),
}

/// Supervises the ranks of a launch. Ranks that are left when it is dropped are killed.
pub(super) struct Supervisor {
    members: Vec<Member>,
    /// Of the whole job.
    world_size: usize,
    phase: Phase,
    grace: Duration,
    /// The signal that told the launcher to stop.
    signal: Option<i32>,
    readers: usize,
}

impl Supervisor {
    pub(super) fn new(ranks: Vec<Rank>, world_size: usize, grace: Duration) -> Self {
        let readers = ranks.iter().map(|rank| rank.readers).sum();
        let members = ranks.into_iter().map(Member::new).collect();
        Self {
            members,
            world_size,
            phase: Phase::Running,
            grace,
            signal: None,
            readers,
        }
    }

    /// Returns when all ranks have ended.
    pub(super) fn run(mut self, events: &Receiver<Event>) -> Result<(), LaunchError> {
        loop {
            self.reap();
            if self.members.iter().all(|member| member.end.is_some()) {
                break;
            }
            if !self.step() {
                break;
            }
            match events.recv_timeout(self.patience()) {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                // The threads that read from the ranks are gone; the scan goes on.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(self.patience()),
            }
        }
        let deadline = Instant::now() + DRAIN_PATIENCE;
        while self.readers > 0 {
            match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(event) => self.handle(event),
                Err(_) => break,
            }
        }
        self.verdict()
    }

    /// Takes note of processes that have ended, and kills what they leave behind.
    fn reap(&mut self) {
        let stopping = matches!(self.phase, Phase::Asked(_) | Phase::Killed(_));
        for member in self
            .members
            .iter_mut()
            .filter(|member| member.end.is_none())
        {
            if let Some(outcome) = member.rank.reap() {
                // An end of its own choice keeps its code also while the launcher is ending things.
                let outcome = match outcome {
                    Outcome::Signal(_) if stopping && member.failure.is_none() => Outcome::Stopped,
                    other => other,
                };
                member.end = Some(End {
                    outcome,
                    nanos: report::now(),
                });
            }
        }
    }

    /// Moves the phase on where its time has come. `false` once there is nothing left to try.
    fn step(&mut self) -> bool {
        let now = Instant::now();
        match self.phase {
            Phase::Running if self.members.iter().any(Member::has_failed) => {
                self.phase = Phase::Grace(now + self.grace);
            }
            Phase::Grace(until) if now >= until => {
                for member in self.members.iter_mut().filter(|m| m.end.is_none()) {
                    member.stopped = is_stopped(&member.rank.child);
                }
                self.signal_all(terminate);
                self.phase = Phase::Asked(now + self.grace);
            }
            Phase::Asked(until) if now >= until => self.kill_all(),
            Phase::Killed(until) if now >= until => {
                let end = End {
                    outcome: Outcome::Unkillable,
                    nanos: report::now(),
                };
                for member in &mut self.members {
                    member.end.get_or_insert(end);
                }
                return false;
            }
            _ => {}
        }
        true
    }

    fn patience(&self) -> Duration {
        match self.phase {
            Phase::Running => SCAN,
            Phase::Grace(until) | Phase::Asked(until) | Phase::Killed(until) => {
                SCAN.min(until.saturating_duration_since(Instant::now()))
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Report(rank, record) => {
                if let Some(member) = self
                    .members
                    .iter_mut()
                    .find(|member| member.rank.rank == rank)
                {
                    match record.kind {
                        Kind::PanicBegun => member.panic = Some(record),
                        Kind::Panic | Kind::Error => member.failure = Some(record),
                    }
                }
            }
            Event::ReaderDone => self.readers -= 1,
            #[cfg(unix)]
            Event::ChildChanged => {}
            #[cfg(unix)]
            Event::Signal(signal) => {
                if matches!(self.phase, Phase::Running) {
                    self.signal = Some(signal);
                    self.signal_all(|child| super::process::forward(child, signal));
                    self.phase = Phase::Asked(Instant::now() + self.grace);
                } else {
                    // The ranks are being ended already, after a failure or a first signal: no more patience.
                    self.kill_all();
                }
            }
        }
    }

    fn signal_all(&mut self, send: impl Fn(&mut Child)) {
        for member in self
            .members
            .iter_mut()
            .filter(|member| member.end.is_none())
        {
            send(&mut member.rank.child);
        }
    }

    fn kill_all(&mut self) {
        self.signal_all(kill);
        self.phase = Phase::Killed(Instant::now() + KILL_PATIENCE);
    }

    fn verdict(&mut self) -> Result<(), LaunchError> {
        let silent = self.silent();
        let failure = |member: &Member| member.failure(silent.get(&member.rank.rank).copied());
        let mut failures: Vec<(u64, RankFailure)> =
            self.members.iter().filter_map(failure).collect();
        // Consequences come after causes, whatever the clock says: a rank can notice a peer's death before
        // the launcher does.
        failures.sort_by_key(|(nanos, failure)| (failure.rank_in_blame(), *nanos));
        let world_size = self.world_size;
        let mut failures = failures.into_iter().map(|(_, failure)| failure);
        match (self.signal, failures.next()) {
            (Some(signal), _) => Err(LaunchError::Signalled { signal }),
            (None, Some(first)) => Err(LaunchError::Failed(Box::new(FailureReport {
                host: super::env::host(),
                world_size,
                first,
                others: failures.collect(),
                generation: self
                    .members
                    .iter()
                    .filter_map(|member| member.last_word()?.generation)
                    .max(),
            }))),
            (None, None) => Ok(()),
        }
    }

    /// The ranks that others miss, and since when.
    fn silent(&self) -> BTreeMap<usize, u64> {
        let mut silent = BTreeMap::new();
        for record in self.members.iter().filter_map(Member::last_word) {
            for rank in &record.silent {
                let since = silent.entry(*rank).or_insert(record.nanos);
                *since = record.nanos.min(*since);
            }
        }
        silent
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        for member in self
            .members
            .iter_mut()
            .filter(|member| member.end.is_none())
        {
            member.rank.end();
        }
    }
}
