//! Signals to the launcher, as events.

use super::supervise::Event;
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM},
    flag,
    iterator::{Handle, Signals},
};
use std::{
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    thread,
};

/// While this lives, SIGINT, SIGTERM and SIGHUP become events instead of ending the process; afterwards they end it
/// again.
pub(super) struct Watch {
    handle: Handle,
    default: Arc<AtomicBool>,
    #[cfg(feature = "cli")]
    events: Arc<Mutex<Sender<Event>>>,
}

impl Watch {
    pub(super) fn new(events: Sender<Event>) -> io::Result<Self> {
        let mut stops = vec![SIGINT, SIGTERM];
        // Under nohup the job is meant to survive the terminal.
        if !is_ignored(SIGHUP) {
            stops.push(SIGHUP);
        }
        let default = Arc::new(AtomicBool::new(false));
        for signal in &stops {
            // A handler stays installed for ever (signal-hook says why); this one does nothing until `drop`.
            flag::register_conditional_default(*signal, default.clone())?;
        }
        let mut signals = Signals::new(stops.iter().chain([&SIGCHLD]))?;
        let handle = signals.handle();
        let events = Arc::new(Mutex::new(events));
        #[cfg(feature = "cli")]
        let target = events.clone();
        #[cfg(not(feature = "cli"))]
        let target = events;
        thread::Builder::new()
            .name("launcher-signals".to_owned())
            .spawn(move || {
                for signal in signals.forever() {
                    let event = if signal == SIGCHLD {
                        Event::ChildChanged
                    } else {
                        Event::Signal(signal)
                    };
                    // Nobody listens between two launches.
                    let _ = target
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .send(event);
                }
            })?;
        Ok(Self {
            handle,
            default,
            #[cfg(feature = "cli")]
            events,
        })
    }

    /// Later events go there.
    #[cfg(feature = "cli")]
    pub(super) fn redirect(&self, events: Sender<Event>) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = events;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.default.store(true, Ordering::SeqCst);
        self.handle.close();
    }
}

/// Whether the process was started with `signal` ignored; where that cannot be read, no.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
