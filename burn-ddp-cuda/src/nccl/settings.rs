//! What a communicator is told at the start.

use std::{fmt, sync::Arc, time::Duration};

/// Limits of a communicator.
#[derive(Clone)]
#[non_exhaustive]
pub struct Settings {
    /// How long all ranks have to come to the start. 60 seconds by default.
    pub init_timeout: Duration,
    /// How long any other operation may take. 60 seconds by default.
    pub timeout: Duration,
    /// Runs first on each thread that this crate starts for the communicator (to abort or destroy it, which can wait for the device).
    /// Make the device current here: CUDA would otherwise set up device 0 for the thread.
    pub on_thread_start: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            init_timeout: Duration::from_secs(60),
            timeout: Duration::from_secs(60),
            on_thread_start: None,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("init_timeout", &self.init_timeout)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
