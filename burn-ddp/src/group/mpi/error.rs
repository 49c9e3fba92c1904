//! Why a process could not join its job through MPI.

use crate::group::GroupError;
use mpi::environment::Threading;

/// Why [`MpiGroup::connect`](super::MpiGroup::connect) failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MpiError {
    /// The library may be called by its main thread only.
    #[error(
        "MPI runs at thread level {provided:?}, but gradients are reduced on a thread of their own: Serialized is the \
         least that works. Start MPI with `mpi::initialize_with_threading(Threading::Multiple)`, or leave its start to \
         burn-ddp; an MPI library that was built without threads cannot be used"
    )]
    ThreadLevel {
        /// What the library grants.
        provided: Threading,
    },
    /// MPI has been ended in this process, and cannot be started twice.
    #[error(
        "MPI has already been finalized in this process, and cannot be started again: join the job once and keep the \
         handle, and let no MPI `Universe` of the program end before"
    )]
    Finalized,
    /// MPI refused a call.
    #[error("{call} failed: {cause}")]
    Call {
        /// The MPI function.
        call: &'static str,
        /// MPI's own words.
        cause: String,
    },
    /// MPI was asked for, but there is no MPI job.
    #[error(
        "BURN_DDP_TRANSPORT is mpi, but MPI knows of this process alone and no mpirun has started it: start the program with \
         `mpirun -n N`, of the MPI that it was built with"
    )]
    NotStarted,
    /// The ranks did not agree on the job.
    #[error(transparent)]
    Group(#[from] GroupError),
}
