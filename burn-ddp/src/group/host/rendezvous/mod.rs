//! How the processes of a job find each other: rank 0 listens, the others call.
//!
//! A caller proves that it knows the secret ([`auth`](super::auth)) and then says [`Hello`]. When all
//! ranks are there, rank 0 draws the job's number and answers everyone with the table of
//! [`Peer`]s; the connections stay, as the job's control connections.
//!
//! Contradictions between authenticated ranks (two with one rank, world sizes or versions that differ) fail the
//! rendezvous on all ranks at once, and so does a rank that had come, is gone and does not come again within seconds. Callers that do not belong here (no secret, an older generation, a
//! port scan) are rejected and change nothing.

mod accept;
mod ending;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod join;
mod listen;
mod port_owner;
mod resolve;
mod serve;
mod verdict;

pub(super) use accept::LateAcceptor;
pub(super) use join::join;
pub(super) use serve::serve;

use super::{machine, rendezvous_error::RendezvousError, secret::Secret, settings::Transport};
use serde::{Deserialize, Serialize};
use std::{fmt, net::TcpStream, time::Duration};

/// Between two rounds over rank 0's addresses: short at first, for ranks that start together.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Between two lines in which a process that waits says for whom, from the second on.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// When it says so first.
fn first_report(limit: Duration) -> Duration {
    Duration::from_secs(10).min(limit / 2)
}

/// How long a rank that had come may be gone: a launcher that restarts single processes needs a moment, and the
/// others should not wait for the rendezvous time-out to learn of a death.
const REJOIN_LIMIT: Duration = Duration::from_secs(2);

/// Bound of a [`Hello`].
const HELLO_LIMIT: usize = 1 << 10;

/// Bound of an [`Answer`], which carries one [`Peer`] for each rank or a text.
fn answer_limit(world_size: usize) -> usize {
    (4 << 10) + world_size.saturating_mul(HELLO_LIMIT)
}

/// What a rank says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Hello {
    world_size: usize,
    generation: u32,
    version: String,
    transport: Transport,
    peer: Peer,
}

/// One process of the job, as all ranks know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Peer {
    pub(super) rank: usize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_world_size: Option<usize>,
    pub(super) pid: u32,
    pub(super) hostname: String,
    /// Equal on two ranks exactly when they run on one machine, as far as they can tell.
    pub(super) machine: String,
}

/// Rank 0's reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Answer {
    Welcome {
        job: u64,
        peers: Vec<Peer>,
    },
    /// This caller does not belong here.
    Refused {
        reason: String,
    },
    /// The job cannot start, on any rank.
    Inconsistent {
        reason: String,
    },
    /// The job cannot start, because this rank had come and is gone.
    Lost {
        peer: Peer,
    },
    /// Not now; the caller may try again.
    Busy {
        reason: String,
    },
    /// Rank 0 has given up waiting.
    TimedOut {
        reason: String,
    },
    /// The job is in a later generation than this caller's.
    Stale {
        generation: u32,
    },
}

/// A job that has found together.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) job: u64,
    /// What the ranks proved to know.
    pub(super) secret: Secret,
    /// In rank order.
    pub(super) peers: Vec<Peer>,
    /// On rank 0 one connection to each other rank; on others the one to rank 0. With the rank at its far end.
    pub(super) links: Vec<(usize, TcpStream)>,
    /// Rank 0 keeps accepting, so that late callers hear why they cannot join.
    pub(super) acceptor: Option<LateAcceptor>,
}

const VERSION: &str = env!("CARGO_PKG_VERSION");

impl Hello {
    fn new(settings: &super::settings::Rendezvous) -> Self {
        Self {
            world_size: settings.world_size.get(),
            generation: settings.generation,
            version: VERSION.to_owned(),
            transport: settings.transport,
            peer: Peer::this(settings),
        }
    }
}

impl Peer {
    pub(super) fn this(settings: &super::settings::Rendezvous) -> Self {
        Self {
            rank: settings.rank,
            local_rank: settings.local_rank,
            local_world_size: settings.local_world_size,
            pid: std::process::id(),
            machine: machine::memory_domain(),
            hostname: machine::hostname(),
        }
    }
}

impl Peer {
    /// Had come and is gone, as `rank` reports it.
    fn lost(&self, rank: usize) -> RendezvousError {
        RendezvousError::PeerLost {
            rank,
            peer: self.rank,
            process: self.to_string(),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on {}", self.pid, self.hostname)
    }
}

#[cfg(test)]
mod tests;
