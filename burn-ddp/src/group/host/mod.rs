//! The host group: processes that meet over TCP and exchange data through shared memory or TCP.
//!
//! ```text
//!                         rank 0                         every other rank
//!  rendezvous   listens on MASTER_ADDR:MASTER_PORT  <──  calls, proves the secret, says hello
//!               draws the job's number, answers     ──>  knows all peers
//!  liveness     control thread  <═══ one connection each, kept ═══>  control thread
//!               heartbeats, failures, goodbyes, small exchanges
//!  data         shared memory among all, or one TCP connection between any two
//! ```
//!
//! # Rendezvous
//!
//! [`Rendezvous`] says who a process is: by arguments, or by the variables of its launcher. Nothing a
//! caller sends is parsed before it has proved that it knows the job's [`Secret`]; without an explicit one that is
//! the user's key on this machine, so that other users cannot join. Settings that contradict each other fail on all
//! ranks at once with both values; callers that do not belong to the job are turned away and disturb nobody.
//!
//! # Transports
//!
//! Shared memory where all ranks run on one Linux machine and can share a segment, else TCP, with one warning
//! that says why. Both give the same bits.
//!
//! # Liveness
//!
//! Every wait has a deadline and looks at the control plane meanwhile. A connection that closes without a
//! goodbye, or a silence longer than [`Heartbeat::limit`], is the loss of that rank, which rank 0
//! tells to all; so is the first failure of any rank. A rank that drops its group in good order is no failure
//! until another rank needs it.

mod auth;
pub(crate) mod control;
mod control_tcp;
mod door;
mod env;
mod poll;
mod rendezvous;
mod rendezvous_error;
mod secret;
mod settings;
#[cfg(target_os = "linux")]
pub(crate) mod shm;
mod strangers;
mod tcp;
mod wire;

pub use env::{GENERATION, LISTEN_FD, RENDEZVOUS_TIMEOUT, SECRET, TIMEOUT, TRANSPORT};
pub use rendezvous_error::RendezvousError;
pub use secret::{KeyFileError, Secret, ShortSecret};
pub use settings::{Heartbeat, Overrides, Rendezvous, SettingsError, Transport};

use super::{DType, GroupBuffer, ProcessGroup, ReduceOp, Result, local::LocalGroup};
use control::Control;
use control_tcp::{Membership, TcpControl};
use poll::Waker;
use rendezvous::Peer;
use std::sync::Arc;
use tcp::{Context, TcpGroup};

/// The default [`ProcessGroup`]: ranks are processes, nothing needs to be installed.
///
/// Dropping the last handle of the job's groups says goodbye to the peers; no explicit shutdown is needed. A
/// rank that is dropped by a panic is lost to the others instead.
#[derive(Debug)]
pub struct HostGroup {
    backend: Backend,
    job: Arc<Job>,
}

#[derive(Debug)]
enum Backend {
    Local(LocalGroup),
    #[cfg(target_os = "linux")]
    Shm(shm::ShmGroup),
    Tcp(TcpGroup),
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
        let one_machine = joined
            .peers
            .iter()
            .all(|peer| peer.machine == joined.peers[0].machine);
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
        let local = control.local_address();
        let control: Arc<dyn Control> = Arc::new(control);
        let context = Arc::new(Context::new(control.clone(), secret, local));
        let backend = choose(&settings, one_machine, &control, &context).inspect_err(|error| {
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

    fn group(&self) -> &dyn ProcessGroup {
        match &self.backend {
            Backend::Local(group) => group,
            #[cfg(target_os = "linux")]
            Backend::Shm(group) => group,
            Backend::Tcp(group) => group,
        }
    }
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

/// The job's first group. Collective; `one_machine` and the settings' transport are the same on all ranks.
fn choose(
    settings: &Rendezvous,
    one_machine: bool,
    control: &Arc<dyn Control>,
    context: &Arc<Context>,
) -> Result<Backend, RendezvousError> {
    if settings.transport == Transport::Tcp {
        return Ok(Backend::Tcp(TcpGroup::create(context, 0)?));
    }
    let reason = if one_machine {
        match shared_memory(control)? {
            Ok(backend) => return Ok(backend),
            Err(reason) => reason,
        }
    } else {
        "the ranks run on different machines".to_owned()
    };
    if settings.transport == Transport::Shm {
        return Err(RendezvousError::NoSharedMemory {
            rank: settings.rank,
            reason,
        });
    }
    if settings.rank == 0 {
        tracing::warn!("no shared memory, data goes through TCP, which is slower: {reason}");
    }
    Ok(Backend::Tcp(TcpGroup::create(context, 0)?))
}

/// The inner error is the same on all ranks.
#[cfg(target_os = "linux")]
fn shared_memory(control: &Arc<dyn Control>) -> Result<Result<Backend, String>> {
    let options = shm::Options::new(control.world_size());
    let group = shm::ShmGroup::create(control.clone(), 0, options)?;
    Ok(group.map(Backend::Shm).map_err(|reason| reason.to_string()))
}

#[cfg(not(target_os = "linux"))]
fn shared_memory(_: &Arc<dyn Control>) -> Result<Result<Backend, String>> {
    Ok(Err("this system is not Linux".to_owned()))
}

impl ProcessGroup for HostGroup {
    fn rank(&self) -> usize {
        self.group().rank()
    }

    fn world_size(&self) -> usize {
        self.group().world_size()
    }

    fn transport(&self) -> &'static str {
        self.group().transport()
    }

    fn all_reduce(&self, data: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        self.group().all_reduce(data, dtype, op)
    }

    fn broadcast(&self, data: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        self.group().broadcast(data, dtype, root)
    }

    fn all_gather(&self, send: &[u8], recv: &mut [u8], dtype: DType) -> Result<()> {
        self.group().all_gather(send, recv, dtype)
    }

    fn reduce_scatter(
        &self,
        send: &[u8],
        recv: &mut [u8],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        self.group().reduce_scatter(send, recv, dtype, op)
    }

    fn barrier(&self) -> Result<()> {
        self.group().barrier()
    }

    fn buffer(&self, bytes: usize) -> Result<Box<dyn GroupBuffer>> {
        self.group().buffer(bytes)
    }

    fn new_group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let backend = match (&self.backend, &self.job.context) {
            #[cfg(target_os = "linux")]
            (Backend::Shm(parent), Some(context)) => match parent.child()? {
                (_, Ok(child)) => Backend::Shm(child),
                (number, Err(reason)) => {
                    if self.rank() == 0 {
                        tracing::warn!(
                            "no shared memory for another group, its data goes through TCP: {reason}"
                        );
                    }
                    Backend::Tcp(TcpGroup::create(context, number)?)
                }
            },
            (Backend::Tcp(parent), _) => Backend::Tcp(parent.child()?),
            _ => return self.group().new_group(),
        };
        Ok(Arc::new(Self {
            backend,
            job: self.job.clone(),
        }))
    }

    fn abort(&self, reason: &str) {
        self.group().abort(reason);
    }

    fn failure(&self) -> Option<super::GroupError> {
        self.group().failure()
    }
}

#[cfg(test)]
mod tests;
