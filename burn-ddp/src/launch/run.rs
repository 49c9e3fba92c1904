//! The entry that a training script calls.

use super::{
    LaunchError, Launcher,
    blame::Blame,
    child::{Classify, Ended},
};
use crate::{BackwardPanic, Ddp, Error, ReducerError, group::ProcessGroup};
use std::{
    any::Any,
    fmt, process,
    sync::{Arc, Mutex, PoisonError, Weak},
};

/// Runs `train` on every rank: in this process if something else has started it as one (`burn_ddp::launch` itself,
/// the `burn-ddp` command, torchrun, mpirun, srun: their variables are set), else in `BURN_DDP_NPROC` (default 1) processes started from this
/// program with the same arguments. [`Launcher`] has options.
///
/// Blocks until training has ended, in the launching process until all ranks have. When ranks have failed, the launching process
/// prints the report and exits with the code of the [first failure](mod@crate::launch#errors-and-exit-codes); this is for the end of
/// `main`. [`Launcher::try_run`] returns instead.
///
/// # Errors
///
/// `train`'s own error, in a process that nobody of ours has launched; [`Error::Launch`] when the ranks cannot be started;
/// [`Error::Settings`] and [`Error::Rendezvous`] when the ranks do not find together.
///
/// # Example
///
/// ```no_run
/// fn main() -> Result<(), burn_ddp::Error> {
///     burn_ddp::launch(|ddp| {
///         println!("rank {} of {}", ddp.rank(), ddp.world_size());
///         Ok(())
///     })
/// }
/// ```
pub fn launch<E>(train: impl FnOnce(Ddp) -> Result<(), E>) -> Result<(), E>
where
    E: fmt::Display + From<Error>,
{
    Launcher::new().run(train)
}

impl<E> Launcher<E> {
    /// [`launch`] with options: runs `train` on each rank.
    ///
    /// In the launching process it blocks until all ranks have ended. On success it returns in every process, so what comes
    /// after it in `main` runs `nproc + 1` times. A rank's error does not return: the rank hands it to the launching process and exits with
    /// code 1, and the launching process prints its report and exits with the first failure's code, as it does after a signal. Call it
    /// from a thread that lives as long as it runs.
    ///
    /// # Errors
    ///
    /// See [`launch`].
    pub fn run(self, train: impl FnOnce(Ddp) -> Result<(), E>) -> Result<(), E>
    where
        E: fmt::Display + From<Error>,
    {
        match self.train(train) {
            Ok(Ended::Failed { reported: true, .. }) => process::exit(1),
            Ok(ended) => ended.result(),
            Err(error @ (LaunchError::Failed(_) | LaunchError::Signalled { .. })) => error.exit(),
            Err(error) => Err(Error::from(error).into()),
        }
    }

    /// [`run`](Self::run) that returns in every case, for a program that has something left to do, or exit codes of its own: a rank's
    /// error in that rank, and [`Error::Launch`] in the launching process, with the report and
    /// [`LaunchError::exit_code`].
    ///
    /// # Errors
    ///
    /// `train`'s own in a rank, [`Error::Launch`] in the launching process, [`Error::Settings`] and [`Error::Rendezvous`] when the ranks do not
    /// find together.
    pub fn try_run(self, train: impl FnOnce(Ddp) -> Result<(), E>) -> Result<(), E>
    where
        E: fmt::Display + From<Error>,
    {
        match self.train(train) {
            Ok(ended) => ended.result(),
            Err(error) => Err(Error::from(error).into()),
        }
    }

    fn train(self, train: impl FnOnce(Ddp) -> Result<(), E>) -> Result<Ended<E>, LaunchError>
    where
        E: fmt::Display + From<Error>,
    {
        let classify = Classify {
            error: &|failure: &Failure<E>| failure.blame.clone(),
            panic: Arc::new(describe_panic),
        };
        let is_secondary = self.is_secondary;
        let body = || {
            let ddp = Ddp::from_env().map_err(|error| Failure {
                blame: Blame::of(&error),
                error: error.into(),
            })?;
            *JOINED.lock().unwrap_or_else(PoisonError::into_inner) = Some(ddp.downgrade());
            train(ddp.clone()).map_err(|error| {
                let mut blame = blame_of_job();
                blame.secondary |= is_secondary(&error);
                // The peers learn why this rank leaves; a job that has failed already keeps its first reason.
                ddp.abort(&error.to_string());
                Failure { error, blame }
            })
        };
        Ok(match self.place(&classify, body)? {
            Ended::Well => Ended::Well,
            Ended::Failed { error, reported } => Ended::Failed {
                error: error.error,
                reported,
            },
        })
    }
}

/// The job that this process has joined. Weak: the training function's handles decide when it leaves.
static JOINED: Mutex<Option<Weak<dyn ProcessGroup>>> = Mutex::new(None);

/// Whose failure has ended the job, if it has. What a training function makes of another rank's, an error of its own type or an
/// `unwrap`, is then no cause.
fn blame_of_job() -> Blame {
    let joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    let group = joined.as_ref().and_then(Weak::upgrade);
    let failure = group.and_then(|group| group.failure());
    failure.as_ref().map(Blame::of_group).unwrap_or_default()
}

fn describe_panic(payload: &(dyn Any + Send)) -> Option<(String, Blame)> {
    if let Some(error) = BackwardPanic::from_payload(payload) {
        let blame = match error {
            ReducerError::Group(error) => Blame::of_group(error),
            error => Blame::secondary(error.is_secondary()),
        };
        return Some((error.to_string(), blame));
    }
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned())?;
    Some((text, blame_of_job()))
}

/// An error of the training function, and whose failure it is.
struct Failure<E> {
    error: E,
    blame: Blame,
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}
