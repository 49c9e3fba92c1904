//! What a user should see without having set up logging.

use std::fmt;
use tracing::{dispatcher, subscriber::NoSubscriber};

/// Where a user finds what to do about an error: the last line of what is printed.
pub(crate) const HELP: &str =
    "\nFor causes and cures see Troubleshooting in burn-ddp's book (book/src/troubleshooting.md)";

/// Logs a warning; in a program without a log, a line on stderr.
pub(crate) fn warn(text: fmt::Arguments<'_>) {
    if dispatcher::get_default(|dispatch| dispatch.is::<NoSubscriber>()) {
        eprintln!("burn-ddp: {text}");
    } else {
        tracing::warn!("{text}");
    }
}
