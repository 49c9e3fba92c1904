//! Accepts connections and runs each one's handshake in a thread of its own, so that a silent or hostile caller
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

/// Time that a caller has for the whole handshake. An honest one needs a few round trips.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(3);

/// Handshakes at once. Beyond it callers wait in the kernel's queue, so hostile ones cost this many
/// small threads and no more.
const HANDSHAKES: usize = 256;

/// With more than this many at once, new ones have to be quick: callers that connect and say nothing then hold
/// up the others for moments, however many they are.
const CROWD: usize = 64;
/// What a caller then has. Twice the round trip of a long line.
const CROWDED_LIMIT: Duration = Duration::from_millis(250);

/// Pause after a failed accept: the caller stays in the kernel's queue, so the listener stays readable and
/// waiting on it would not wait at all.
const PAUSE: Duration = Duration::from_millis(100);

/// Authenticates a caller and hears what it wants, before the deadline; `Err` says why it was rejected.
type Handshake<T> = dyn Fn(TcpStream, SocketAddr, Instant) -> Result<T, String> + Send + Sync;

/// How the handshake with one caller ended.
#[derive(Debug)]
pub(super) enum Outcome<T> {
    Accepted(T),
    Rejected { from: SocketAddr, why: String },
}

/// One or more listening sockets and the handshakes under way.
pub(super) struct Acceptor<T> {
    listeners: Vec<TcpListener>,
    /// Until when the listeners are left alone.
    paused: Cell<Option<Instant>>,
    handshake: Arc<Handshake<T>>,
    in_flight: Arc<AtomicUsize>,
    outcomes: Receiver<Outcome<T>>,
    sender: Sender<Outcome<T>>,
    waker: Arc<Waker>,
}

impl<T> fmt::Debug for Acceptor<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor")
            .field("listeners", &self.listeners)
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Acceptor<T> {
    /// `listeners` must be non-blocking. A handshake that ends wakes `waker`.
    pub(super) fn new(
        listeners: Vec<TcpListener>,
        waker: Arc<Waker>,
        handshake: impl Fn(TcpStream, SocketAddr, Instant) -> Result<T, String> + Send + Sync + 'static,
    ) -> Self {
        let (sender, outcomes) = mpsc::channel();
        Self {
            listeners,
            paused: Cell::new(None),
            handshake: Arc::new(handshake),
            in_flight: Arc::default(),
            outcomes,
            sender,
            waker,
        }
    }

    /// What to wait on, besides the waker: nothing while too many handshakes are under way, or for a moment
    /// after a failed accept. Nothing wakes the waiter when that moment is over; its own pace does.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let full = self.in_flight.load(Ordering::Acquire) >= HANDSHAKES;
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

    /// Starts the handshake with whoever waits. With some of them, should they come without end: the caller has other work.
    pub(super) fn accept(&self) {
        for listener in &self.listeners {
            for _ in 0..HANDSHAKES {
                if self.in_flight.load(Ordering::Acquire) >= HANDSHAKES {
                    break;
                }
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
        let (handshake, sender) = (self.handshake.clone(), self.sender.clone());
        let guard = InFlight {
            count: self.in_flight.clone(),
            waker: self.waker.clone(),
        };
        let others = guard.count.fetch_add(1, Ordering::AcqRel);
        let limit = match others < CROWD {
            true => HANDSHAKE_LIMIT,
            false => CROWDED_LIMIT,
        };
        let run = move || {
            let guard = guard;
            let deadline = Instant::now() + limit;
            let ready = ready(&stream).map_err(|error| error.to_string());
            let outcome = match ready.and_then(|()| handshake(stream, from, deadline)) {
                Ok(connection) => Outcome::Accepted(connection),
                Err(why) => Outcome::Rejected { from, why },
            };
            // Nobody receives it once the acceptor is gone.
            let _ = sender.send(outcome);
            drop(guard);
        };
        // If no thread can be had, the closure is dropped and with it the connection; the caller tries again.
        let started = thread::Builder::new()
            .name("burn-ddp-handshake".into())
            .stack_size(256 << 10)
            .spawn(run);
        if let Err(error) = started {
            tracing::warn!("could not start the handshake with {from}: {error}");
        }
    }

    /// The next handshake that has ended, if there is one.
    pub(super) fn next_outcome(&self) -> Option<Outcome<T>> {
        self.outcomes.try_recv().ok()
    }
}

fn ready(stream: &TcpStream) -> io::Result<()> {
    // Accepted sockets inherit the listener's mode on some systems.
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)
}

/// Counts a handshake for as long as it lasts, however it ends.
struct InFlight {
    count: Arc<AtomicUsize>,
    waker: Arc<Waker>,
}

impl Drop for InFlight {
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
        let acceptor = Acceptor::new(vec![deaf.into()], waker, |_, _, _| Ok(()));
        assert_eq!(acceptor.fds().count(), 1);
        acceptor.accept();
        assert!(acceptor.paused.get().is_some());
        // An hour, so that the test does not race with the clock.
        acceptor
            .paused
            .set(Some(Instant::now() + Duration::from_secs(3600)));
        assert_eq!(acceptor.fds().count(), 0);
        acceptor.paused.set(Some(Instant::now()));
        assert_eq!(acceptor.fds().count(), 1);
    }

    #[test]
    fn a_listener_without_callers_is_waited_on() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let waker = Arc::new(Waker::new().unwrap());
        let acceptor = Acceptor::new(vec![listener], waker, |_, _, _| Ok(()));
        acceptor.accept();
        assert_eq!(acceptor.fds().count(), 1);
    }
}
