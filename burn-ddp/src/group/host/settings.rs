//! What a process needs to know to join its job.

use super::{
    interface::InterfaceChoice,
    secret::{Secret, ShortSecret},
};
use serde::{Deserialize, Serialize};
use std::{fmt, net::TcpListener, num::NonZeroUsize, os::fd::RawFd, time::Duration};

/// What is wrong with the arguments or the environment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Part of what says who this process is and where rank 0 is.
    #[error(
        "{} not set, but {}. Set all of them, or start the program with burn-ddp's launcher",
        are(missing),
        are(present)
    )]
    Missing {
        /// The variables that are needed.
        missing: Vec<&'static str>,
        /// Those that make them needed.
        present: Vec<&'static str>,
    },
    /// A variable that holds nothing.
    #[error("{variable} is set but empty")]
    Empty {
        /// Its name.
        variable: &'static str,
    },
    /// A variable that holds something else than it should.
    #[error("{variable} is {value:?}, which is not {expected}")]
    Invalid {
        /// Its name.
        variable: &'static str,
        /// What it holds.
        value: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// A secret that is none.
    #[error("{variable}: {cause}")]
    ShortSecret {
        /// The variable that holds it.
        variable: &'static str,
        /// How short it is, and how to make one.
        #[source]
        cause: ShortSecret,
    },
    /// A rank beyond the number of ranks.
    #[error("{what} is {rank}, but {whole} is {size}: ranks count from 0 to {}", size.saturating_sub(1))]
    RankTooLarge {
        /// Where the rank is from.
        what: &'static str,
        /// The rank.
        rank: usize,
        /// Where the size is from.
        whole: &'static str,
        /// The size.
        size: usize,
    },
}

/// "A is", "A, B and C are".
fn are(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [one] => format!("{one} is"),
        [first @ .., last] => format!("{} and {last} are", first.join(", ")),
    }
}

/// How the ranks' data travels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// Shared memory where all ranks are on one machine that has it, else TCP with a warning.
    #[default]
    Auto,
    /// Shared memory or an error.
    Shm,
    /// TCP.
    Tcp,
}

/// What the program says itself; everything left `None` comes from the environment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// This process's rank in the job.
    pub rank: Option<usize>,
    /// Number of processes in the job.
    pub world_size: Option<usize>,
    /// This process's rank on its machine.
    pub local_rank: Option<usize>,
    /// Number of processes on this machine.
    pub local_world_size: Option<usize>,
    /// Where rank 0 listens: a name or an address.
    pub master_addr: Option<String>,
    /// Where rank 0 listens: the port.
    pub master_port: Option<u16>,
}

/// Everything that a process needs to join its job. See [`HostGroup::connect`](super::HostGroup::connect).
#[derive(Debug)]
pub struct Rendezvous {
    pub(super) rank: usize,
    pub(super) world_size: NonZeroUsize,
    /// `None`: counted at rendezvous, by machine.
    pub(super) local_rank: Option<usize>,
    pub(super) local_world_size: Option<usize>,
    pub(super) master_addr: String,
    pub(super) master_port: u16,
    pub(super) generation: u32,
    /// `None`: the user's key file.
    pub(super) secret: Option<Secret>,
    pub(super) listener: Option<TcpListener>,
    pub(super) listen_fd: Option<RawFd>,
    pub(super) rendezvous_timeout: Duration,
    pub(super) operation_timeout: Duration,
    pub(super) heartbeat: Heartbeat,
    pub(super) transport: Transport,
    /// `None`: the interface by which rank 0 is reached.
    pub(super) interface: Option<InterfaceChoice>,
    pub(super) sockets: NonZeroUsize,
}

/// How a process that hangs or a connection that is cut without a word is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Time between two signs of life.
    pub interval: Duration,
    /// Silence after which a peer counts as lost.
    pub limit: Duration,
}

impl Default for Heartbeat {
    /// Every second; lost after ten.
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(1),
            limit: Duration::from_secs(10),
        }
    }
}

impl Rendezvous {
    /// Five minutes: ranks start with their images and data sets, not all at once.
    pub const DEFAULT_RENDEZVOUS_TIMEOUT: Duration = Duration::from_secs(300);
    /// Ten minutes: a rank may compile kernels or read data that long before a peer calls it hung.
    pub const DEFAULT_OPERATION_TIMEOUT: Duration = Duration::from_secs(600);

    /// The secret that all processes of the job were given. Without one, the user's key file on this
    /// machine is used, which works for a loopback address only.
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// How often the job has been restarted; processes of another generation are refused.
    pub fn generation(mut self, generation: u32) -> Self {
        self.generation = generation;
        self
    }

    /// The socket that rank 0 serves on, already bound and listening. Ignored by other ranks.
    pub fn listener(mut self, listener: TcpListener) -> Self {
        self.listener = Some(listener);
        self
    }

    /// How long all ranks together may take to come.
    pub fn rendezvous_timeout(mut self, limit: Duration) -> Self {
        self.rendezvous_timeout = limit;
        self
    }

    /// How long one operation may take.
    pub fn operation_timeout(mut self, limit: Duration) -> Self {
        self.operation_timeout = limit;
        self
    }

    /// How a silent peer is noticed. Rank 0's settings and the peer's should be the same.
    pub fn heartbeat(mut self, heartbeat: Heartbeat) -> Self {
        self.heartbeat = heartbeat;
        self
    }

    /// How the data travels. All ranks must choose the same.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Connections between two neighbours on a ring between machines, which data goes over in turn (default one). Rank 0's number counts.
    ///
    /// Several help where the network carries less per connection than in all, as clouds' networks do. The ranks of a machine have rings
    /// of their own, and so connections of their own.
    pub fn sockets(mut self, sockets: NonZeroUsize) -> Self {
        self.sockets = sockets;
        self
    }

    /// This process's rank in the job.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of processes in the job.
    pub fn world_size(&self) -> usize {
        self.world_size.get()
    }
}

/// Shown as a user types it.
pub(super) struct Endpoint<'a>(pub(super) &'a str, pub(super) u16);

impl fmt::Display for Endpoint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(host, port) = self;
        if host.contains(':') {
            write!(f, "[{host}]:{port}")
        } else {
            write!(f, "{host}:{port}")
        }
    }
}
