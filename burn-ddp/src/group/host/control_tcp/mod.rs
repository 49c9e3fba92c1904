//! The control plane over TCP: a star with rank 0 in the middle.
//!
//! One thread per process ([`monitor`]) serves all its connections; callers talk to it through
//! [`state::Shared`] and never touch a socket, so nothing here blocks on a peer.
//!
//! - **Liveness.** Every process sends a heartbeat. A connection that closes without a [`Frame::Bye`], or a
//!   silence longer than the limit, is the loss of the peer; rank 0 tells everyone.
//! - **Failure.** The first failure wins. It goes to rank 0 and from there to all.
//! - **Report.** After a failure every rank sends rank 0 its last operations, and rank 0 logs them side by side.
//! - **Leaving.** A rank that drops its group says goodbye and closes. That is no failure, until another
//!   rank needs the one that left. When rank 0 leaves, the others go on without control connections: every
//!   operation needs rank 0, so the next one reports that rank 0 has left, and only an orderly end remains.

mod frame;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod monitor;
mod report;
mod state;

use super::{
    control::{Control, REPORT_LIMIT},
    poll::Waker,
    rendezvous::{Joined, LateAcceptor},
    settings::Heartbeat,
};
use crate::group::{GroupError, Result, recorder::Recorder};
use frame::{EXCHANGE_LIMIT, Failure};
use monitor::Monitor;
use state::Shared;
use std::{
    io,
    net::{IpAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// How long the first report of a failure may take its caller: normally microseconds, and this only if the
/// control thread does not get to run.
const ANNOUNCEMENT: Duration = Duration::from_millis(100);

/// Who is in the job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Membership {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) job: u64,
    pub(super) generation: u32,
    pub(super) operation_timeout: Duration,
    pub(super) heartbeat: Heartbeat,
}

/// [`Control`] over the connections that rendezvous left behind. Dropping it is the orderly goodbye.
#[derive(Debug)]
pub(super) struct TcpControl {
    shared: Arc<Shared>,
    local: IpAddr,
    /// Counts the job's groups.
    groups: AtomicU32,
    monitor: Option<JoinHandle<()>>,
}

impl TcpControl {
    pub(super) fn start(member: Membership, joined: Joined, waker: Arc<Waker>) -> io::Result<Self> {
        let hosts = joined.peers.into_iter().map(|peer| peer.hostname).collect();
        Self::over(member, hosts, joined.links, joined.acceptor, waker)
    }

    fn over(
        member: Membership,
        hosts: Vec<String>,
        links: Vec<(usize, TcpStream)>,
        acceptor: Option<LateAcceptor>,
        waker: Arc<Waker>,
    ) -> io::Result<Self> {
        let local = match links.first() {
            Some((_, stream)) => stream.local_addr()?.ip(),
            None => IpAddr::from([127, 0, 0, 1]),
        };
        let shared = Arc::new(Shared::new(member, hosts, waker));
        let monitor = Monitor::new(shared.clone(), links, acceptor)?;
        let monitor = thread::Builder::new()
            .name("burn-ddp-control".into())
            .spawn(move || monitor.run())?;
        Ok(Self {
            shared,
            local,
            groups: AtomicU32::new(0),
            monitor: Some(monitor),
        })
    }

    /// The address by which this process and rank 0 reach each other: the one that data connections use.
    pub(super) fn local_address(&self) -> IpAddr {
        self.local
    }
}

impl Control for TcpControl {
    fn rank(&self) -> usize {
        self.shared.member.rank
    }

    fn world_size(&self) -> usize {
        self.shared.member.world_size
    }

    fn job(&self) -> u64 {
        self.shared.member.job
    }

    fn generation(&self) -> u32 {
        self.shared.member.generation
    }

    fn operation_timeout(&self) -> Duration {
        self.shared.member.operation_timeout
    }

    fn host(&self, rank: usize) -> String {
        self.shared.hosts.get(rank).cloned().unwrap_or_default()
    }

    fn next_group(&self) -> u32 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }

    fn recorder(&self) -> &Recorder {
        &self.shared.recorder
    }

    fn exchange(&self, tag: u64, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        if data.len() > EXCHANGE_LIMIT {
            return Err(GroupError::InvalidArgument {
                rank: self.rank(),
                operation: "control exchange".into(),
                cause: format!(
                    "{} bytes are over the limit of {EXCHANGE_LIMIT}",
                    data.len()
                ),
            });
        }
        self.shared.exchange(tag, data)
    }

    fn check(
        &self,
        missing: &dyn Fn() -> Vec<usize>,
        operation: &dyn Fn() -> String,
    ) -> Result<()> {
        self.shared.check(missing, operation)
    }

    fn fail(&self, error: GroupError) {
        self.shared.fail(Failure::from_error(self.rank(), error));
        self.shared.wait_for_announcement(ANNOUNCEMENT);
    }

    fn await_report(&self) {
        self.shared.wait_for_report(REPORT_LIMIT);
    }
}

impl Drop for TcpControl {
    fn drop(&mut self) {
        if thread::panicking() {
            let cause = "it panicked".into();
            self.shared.fail(Failure::Lost {
                peer: self.rank(),
                cause,
            });
        }
        self.shared.close();
        let Some(monitor) = self.monitor.take() else {
            return;
        };
        // The monitor bounds its own goodbye. Should it be stuck all the same (a stopped machine),
        // it is left behind rather than waited for.
        if self
            .shared
            .wait_for_monitor(REPORT_LIMIT + monitor::GOODBYE + Duration::from_secs(1))
        {
            let _ = monitor.join();
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
