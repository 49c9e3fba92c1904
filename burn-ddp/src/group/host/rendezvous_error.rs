//! Why the processes of a job did not find together.

use super::{secret::KeyFileError, settings::SettingsError};
use crate::group::GroupError;
use std::{io, time::Duration};

/// Why [`HostGroup::connect`](super::HostGroup::connect) failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// The arguments or the environment are wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Without an explicit secret, and without a usable key file.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// An address that other machines can reach, without a secret that they can have.
    #[error(
        "rank {rank}: MASTER_ADDR {master} is {address}, which other machines can reach, and there is no \
         secret to keep others out. Set BURN_DDP_SECRET to the same random text in all processes, \
         or use 127.0.0.1 when all ranks run on one machine"
    )]
    SecretRequired {
        /// The rank that reports.
        rank: usize,
        /// As given.
        master: String,
        /// What it means.
        address: String,
    },
    /// Rank 0's own address has meant nothing for the whole time of the rendezvous.
    #[error(
        "rank {rank}: cannot resolve MASTER_ADDR {master:?}, tried for {elapsed:.1?}: {cause}. Check the name; where names appear late, \
         BURN_DDP_RENDEZVOUS_TIMEOUT (seconds) allows more time"
    )]
    Resolve {
        /// The rank that reports.
        rank: usize,
        /// As given.
        master: String,
        /// How long it tried.
        elapsed: Duration,
        /// The resolver's words in the last try.
        cause: String,
    },
    /// Another program, or another job, has the port.
    #[error(
        "rank 0 cannot listen on {address}: port {port} is in use{owner}. Choose another MASTER_PORT, \
         or let burn-ddp's launcher pick one"
    )]
    PortTaken {
        /// Where it tried to listen.
        address: String,
        /// The port alone.
        port: u16,
        /// ` by process 123 (name)` where that can be seen, or nothing.
        owner: String,
    },
    /// Rank 0 cannot listen where it should.
    #[error(
        "rank 0 cannot listen on MASTER_ADDR {master}: {cause}. It must be an address of the machine that rank 0 runs on"
    )]
    Listen {
        /// As given.
        master: String,
        /// One cause for each address.
        cause: String,
    },
    /// The socket that a launcher handed over is not one.
    #[error("BURN_DDP_LISTEN_FD {fd} is not usable: {cause}")]
    InheritedListener {
        /// The descriptor's number.
        fd: i32,
        /// Why.
        cause: String,
    },
    /// Rank 0 and this process have different secrets.
    #[error(
        "rank 0 at {address} refused this process (rank {rank}): another secret. All processes of a job need the \
         same BURN_DDP_SECRET, and without it the same user and machine; or another job has this address"
    )]
    WrongSecret {
        /// The rank that reports.
        rank: usize,
        /// Where rank 0 is.
        address: String,
    },
    /// Something listens at rank 0's address that is not rank 0.
    #[error(
        "rank {rank}: what listens on {address} is not rank 0 of a burn-ddp job: {cause}. Another program may \
         have the port: choose another MASTER_PORT"
    )]
    NotRankZero {
        /// The rank that reports.
        rank: usize,
        /// Where it listens.
        address: String,
        /// What it did.
        cause: String,
    },
    /// Rank 0 looked at this process's settings and said no.
    #[error("rank 0 at {address} refused this process (rank {rank}): {reason}")]
    Refused {
        /// The rank that reports.
        rank: usize,
        /// Where rank 0 is.
        address: String,
        /// Its words.
        reason: String,
    },
    /// This process is left over from before a restart.
    #[error(
        "rank 0 at {address} refused this process (rank {rank}): stale generation {stale}: the job has been restarted and is in generation \
         {generation}"
    )]
    Stale {
        /// The rank that reports.
        rank: usize,
        /// Where rank 0 is.
        address: String,
        /// This process's generation.
        stale: u32,
        /// The job's.
        generation: u32,
    },
    /// Rank 0 waited for ranks that have been restarted meanwhile.
    #[error(
        "rank 0 of generation {stale} gives up: {by} is of generation {generation} already, so the job has been restarted"
    )]
    Superseded {
        /// Rank 0's generation.
        stale: u32,
        /// The job's.
        generation: u32,
        /// Who said so.
        by: String,
    },
    /// The ranks' settings contradict each other; every rank gets the same text.
    #[error("rank {rank}: the processes of this job do not fit together: {reason}")]
    Inconsistent {
        /// The rank that reports.
        rank: usize,
        /// Both values.
        reason: String,
    },
    /// A rank had come and was gone before all had.
    #[error(
        "rank {rank}: lost rank {peer} ({process}) before all ranks had come. Look at the output of rank {peer} for the \
         first error"
    )]
    PeerLost {
        /// The rank that reports.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// Its process and machine, or its address.
        process: String,
    },
    /// Not all ranks came in time.
    #[error(
        "rank {rank}: rendezvous timed out after {elapsed:.1?}: {reason}. Check that every rank was started, that all have rank 0's \
         MASTER_ADDR and MASTER_PORT, and that no firewall is in between; BURN_DDP_RENDEZVOUS_TIMEOUT (seconds) allows more time"
    )]
    Timeout {
        /// The rank that reports.
        rank: usize,
        /// How long it waited.
        elapsed: Duration,
        /// On rank 0 the missing ranks and the callers that were rejected; on others what was tried.
        reason: String,
    },
    /// Shared memory was asked for and is not to be had.
    #[error(
        "rank {rank}: no shared memory: {reason}. Without BURN_DDP_TRANSPORT=shm the ranks use TCP instead"
    )]
    NoSharedMemory {
        /// The rank that reports.
        rank: usize,
        /// Why, the same on all ranks.
        reason: String,
    },
    /// The operating system refused something.
    #[error("rank {rank}: {operation} failed: {cause}")]
    Io {
        /// The rank that reports.
        rank: usize,
        /// What was tried.
        operation: &'static str,
        /// The system's words.
        #[source]
        cause: io::Error,
    },
    /// The ranks found each other, but the first common operation failed.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl RendezvousError {
    /// The generation that the job is in, if this process is not of it.
    pub(crate) fn later_generation(&self) -> Option<u32> {
        match self {
            RendezvousError::Stale { generation, .. }
            | RendezvousError::Superseded { generation, .. } => Some(*generation),
            _ => None,
        }
    }
}
