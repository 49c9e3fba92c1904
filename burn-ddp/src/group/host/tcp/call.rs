//! One rank's call to another, for a data connection.

use super::{
    super::{
        acceptor::HANDSHAKE_LIMIT,
        auth::{self, Purpose},
        poll, wire,
    },
    Context,
    mesh::{DataHello, HELLO_LIMIT},
};
use crate::group::{GroupError, Result};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

const SLICE: Duration = Duration::from_millis(50);
/// For the control plane to say why a connection failed.
const GRACE: Duration = Duration::from_secs(2);

/// Connects to `peer` and proves who calls. Looks at the control plane while it waits.
pub(super) fn call(
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
    // The peer speaks first, as soon as it takes calls.
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

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{
        super::super::{secret::Secret, shm::MockControl},
        *,
    };
    use std::{net::TcpListener, thread};

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
            index: 0,
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
