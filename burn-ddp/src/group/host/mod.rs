//! The host group: processes that meet over TCP and exchange data through shared memory or TCP.
//!
//! ```text
//!                         rank 0                         every other rank
//!  rendezvous   listens on MASTER_ADDR:MASTER_PORT  <──  calls, proves the secret, says hello
//!               draws the job's number, answers     ──>  knows all peers
//!  liveness     control thread  <═══ one connection each, kept ═══>  control thread
//!               heartbeats, failures, goodbyes, small exchanges
//!  data         shared memory on each machine, TCP between them
//! ```
//!
//! # Rendezvous
//!
//! [`Rendezvous`] says who a process is: by arguments, or by the variables of its launcher. Nothing a
//! caller sends is parsed before it has proved that it knows the job's [`Secret`]; without an explicit one that is
//! the user's key on this machine, so that other users cannot join. Settings that contradict each other fail on all
//! ranks at once with both values; callers that do not belong to the job are rejected and disturb nobody.
//!
//! # Transports
//!
//! - Shared memory where all ranks run on one Linux machine.
//! - Over several machines shared memory on each, and between them parallel rings of TCP connections, as many as the
//!   machine with the fewest ranks has ranks.
//! - TCP alone where ranks of one machine cannot share a segment, with one warning that says why: a connection between
//!   any two ranks, or one ring if there are more than eight.
//!
//! All ranks get the same bits in each, and shared memory gives the same as TCP among up to eight. Over rings the
//! ranks are added in another order.
//!
//! # Liveness
//!
//! Every wait has a deadline and looks at the control plane meanwhile. A connection that closes without a
//! goodbye, or a silence longer than [`Heartbeat::limit`], is the loss of that rank, which rank 0
//! tells to all; so is the first failure of any rank. A rank that drops its group in good order is no failure
//! until another rank needs it.

mod acceptor;
mod auth;
mod backend;
pub(crate) mod control;
mod control_tcp;
mod data_connection;
mod deadline;
mod env;
mod family;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
#[cfg(target_os = "linux")]
mod hierarchical;
mod interface;
mod machine;
mod operation;
mod poll;
mod rejection_log;
mod rendezvous;
mod rendezvous_error;
mod secret;
mod settings;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
mod slurm;
mod spans;
mod tcp;
mod wire;

#[cfg(feature = "mpi")]
pub(crate) use env::operation_timeout;
pub use env::{
    GENERATION, LISTEN_FD, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, NSOCKS, RANK,
    RENDEZVOUS_TIMEOUT, SECRET, SOCKET_IFNAME, TIMEOUT, TRANSPORT, WORLD_SIZE,
};
pub(crate) use env::{check_variables, started};
pub use rendezvous_error::RendezvousError;
pub use secret::{KeyFileError, Secret, ShortSecret};
pub use settings::{Heartbeat, Overrides, Rendezvous, SettingsError, Transport};

use super::{
    GroupBuffer, GroupError, ProcessGroup, Result,
    engine::{Engine, Payload},
    local::LocalGroup,
    ops::{Call, Identity},
};
use backend::{Backend, choose, through_tcp};
use control::Control;
use control_tcp::{Membership, TcpControl};
use poll::Waker;
use rendezvous::Peer;
use std::{net::IpAddr, sync::Arc};
use tcp::Context;

/// The default [`ProcessGroup`]: ranks are processes, nothing needs to be installed.
///
/// Dropping the last handle of the job's groups says goodbye to the peers; no explicit shutdown is needed. A
/// rank that is dropped by a panic is lost to the others instead.
#[derive(Debug)]
pub struct HostGroup {
    backend: Backend,
    job: Arc<Job>,
}

/// What the groups of a job have in common.
#[derive(Debug)]
struct Job {
    number: u64,
    generation: u32,
    local_rank: usize,
    local_world_size: usize,
    /// For TCP groups. A job of one process has none.
    context: Option<Arc<Context>>,
}

impl HostGroup {
    /// Joins the job that `settings` describe. All ranks must call it; blocks until they have, or until the
    /// rendezvous time-out.
    ///
    /// # Errors
    ///
    /// See [`RendezvousError`]. What is wrong on one rank is reported on all ranks that have come.
    pub fn connect(mut settings: Rendezvous) -> Result<Self, RendezvousError> {
        if settings.world_size() == 1 {
            return Ok(Self::alone(&settings));
        }
        let rank = settings.rank();
        let io = |operation| {
            move |cause| RendezvousError::Io {
                rank,
                operation,
                cause,
            }
        };
        let waker = Arc::new(Waker::new().map_err(io("making a wake-up pipe"))?);
        let joined = if rank == 0 {
            rendezvous::serve(&mut settings, &waker)?
        } else {
            rendezvous::join(&settings)?
        };
        let (local_rank, local_world_size) = places(&settings, &joined.peers);
        let machines: Vec<String> = joined.peers.iter().map(|p| p.machine.clone()).collect();
        let machines: Vec<&str> = machines.iter().map(String::as_str).collect();
        let member = Membership {
            rank,
            world_size: settings.world_size(),
            job: joined.job,
            generation: settings.generation,
            operation_timeout: settings.operation_timeout,
            heartbeat: settings.heartbeat,
        };
        let secret = joined.secret.clone();
        let control =
            TcpControl::start(member, joined, waker).map_err(io("starting the control thread"))?;
        let local = data_address(&settings, &control)?;
        let control: Arc<dyn Control> = Arc::new(control);
        let context =
            Arc::new(Context::new(control.clone(), secret, local).sockets(settings.sockets));
        let backend = choose(&settings, &machines, &control, &context).inspect_err(|error| {
            if let RendezvousError::Group(error) = error {
                control.fail(error.clone());
            }
        })?;
        let job = Job {
            number: member.job,
            generation: member.generation,
            local_rank,
            local_world_size,
            context: Some(context),
        };
        let group = Self {
            backend,
            job: Arc::new(job),
        };
        tracing::info!(
            "rank {rank} of {} (local rank {local_rank} of {local_world_size}) is connected by {}",
            settings.world_size(),
            group.transport()
        );
        Ok(group)
    }

    fn alone(settings: &Rendezvous) -> Self {
        let job = Job {
            number: 0,
            generation: settings.generation,
            local_rank: 0,
            local_world_size: 1,
            context: None,
        };
        Self {
            backend: Backend::Local(LocalGroup::new(settings.generation)),
            job: Arc::new(job),
        }
    }

    /// This process's place among those of its machine.
    pub fn local_rank(&self) -> usize {
        self.job.local_rank
    }

    /// Number of the job's processes on this machine.
    pub fn local_world_size(&self) -> usize {
        self.job.local_world_size
    }

    /// Random number of the job, the same on all ranks; 0 in a job of one process.
    pub fn job(&self) -> u64 {
        self.job.number
    }

    /// How often the launcher has restarted the job.
    pub fn generation(&self) -> u32 {
        self.job.generation
    }

    #[cfg(target_os = "linux")]
    fn warn(&self, reason: &shm::NoSharedMemory) {
        if self.rank() == 0 {
            tracing::warn!(
                "no shared memory for another group, all its data goes through TCP: {reason}"
            );
        }
    }

    fn engine(&self) -> &dyn Engine {
        self.backend.engine()
    }
}

/// Where this process takes data connections. An error is the job's failure.
fn data_address(settings: &Rendezvous, control: &TcpControl) -> Result<IpAddr> {
    let reaches_rank_0 = control.local_address();
    let Some(choice) = &settings.interface else {
        return Ok(reaches_rank_0);
    };
    let interfaces = interface::interfaces().map_err(|error| error.to_string());
    let chosen = interfaces.and_then(|all| choice.choose(&all, reaches_rank_0));
    chosen.map_err(|cause| {
        let error = GroupError::Transport {
            rank: settings.rank,
            operation: format!("choosing a network interface by {SOCKET_IFNAME}"),
            cause,
        };
        control.fail(error.clone());
        error
    })
}

/// The launcher's word, or the order of the ranks on each machine.
fn places(settings: &Rendezvous, peers: &[Peer]) -> (usize, usize) {
    let here = |peer: &&Peer| peer.machine == peers[settings.rank].machine;
    let counted = peers[..settings.rank].iter().filter(here).count();
    let size = peers.iter().filter(here).count();
    (
        settings.local_rank.unwrap_or(counted),
        settings.local_world_size.unwrap_or(size),
    )
}

impl Engine for HostGroup {
    fn identity(&self) -> &Identity {
        self.engine().identity()
    }

    fn label(&self) -> &'static str {
        self.engine().label()
    }

    fn run(&self, call: Call, payload: Payload<'_>) -> Result<()> {
        self.engine().run(call, payload)
    }

    fn make_buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        self.engine().make_buffer(bytes)
    }

    fn make_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let backend = match (&self.backend, &self.job.context) {
            #[cfg(target_os = "linux")]
            (Backend::Shm(parent), Some(context)) => match parent.child()? {
                (_, Ok(child)) => Backend::Shm(child),
                (number, Err(reason)) => {
                    self.warn(&reason);
                    through_tcp(context, number)?
                }
            },
            #[cfg(target_os = "linux")]
            (Backend::Hierarchical(parent), Some(context)) => match parent.child()? {
                (_, Ok(child)) => Backend::Hierarchical(child),
                (number, Err(reason)) => {
                    self.warn(&reason);
                    through_tcp(context, number)?
                }
            },
            (Backend::Tcp(parent), _) => Backend::Tcp(parent.child()?),
            _ => return self.engine().make_group(),
        };
        Ok(Arc::new(Self {
            backend,
            job: self.job.clone(),
        }))
    }

    fn fail(&self, error: GroupError) {
        self.engine().fail(error);
    }

    fn first_failure(&self) -> Option<GroupError> {
        self.engine().first_failure()
    }
}

#[cfg(test)]
mod tests;
