//! The entry that a training script calls.

use super::{LaunchError, Launcher, child::Classify};
use crate::{BackwardPanic, Ddp, Error, group::ProcessGroup};
use std::{
    any::Any,
    fmt,
    sync::{Mutex, PoisonError, Weak},
};

/// Runs `train` on every rank: in this process if something else has started it as one (`burn_ddp::launch` itself,
/// torchrun, a scheduler: `RANK` and `WORLD_SIZE` are set), else in `BURN_DDP_NPROC` (default 1) processes started from this
/// program with the same arguments. [`Launcher`] has options.
///
/// Blocks until training has ended, in the launching process until all ranks have.
///
/// # Errors
///
/// `train`'s own error; [`Error::Launch`] in the launching process, with the report of the first failure; [`Error::Settings`] and
/// [`Error::Rendezvous`] when the ranks do not find together.
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
    /// In a rank it returns what `train` returns; in the launching process it blocks until all ranks have ended, so what
    /// comes after it in `main` runs `nproc + 1` times. Call it from a thread that lives as long as it runs.
    ///
    /// # Errors
    ///
    /// See [`launch`].
    pub fn run(self, train: impl FnOnce(Ddp) -> Result<(), E>) -> Result<(), E>
    where
        E: fmt::Display + From<Error>,
    {
        let is_secondary = self.classify.error;
        let launcher = Launcher {
            nproc: self.nproc,
            grace: self.grace,
            classify: Classify {
                error: |failure: &Failure<E>| failure.secondary,
                panic: describe_panic,
            },
        };
        let body = || {
            let ddp = Ddp::from_env().map_err(|error| Failure {
                secondary: error.is_secondary(),
                error: error.into(),
            })?;
            *JOINED.lock().unwrap_or_else(PoisonError::into_inner) = Some(ddp.downgrade());
            train(ddp.clone()).map_err(|error| Failure {
                secondary: is_secondary(&error) || lost_a_peer(),
                error,
            })
        };
        launcher.run_local(body).map_err(|failure| failure.error)
    }
}

/// The job that this process has joined. Weak: the training function's handles decide when it leaves.
static JOINED: Mutex<Option<Weak<dyn ProcessGroup>>> = Mutex::new(None);

/// Whether the job has failed because of another rank. What a training function makes of that, an error of its own type or an
/// `unwrap`, is then no cause.
fn lost_a_peer() -> bool {
    let joined = JOINED.lock().unwrap_or_else(PoisonError::into_inner);
    let group = joined.as_ref().and_then(Weak::upgrade);
    group
        .and_then(|g| g.failure())
        .is_some_and(|failure| failure.is_secondary())
}

fn describe_panic(payload: &(dyn Any + Send)) -> Option<(String, bool)> {
    if let Some(error) = BackwardPanic::from_payload(payload) {
        return Some((error.to_string(), error.is_secondary()));
    }
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned())?;
    Some((text, lost_a_peer()))
}

/// An error of the training function, and whether another rank's failure caused it.
struct Failure<E> {
    error: E,
    secondary: bool,
}

impl<E: fmt::Display> fmt::Display for Failure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: From<Error>> From<LaunchError> for Failure<E> {
    fn from(error: LaunchError) -> Self {
        Self {
            error: Error::from(error).into(),
            secondary: false,
        }
    }
}
