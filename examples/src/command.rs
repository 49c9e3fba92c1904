//! What the command lines of all programs have in common.

use crate::Error;
use std::process::ExitCode;

/// What `main` returns after `result`; an error goes to stderr first.
pub fn exit(result: Result<(), Error>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether `--lr` is in (0, 1], the range that Burn's schedulers take.
///
/// # Errors
///
/// [`Error::Usage`] when it is not.
pub fn check_lr(lr: f64) -> Result<(), Error> {
    if lr > 0.0 && lr <= 1.0 {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "--lr is {lr}, but must be above 0 and at most 1"
    )))
}
