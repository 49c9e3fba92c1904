//! Warnings that a user should see without having set up logging.

use std::fmt;
use tracing::{dispatcher, subscriber::NoSubscriber};

/// Logs a warning; in a program without a log, a line on stderr.
pub(crate) fn warn(text: fmt::Arguments<'_>) {
    if dispatcher::get_default(|dispatch| dispatch.is::<NoSubscriber>()) {
        eprintln!("burn-ddp: {text}");
    } else {
        tracing::warn!("{text}");
    }
}
