//! The crate's error type, and how it leaves Burn's `backward`.

use crate::{
    data::DataError,
    group::{
        GroupError,
        host::{RendezvousError, SettingsError},
    },
    launch::{self, LaunchError, is_launched},
    notice::HELP,
    reducer::ReducerError,
    train::{OptimizerError, checkpoint::CheckpointError},
};
use burn::data::dataset::DatasetError;
use burn::tensor::{Gradients, Tensor};
use std::{
    any::Any,
    cell::Cell,
    fmt,
    panic::{self, AssertUnwindSafe},
};

/// Everything that can go wrong in burn-ddp.
///
/// `Debug` prints the sentence of `Display` and where to read on, so that an error returned from `main` is readable.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One communication hook for two models.
    #[error(
        "rank {rank}: this communication hook belongs to another wrapped model: give each model a hook of its own"
    )]
    SharedCommHook {
        /// The rank that reports.
        rank: usize,
    },
    /// The environment or the arguments do not say who this process is.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The ranks did not find together.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The ranks did not find together through MPI.
    #[cfg(feature = "mpi")]
    #[error(transparent)]
    Mpi(#[from] crate::group::mpi::MpiError),
    /// The ranks of this machine could not be started, or one of them failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A data loader could not be built.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A batch could not be loaded.
    #[error("loading a batch: {0}")]
    Dataset(#[from] DatasetError),
    /// A collective outside backward failed.
    #[error(transparent)]
    Group(#[from] GroupError),
    /// A checkpoint could not be saved or loaded.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Gradients could not be averaged.
    #[error(transparent)]
    Reducer(#[from] ReducerError),
    /// Between the averaged gradients and the optimizer's step.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// The ranks built different models.
    #[error(
        "rank {rank}: the models differ at {what}: rank {rank} has {ours}, rank {peer} has {theirs}. Build the same \
         model on every rank before `wrap`"
    )]
    ModelMismatch {
        /// The rank that reports.
        rank: usize,
        /// The rank it differs from.
        peer: usize,
        /// Which part differs.
        what: String,
        /// This rank's side.
        ours: String,
        /// The peer's side.
        theirs: String,
    },
    /// A trainable parameter has another reparameterization in the place of the hook.
    #[error(
        "rank {rank}: `{path}` is trainable and carries a reparameterization of its own (LoRA, or the hook of an earlier \
         `wrap`), so its gradient cannot be taken. Freeze the base of an adapted parameter (`freeze_group`), or \
         `Ddp::unwrap` a model before it is wrapped again"
    )]
    ForeignReparameterization {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// The model has nothing to train.
    #[error(
        "rank {rank}: the model has no trainable parameter: build it on an autodiff device \
         (`device.autodiff()`) and leave at least one parameter unfrozen"
    )]
    NothingToTrain {
        /// The rank that reports.
        rank: usize,
    },
    /// A parameter's element type has no place in a bucket.
    #[error(
        "rank {rank}: `{path}` has element type {dtype}, gradients can be f32, f64, f16 or bf16: cast the parameter or freeze it"
    )]
    UnsupportedType {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// In Burn's words.
        dtype: String,
    },
    /// The model's trainable parameters are on devices of several backends.
    #[error(
        "rank {rank}: `{path}` is on a device of another backend than the trainable parameters before it: Burn's autodiff does not go from one to the other. Put the whole model \
         on devices of one backend before `wrap`"
    )]
    SeveralBackends {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
    },
    /// The same `wrap` failed on another rank.
    #[error("rank {rank}: the model cannot be wrapped because rank {peer} cannot: {cause}")]
    PeerCannotWrap {
        /// The rank that reports.
        rank: usize,
        /// The first rank that could not.
        peer: usize,
        /// That rank's error.
        cause: String,
    },
    /// A tensor could not be read from its device.
    #[error("rank {rank}: cannot read `{path}`: {cause}")]
    Read {
        /// The rank that reports.
        rank: usize,
        /// Module path of the parameter.
        path: String,
        /// The backend's words.
        cause: String,
    },
    /// The replicas are not equal any more.
    #[error(
        "rank {rank}: the replicas differ: the first differing parameter or buffer is `{path}` (rank {peer} differs from \
         rank 0). Something changed it outside the averaged gradients: a step on unreduced gradients, a parameter read \
         around `Param::val()`, or a record loaded on one rank only"
    )]
    ReplicasDiffer {
        /// The rank that reports.
        rank: usize,
        /// The first rank that differs from rank 0.
        peer: usize,
        /// Module path.
        path: String,
    },
    /// The device asked for is not there.
    #[error("rank {rank} (local rank {local_rank}): {cause}")]
    Device {
        /// The rank that reports.
        rank: usize,
        /// Its position on this machine.
        local_rank: usize,
        /// What is missing and what to do.
        cause: String,
    },
    /// A value could not be encoded for the other ranks, or theirs not decoded.
    #[error("rank {rank}: {operation}: {cause}")]
    Encoding {
        /// The rank that reports.
        rank: usize,
        /// The call.
        operation: String,
        /// The encoder's words.
        cause: String,
    },
    /// What the main rank was asked to do failed there.
    #[error("rank {rank}: rank 0 could not {operation}: {cause}")]
    OnMain {
        /// The rank that reports.
        rank: usize,
        /// What was asked for.
        operation: String,
        /// The error on rank 0.
        cause: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Launch(error) => fmt::Debug::fmt(error, f),
            _ => write!(f, "{self}{HELP}"),
        }
    }
}

impl Error {
    /// Whether this is the consequence of another rank's failure: the cause is in that rank's output.
    pub fn is_secondary(&self) -> bool {
        match self {
            Error::Group(error) => error.is_secondary(),
            Error::Reducer(error) => error.is_secondary(),
            Error::Data(DataError::Group(error)) => error.is_secondary(),
            Error::Checkpoint(error) => error.is_secondary(),
            Error::Optimizer(error) => error.is_secondary(),
            Error::PeerCannotWrap { .. } => true,
            Error::OnMain { rank, .. } => *rank != 0,
            _ => false,
        }
    }

    /// What the process group said, if it was that.
    pub(crate) fn group_error(&self) -> Option<&GroupError> {
        match self {
            Error::Group(error)
            | Error::Reducer(ReducerError::Group(error))
            | Error::Data(DataError::Group(error))
            | Error::Checkpoint(CheckpointError::Group(error))
            | Error::Rendezvous(RendezvousError::Group(error)) => Some(error),
            _ => None,
        }
    }
}

/// The panic payload of a backward pass that could not average its gradients.
///
/// Burn's `backward` returns no error. [`try_backward`] catches this payload; code that catches panics itself can
/// downcast to it.
#[derive(Clone, Debug)]
pub struct BackwardPanic(ReducerError);

impl BackwardPanic {
    /// Leaves the backward pass with `error`.
    ///
    /// No panic hook sees it: its message would be the payload's type, and a backtrace of every survivor would bury the output
    /// of the rank that failed first.
    pub(crate) fn raise(error: ReducerError) -> ! {
        let payload: Box<dyn Any + Send> = Box::new(Self(error.clone()));
        // The report of our launcher has it, once for all ranks that say the same.
        if !CATCHING.get() && !launch::tell_panic(&*payload) {
            // The standard panic message knows nothing of this payload: it would print its type and a backtrace.
            let help = if is_launched() { "" } else { HELP };
            eprintln!("burn-ddp: {error}{help}");
        }
        panic::resume_unwind(payload)
    }

    /// Why the gradients could not be averaged.
    pub fn error(&self) -> &ReducerError {
        &self.0
    }

    /// The error in a caught panic's payload, if it is one of ours.
    pub fn from_payload(payload: &(dyn Any + Send)) -> Option<&ReducerError> {
        payload.downcast_ref::<Self>().map(Self::error)
    }
}

thread_local! {
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// `loss.backward()` with failures of the gradient reduction as an error instead of a panic.
///
/// Every rank must call it (or `backward`); it blocks until the gradients are averaged. After an error the job's groups are
/// poisoned: save what there is to save and end the process. Other panics pass through.
///
/// # Errors
///
/// [`Error::Reducer`]: a peer was lost, the ranks did not match, an operation timed out, or a gradient came too late.
pub fn try_backward<const D: usize>(loss: &Tensor<D>) -> Result<Gradients, Error> {
    catch(|| loss.backward())
}

/// Runs `f`, in which backward passes may fail.
pub(crate) fn catch<R>(f: impl FnOnce() -> R) -> Result<R, Error> {
    let outer = CATCHING.replace(true);
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    CATCHING.set(outer);
    result.map_err(|payload| match payload.downcast::<BackwardPanic>() {
        Ok(ours) => ours.0.into(),
        Err(other) => panic::resume_unwind(other),
    })
}
