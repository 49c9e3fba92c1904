//! Ranks that `mpirun` (or `srun --mpi=pmix`) has started, data by the machine's MPI.
//!
//! ```text
//! cargo build --release --features burn-ddp/mpi        # needs mpicc, and libclang for MPI's headers
//! mpirun -n 4 target/release/my-training
//! mpirun -n 64 --hostfile hosts target/release/my-training
//! ```
//!
//! The program stays as it is: [`launch`](crate::launch()) sees that it runs under mpirun and joins through MPI, with rank and
//! world size as MPI has them; no `MASTER_ADDR`, port or secret. What says otherwise goes first: `RANK` and `WORLD_SIZE`
//! (another launcher's variables), and `BURN_DDP_TRANSPORT` with `shm` or `tcp`; with `mpi` it makes sure. As long as one
//! machine is enough, the [`host`](super::host) group is the faster one, and MPI what clusters have for the rest.
//!
//! # What MPI must be
//!
//! Open MPI 4 or MPICH 4, at thread level `SERIALIZED` or above ([`MpiError::ThreadLevel`]): gradients are reduced on a thread
//! of their own while the program's thread may be in a collective of its own; both call MPI by turns. `MULTIPLE` is asked for, so that the
//! program may call MPI beside. A program that has started MPI itself (with the `mpi` crate or in C) keeps it: burn-ddp uses a
//! duplicate of its communicator ([`MpiGroup::from_communicator`]), and leaves `MPI_Finalize` to it.
//!
//! As root or with more ranks than cores Open MPI wants to be told: `--allow-run-as-root`, `--oversubscribe`. In a container that
//! forbids `process_vm_readv`, `--mca btl_vader_single_copy_mechanism none` ends its warnings. mpirun binds processes to cores; for
//! several threads per rank add `--bind-to none` or `--map-by slot:pe=N`.
//!
//! # Values
//!
//! All reductions have the bits that the other groups have on one machine, on any number of machines: MPI's messages carry the data,
//! burn-ddp sums it, in rank order. `MPI_Allreduce` is not used, whose order of summation, and with it the last bits, depends on the library, the size, and
//! the number of ranks; it knows no 16-bit floats either, and cannot be given up when a peer hangs.
//!
//! # Cost of checking
//!
//! Before the data, all ranks compare what they are about to do: 64 bytes in ceil(log2 n) messages per rank, in which data of a
//! few KiB travels along. Mismatches are errors on all ranks, with both sides.
//!
//! # Failures
//!
//! Every wait of an operation ends with the operation time-out (`BURN_DDP_TIMEOUT`, ten minutes), and at once when a rank fails, aborts,
//! panics or leaves: an error that names it. Only MPI's own start (`MPI_Init`, `MPI_Comm_dup`, in [`MpiGroup::connect`]) and end
//! (`MPI_Finalize`, when the process exits) wait as long as MPI does.
//!
//! Errors of our communicator are returned, not fatal (`MPI_ERRORS_RETURN`). But MPI has the last word: when a process
//! dies, mpirun kills the others and prints which one it was. It does so as well when one exits in good order; so ranks whose job has failed wait
//! at their exit, three seconds at most, for all to have returned their errors. After a failure no rank calls `MPI_Finalize`, which would wait for
//! peers that never come; mpirun reports that, too, below the error that counts.

mod all_reduce;
mod collectives;
mod control;
mod env;
mod error;
mod exchange;
mod library;
mod member;
mod message;
mod request;
mod stages;
#[cfg(test)]
mod tests;

pub use error::MpiError;

pub(crate) use env::{chosen, join};

use super::{GroupError, host::Rendezvous};
use collectives::Tuning;
use control::Control;
use member::Member;
use mpi::topology::{Communicator, SimpleCommunicator};
use request::Comm;
use stages::Place;
use std::{
    sync::{Arc, atomic::AtomicU32},
    time::Duration,
};

/// A group whose ranks are MPI processes. Cloning gives another handle of the same rank.
///
/// Dropping the last handle tells the peers that this rank has left; MPI ends when the process exits.
#[derive(Clone, Debug)]
pub struct MpiGroup(Arc<Member>);

/// How an [`MpiGroup`] works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MpiOptions {
    /// How long one operation may take; `None` for ten minutes.
    pub operation_timeout: Option<Duration>,
    /// Largest message in bytes, the same on all ranks; `None` for what suits their number. Longer data is split.
    pub message_bytes: Option<usize>,
}

/// What all groups of a job have in common.
#[derive(Debug)]
struct Job {
    control: Arc<Control>,
    number: u64,
    local_rank: usize,
    local_world_size: usize,
    timeout: Duration,
    tuning: Tuning,
    place: Place,
    /// Rank 0's count of groups, which numbers them.
    groups: AtomicU32,
}

impl MpiGroup {
    /// Joins the job of all processes that mpirun has started. All of them must call it; blocks until they have.
    ///
    /// # Errors
    ///
    /// [`MpiError`].
    pub fn connect(options: MpiOptions) -> Result<Self, MpiError> {
        library::start()?;
        Self::from_communicator(&SimpleCommunicator::world(), options)
    }

    /// Joins the job of the processes of `communicator`, of a program that has started MPI itself. All of them must call it; blocks
    /// until they have. The program must not end MPI before the last group of the job is dropped.
    ///
    /// # Errors
    ///
    /// [`MpiError`].
    pub fn from_communicator(
        communicator: &impl Communicator,
        options: MpiOptions,
    ) -> Result<Self, MpiError> {
        library::start()?;
        let mpi = library::enter().ok_or(MpiError::Finalized)?;
        let machines = Comm::machines(&mpi, communicator);
        drop(mpi);
        Self::over(communicator, options, &machines)
    }

    /// `machines` names each rank's machine.
    fn over(
        communicator: &impl Communicator,
        options: MpiOptions,
        machines: &[usize],
    ) -> Result<Self, MpiError> {
        let mpi = library::enter().ok_or(MpiError::Finalized)?;
        let comm = Comm::duplicate(&mpi, communicator)?;
        let hosts = Comm::hosts(&mpi, communicator);
        let number = Comm::share(&mpi, communicator, draw()?);
        let (rank, ranks) = (comm.rank, comm.size);
        let here = |other: &&usize| **other == machines[rank];
        let local_rank = machines[..rank].iter().filter(here).count();
        let local_world_size = machines.iter().filter(here).count();
        let mut tuning = Tuning::new(ranks);
        if let Some(message) = options.message_bytes {
            tuning.message = message.clamp(1, collectives::LONGEST_MESSAGE);
        }
        let job = Job {
            control: Control::new(&mpi, comm, hosts)?,
            number,
            local_rank,
            local_world_size,
            timeout: options
                .operation_timeout
                .unwrap_or(Rendezvous::DEFAULT_OPERATION_TIMEOUT),
            tuning,
            place: Place::new(machines, rank),
            groups: AtomicU32::new(1),
        };
        drop(mpi);
        tracing::info!(
            "rank {rank} of {ranks} (local rank {local_rank} of {local_world_size}) is connected by MPI"
        );
        Ok(Self(Member::new(Arc::new(job), 0)))
    }

    /// This process's position among the job's processes on its machine.
    pub fn local_rank(&self) -> usize {
        self.0.job.local_rank
    }

    /// Number of the job's processes on this machine.
    pub fn local_world_size(&self) -> usize {
        self.0.job.local_world_size
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.control.end();
    }
}

fn draw() -> Result<u64, GroupError> {
    let mut number = [0; 8];
    getrandom::fill(&mut number).map_err(|cause| GroupError::Transport {
        rank: 0,
        operation: "drawing the job's number".into(),
        cause: cause.to_string(),
    })?;
    Ok(u64::from_ne_bytes(number))
}
