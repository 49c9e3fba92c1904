//! Accepts connections and greets each in a thread of its own, so that a silent or hostile caller
//! holds up nobody.

use super::poll::Waker;
use rustix::event::{PollFd, PollFlags};
use std::{
    cell::Cell,
    fmt, io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::{Duration, Instant},
};

/// Time that a caller has for the whole greeting. An honest one needs a few round trips.
pub(super) const GREETING_LIMIT: Duration = Duration::from_secs(3);

/// Greetings at once. Beyond it callers wait in the kernel's queue, so hostile ones cost this many
/// small threads and no more.
const GREETINGS: usize = 64;

/// Pause after a failed accept: the caller stays in the kernel's queue, so the listener stays readable and
/// waiting on it would not wait at all.
const PAUSE: Duration = Duration::from_millis(100);

/// Authenticates a caller and hears what it wants, before the deadline; `Err` says why it was turned away.
type Greet<T> = dyn Fn(TcpStream, SocketAddr, Instant) -> Result<T, String> + Send + Sync;

/// A caller that was greeted.
#[derive(Debug)]
pub(super) enum Visit<T> {
    Admitted(T),
    TurnedAway { from: SocketAddr, why: String },
}

/// One or more listening sockets and the greetings under way.
pub(super) struct Door<T> {
    listeners: Vec<TcpListener>,
    /// Until when the listeners are left alone.
    paused: Cell<Option<Instant>>,
    greet: Arc<Greet<T>>,
    greetings: Arc<AtomicUsize>,
    visits: Receiver<Visit<T>>,
    sender: Sender<Visit<T>>,
    waker: Arc<Waker>,
}

impl<T> fmt::Debug for Door<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("listeners", &self.listeners)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Door<T> {
    /// `listeners` must be non-blocking. A greeting that ends wakes `waker`.
    pub(super) fn new(
        listeners: Vec<TcpListener>,
        waker: Arc<Waker>,
        greet: impl Fn(TcpStream, SocketAddr, Instant) -> Result<T, String> + Send + Sync + 'static,
    ) -> Self {
        let (sender, visits) = mpsc::channel();
        Self {
            listeners,
            paused: Cell::new(None),
            greet: Arc::new(greet),
            greetings: Arc::default(),
            visits,
            sender,
            waker,
        }
    }

    /// What to wait on, besides the waker: nothing while too many greetings are under way, or for a moment
    /// after a failed accept. Nothing wakes the waiter when that moment is over; its own pace does.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let full = self.greetings.load(Ordering::Acquire) >= GREETINGS;
        let paused = self.paused.get().is_some_and(|end| Instant::now() < end);
        let listeners = if full || paused {
            &[][..]
        } else {
            &self.listeners
        };
        listeners
            .iter()
            .map(|listener| PollFd::new(listener, PollFlags::IN))
    }

    /// Starts greeting whoever waits.
    pub(super) fn accept(&self) {
        for listener in &self.listeners {
            while self.greetings.load(Ordering::Acquire) < GREETINGS {
                match listener.accept() {
                    Ok((stream, from)) => self.start(stream, from),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // The caller left again.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(error) => {
                        // Passes, as when no descriptors are free.
                        tracing::debug!("accepting a connection failed: {error}");
                        self.paused.set(Some(Instant::now() + PAUSE));
                        break;
                    }
                }
            }
        }
    }

    fn start(&self, stream: TcpStream, from: SocketAddr) {
        let (greet, sender) = (self.greet.clone(), self.sender.clone());
        let guard = Greeting {
            count: self.greetings.clone(),
            waker: self.waker.clone(),
        };
        guard.count.fetch_add(1, Ordering::AcqRel);
        let greeting = move || {
            let guard = guard;
            let deadline = Instant::now() + GREETING_LIMIT;
            let greeted = ready(&stream).map_err(|error| error.to_string());
            let visit = match greeted.and_then(|()| greet(stream, from, deadline)) {
                Ok(guest) => Visit::Admitted(guest),
                Err(why) => Visit::TurnedAway { from, why },
            };
            // Nobody is left to hear it once the door is gone.
            let _ = sender.send(visit);
            drop(guard);
        };
        // If no thread can be had, the closure is dropped and with it the connection; the caller tries again.
        let started = thread::Builder::new()
            .name("burn-ddp-greet".into())
            .stack_size(256 << 10)
            .spawn(greeting);
        if let Err(error) = started {
            tracing::warn!("could not greet {from}: {error}");
        }
    }

    /// A greeting that has ended and was not looked at yet.
    pub(super) fn visit(&self) -> Option<Visit<T>> {
        self.visits.try_recv().ok()
    }
}

fn ready(stream: &TcpStream) -> io::Result<()> {
    // Accepted sockets inherit the listener's mode on some systems.
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)
}

/// Counts a greeting for as long as it lasts, however it ends.
struct Greeting {
    count: Arc<AtomicUsize>,
    waker: Arc<Waker>,
}

impl Drop for Greeting {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
        self.waker.wake();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_rests_after_a_failed_accept() {
        // Bound but not listening: every accept fails, with an error other than "nobody there".
        let deaf =
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        deaf.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
            .unwrap();
        let waker = Arc::new(Waker::new().unwrap());
        let door = Door::new(vec![deaf.into()], waker, |_, _, _| Ok(()));
        assert_eq!(door.fds().count(), 1);
        door.accept();
        assert!(door.paused.get().is_some());
        // An hour, so that the test does not race with the clock.
        door.paused
            .set(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!(door.fds().count(), 0);
        door.paused.set(Some(Instant::now()));
        assert_eq!(door.fds().count(), 1);
    }

    #[test]
    fn a_listener_without_callers_is_waited_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let waker = Arc::new(Waker::new().unwrap());
        let door = Door::new(vec![listener], waker, |_, _, _| Ok(()));
        door.accept();
        assert_eq!(door.fds().count(), 1);
    }
}
