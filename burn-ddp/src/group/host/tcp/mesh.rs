//! The data connections of one group: one between any two ranks.
//!
//! Each group has connections of its own, so operations of different groups cannot meet. Every rank
//! listens for the time of the set-up on the address by which it reached rank 0; the rank with the higher number calls.

use super::{
    super::{
        acceptor::{Acceptor, HANDSHAKE_LIMIT, Outcome},
        auth::{self, Purpose},
        data_connection, machine,
        poll::{self, Waker},
        secret::Secret,
        wire,
    },
    Context,
};
use crate::group::{GroupError, Result, ops::Identity};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

const HELLO_LIMIT: usize = 128;
/// For a peer's answer: all ranks are in the set-up when the first of them calls.
const CALL_LIMIT: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(50);
/// For the control plane to say why a connection failed.
const GRACE: Duration = Duration::from_secs(2);

/// What each rank tells the others before they connect.
#[derive(Serialize, Deserialize)]
struct Contact {
    address: SocketAddr,
    /// The new group's number; rank 0's counts.
    group: u32,
    /// The [boot id](machine::boot_id) of its kernel.
    kernel: String,
}

/// Who calls, and for which group.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct DataHello {
    job: u64,
    generation: u32,
    group: u32,
    rank: usize,
}

/// Non-blocking connections by rank; the place of this rank itself is empty.
#[derive(Debug)]
pub(in crate::group::host) struct Mesh {
    pub(in crate::group::host) group: u32,
    pub(in crate::group::host) streams: Vec<Option<TcpStream>>,
}

/// Makes the connections of a new group: this rank's to `peers`, who name it among theirs. Collective; `tag` orders it
/// among the control exchanges.
pub(in crate::group::host) fn connect(
    context: &Context,
    tag: u64,
    proposed: u32,
    peers: &[usize],
) -> Result<Mesh> {
    let rank = context.control.rank();
    let failed = |operation: &str| {
        let operation = operation.to_owned();
        move |cause: io::Error| GroupError::Transport {
            rank,
            operation,
            cause: cause.to_string(),
        }
    };
    let (listener, address) = listen(context).map_err(failed("listening for data connections"))?;
    let ours = Contact {
        address,
        group: proposed,
        kernel: machine::boot_id(),
    };
    let contact = wire::encode(&ours, HELLO_LIMIT).map_err(failed("describing a group"))?;
    let contacts = context.control.exchange(tag, &contact)?;
    // All ranks are here now.
    let deadline = Instant::now() + context.control.operation_timeout();
    let contacts: Vec<Contact> = contacts
        .iter()
        .map(|bytes| wire::decode_frame(bytes))
        .collect::<io::Result<_>>()
        .map_err(failed("reading the peers' addresses"))?;

    let group = contacts.first().map_or(proposed, |contact| contact.group);
    let hello = |rank| DataHello {
        job: context.control.job(),
        generation: context.control.generation(),
        group,
        rank,
    };
    let waker = Arc::new(Waker::new().map_err(failed("making a wake-up pipe"))?);
    let acceptor = acceptor(listener, waker.clone(), context.secret.clone(), hello(0));
    let mut streams: Vec<Option<TcpStream>> = contacts.iter().map(|_| None).collect();

    // The lowest rank answers at once, then the next, and so on: no cycle.
    let wanted = |peer: &usize| peers.contains(peer);
    let lower = contacts.iter().enumerate().take(rank);
    for (peer, contact) in lower.filter(|(peer, _)| wanted(peer)) {
        let deadline = deadline.min(Instant::now() + CALL_LIMIT);
        streams[peer] = Some(call(
            context,
            peer,
            contact.address,
            &hello(rank),
            deadline,
        )?);
    }
    let higher = (rank + 1..streams.len()).filter(wanted).collect();
    answer(context, &acceptor, &waker, &mut streams, higher, deadline)?;
    for (stream, theirs) in streams.iter().zip(&contacts) {
        let Some(stream) = stream else { continue };
        let one_kernel = !ours.kernel.is_empty() && theirs.kernel == ours.kernel;
        data_connection::set_up(stream, one_kernel)
            .map_err(failed("setting up a data connection"))?;
    }
    Ok(Mesh { group, streams })
}

fn listen(context: &Context) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((context.local, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

fn acceptor(
    listener: TcpListener,
    waker: Arc<Waker>,
    secret: Secret,
    expected: DataHello,
) -> Acceptor<(usize, TcpStream)> {
    Acceptor::new(vec![listener], waker, move |stream, _, deadline| {
        auth::accept(&stream, &secret, Purpose::Data, deadline)
            .map_err(|error| error.to_string())?;
        let hello: DataHello =
            wire::receive(&stream, HELLO_LIMIT, deadline).map_err(|error| error.to_string())?;
        let rank = hello.rank;
        if hello != (DataHello { rank, ..expected }) {
            return Err(format!("it belongs to another job or group: {hello:?}"));
        }
        Ok((rank, stream))
    })
}

/// Connects to `peer` and proves who calls. Looks at the control plane while it waits.
fn call(
    context: &Context,
    peer: usize,
    address: SocketAddr,
    hello: &DataHello,
    deadline: Instant,
) -> Result<TcpStream> {
    let failed = |cause: io::Error| {
        let operation = || format!("connecting to rank {peer} at {address}");
        explain(context, peer, &operation).unwrap_or_else(|| GroupError::Transport {
            rank: context.control.rank(),
            operation: operation(),
            cause: cause.to_string(),
        })
    };
    let stream = start_connecting(address).map_err(failed)?;
    let ready = |flags| until_ready(context, peer, &PollFd::new(&stream, flags), deadline);
    ready(PollFlags::OUT)?;
    if let Some(error) = stream.take_error().map_err(failed)? {
        return Err(failed(error));
    }
    // The peer speaks first, once it has made its own calls.
    ready(PollFlags::IN)?;
    // From here on it has little time itself.
    let deadline = deadline.min(Instant::now() + HANDSHAKE_LIMIT);
    let authenticate = || {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        auth::call(&stream, &context.secret, Purpose::Data, deadline).map_err(io::Error::other)?;
        wire::send(&stream, hello, HELLO_LIMIT, deadline)
    };
    authenticate().map_err(failed)?;
    Ok(stream)
}

/// A connection that fails is mostly the trace of a peer's end, of which the control plane is about to hear.
fn explain(context: &Context, peer: usize, operation: &dyn Fn() -> String) -> Option<GroupError> {
    let end = Instant::now() + GRACE;
    loop {
        let verdict = context.control.check(&|| vec![peer], operation);
        if verdict.is_err() || Instant::now() >= end {
            return verdict.err();
        }
        std::thread::sleep(SLICE);
    }
}

/// A non-blocking socket whose connection may still be under way; once it is writable, it has
/// a connection or an error.
fn start_connecting(address: SocketAddr) -> io::Result<TcpStream> {
    let domain = Domain::for_address(address);
    let socket = Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => Err(error),
        _ => Ok(socket.into()),
    }
}

fn until_ready(context: &Context, peer: usize, fd: &PollFd<'_>, deadline: Instant) -> Result<()> {
    let rank = context.control.rank();
    let start = Instant::now();
    let operation = || format!("connecting to rank {peer}");
    loop {
        context.control.check(&|| vec![peer], &operation)?;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(GroupError::Timeout {
                rank,
                operation: operation(),
                elapsed: start.elapsed(),
                missing: vec![peer],
                hosts: vec![context.control.host(peer)],
            });
        }
        let mut fds = [fd.clone()];
        poll::wait(&mut fds, left.min(SLICE)).map_err(|error| GroupError::Transport {
            rank,
            operation: operation(),
            cause: error.to_string(),
        })?;
        // Errors and ends show in the next use of the socket.
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
    }
}

/// Waits for the calls of `expected`.
fn answer(
    context: &Context,
    acceptor: &Acceptor<(usize, TcpStream)>,
    waker: &Waker,
    streams: &mut [Option<TcpStream>],
    expected: Vec<usize>,
    deadline: Instant,
) -> Result<()> {
    let rank = context.control.rank();
    let start = Instant::now();
    let operation = || "connecting the ranks of a group".to_owned();
    loop {
        while let Some(outcome) = acceptor.next_outcome() {
            match outcome {
                Outcome::Accepted((peer, stream)) if expected.contains(&peer) => {
                    streams[peer] = Some(stream)
                }
                Outcome::Accepted((peer, _)) => {
                    tracing::warn!("rank {rank} did not expect a call from rank {peer}")
                }
                Outcome::Rejected { from, why } => {
                    tracing::warn!("rank {rank} rejected {from}: {why}")
                }
            }
        }
        let missing = || {
            let missing = expected.iter().filter(|peer| streams[**peer].is_none());
            missing.copied().collect::<Vec<_>>()
        };
        if missing().is_empty() {
            return Ok(());
        }
        context.control.check(&missing, &operation)?;
        if Instant::now() >= deadline {
            let missing = missing();
            let hosts = missing.iter().map(|peer| context.control.host(*peer));
            return Err(GroupError::Timeout {
                rank,
                operation: operation(),
                elapsed: start.elapsed(),
                hosts: hosts.collect(),
                missing,
            });
        }
        let mut fds = vec![waker.fd()];
        fds.extend(acceptor.fds());
        poll::wait(&mut fds, SLICE).map_err(|error| GroupError::Transport {
            rank,
            operation: operation(),
            cause: error.to_string(),
        })?;
        waker.drain();
        acceptor.accept();
    }
}

/// The part of a group's [`Identity`] that its control connections know.
pub(in crate::group::host) fn identity(context: &Context, group: u32) -> Identity {
    Identity {
        rank: context.control.rank(),
        world_size: context.control.world_size(),
        job: context.control.job(),
        generation: context.control.generation(),
        group,
    }
}

#[cfg(any(test, fuzzing))]
#[path = "fuzzing.rs"]
pub(in crate::group::host) mod fuzzing;

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{super::super::shm::MockControl, *};
    use std::thread;

    #[test]
    fn a_failure_elsewhere_ends_a_call_to_a_silent_rank() {
        let controls = MockControl::all(2, Duration::from_secs(60));
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let context = Context::new(controls[1].clone(), Secret::random().unwrap(), address.ip());
        let hello = DataHello {
            job: 1,
            generation: 0,
            group: 0,
            rank: 1,
        };
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = thread::scope(|scope| {
            let caller = scope.spawn(|| call(&context, 0, address, &hello, deadline));
            // The caller is connected and waits for a handshake that does not come.
            let _held = silent.accept().unwrap();
            controls[0].fail(GroupError::aborted(0, 0, "rank 0 gives up"));
            caller.join().unwrap().unwrap_err()
        });
        assert!(
            matches!(&error, GroupError::Aborted { rank: 1, origin: 0, reason, .. } if reason == "rank 0 gives up"),
            "{error}"
        );
    }
}
