//! The product's log.

use tracing_subscriber::filter::LevelFilter;

/// Writes this process's log from level `warn` to stderr, one line an event.
pub fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
}
