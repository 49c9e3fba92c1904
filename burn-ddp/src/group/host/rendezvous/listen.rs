//! Rank 0's listening sockets.

use super::{
    super::{
        rendezvous_error::RendezvousError,
        settings::{Endpoint, Rendezvous},
    },
    port_owner,
};
use socket2::{Domain, Protocol, Socket, Type};
use std::{
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::Mutex,
};

const BACKLOG: i32 = 1024;

/// The socket that was handed over, or one on each of `addresses` that this machine has. Non-blocking.
pub(super) fn listeners(
    settings: &mut Rendezvous,
    addresses: &[SocketAddr],
) -> Result<Vec<TcpListener>, RendezvousError> {
    let listeners = if let Some(listener) = settings.listener.take() {
        vec![listener]
    } else if let Some(fd) = settings.listen_fd.take() {
        let cause = |error: io::Error| RendezvousError::InheritedListener {
            fd,
            cause: error.to_string(),
        };
        vec![inherit(fd, settings.master_port).map_err(cause)?]
    } else {
        bind_all(settings, addresses)?
    };
    for listener in &listeners {
        listener
            .set_nonblocking(true)
            .map_err(|cause| RendezvousError::Io {
                rank: settings.rank,
                operation: "setting up the listening socket",
                cause,
            })?;
    }
    Ok(listeners)
}

/// A name may have addresses that this machine lacks (`localhost` without IPv6); one is enough. But a port
/// that is taken on any of them is an error, since callers may try that one first.
fn bind_all(
    settings: &Rendezvous,
    addresses: &[SocketAddr],
) -> Result<Vec<TcpListener>, RendezvousError> {
    let (mut listeners, mut causes) = (Vec::new(), Vec::new());
    for address in addresses {
        match bind(*address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                return Err(RendezvousError::PortTaken {
                    address: address.to_string(),
                    port: address.port(),
                    owner: port_owner::describe(address.port()),
                });
            }
            Err(error) => causes.push(format!("{address}: {error}")),
        }
    }
    if listeners.is_empty() {
        let master = Endpoint(&settings.master_addr, settings.master_port).to_string();
        return Err(RendezvousError::Listen {
            master,
            cause: causes.join("; "),
        });
    }
    Ok(listeners)
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    // So that a job can start right after another on the same port. On Windows the option means
    // that two programs may share it.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Takes over a descriptor that the launcher left open for this process.
fn inherit(fd: RawFd, port: u16) -> io::Result<TcpListener> {
    static TAKEN: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());
    let mut taken = TAKEN
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if taken.contains(&fd) {
        return Err(io::Error::other("this process has used it already"));
    }
    // SAFETY: the borrow ends in this function, and only asks what the number stands for; if it
    // stands for nothing the calls report that.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    if !is_listening(borrowed)? {
        return Err(io::Error::other("it is not a listening socket"));
    }
    // Without this, programs that this process starts would keep the port in use.
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)?;
    taken.push(fd);
    // SAFETY: it is an open listening socket that the launcher made for this process, named to it by
    // number; nothing else in the process knows it, and `TAKEN` keeps a second caller out.
    let listener = TcpListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
    let actual = listener.local_addr()?.port();
    if actual != port {
        return Err(io::Error::other(format!(
            "it listens on port {actual}, but MASTER_PORT is {port}"
        )));
    }
    Ok(listener)
}

fn is_listening(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // Apple's systems have the option's number only.
    #[cfg(not(target_vendor = "apple"))]
    return Ok(rustix::net::sockopt::socket_acceptconn(fd)?);
    #[cfg(target_vendor = "apple")]
    return Ok(rustix::net::sockopt::socket_type(fd)? == rustix::net::SocketType::STREAM);
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use std::{net::TcpStream, os::fd::IntoRawFd};

    fn settings(address: SocketAddr) -> Rendezvous {
        Rendezvous::new(0, 2, address.ip().to_string(), address.port()).unwrap()
    }

    #[test]
    fn ddp_17_a_taken_port_is_named_with_its_owner() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = other.local_addr().unwrap();
        let error = listeners(&mut settings(address), &[address]).unwrap_err();
        let RendezvousError::PortTaken { port, owner, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!(*port, address.port());
        #[cfg(target_os = "linux")]
        assert!(
            owner.contains(&format!("process {}", std::process::id())),
            "{owner}"
        );
        assert!(
            error.to_string().contains(&address.to_string()),
            "{error} {owner}"
        );
    }

    #[test]
    fn ddp_17_a_port_is_free_right_after_its_use() {
        let first = bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = first.local_addr().unwrap();
        let caller = TcpStream::connect(address).unwrap();
        // The end that closes first waits in TIME_WAIT, on the listener's port.
        drop(first.accept().unwrap());
        drop((caller, first));
        bind(address).unwrap();
    }

    #[test]
    fn ddp_10_addresses_of_other_machines_are_skipped_while_one_is_ours() {
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        // TEST-NET-1 (RFC 5737) belongs to no machine.
        let foreign = SocketAddr::from(([192, 0, 2, 1], free.port()));
        assert_eq!(
            listeners(&mut settings(free), &[foreign, free])
                .unwrap()
                .len(),
            1
        );
        let error = listeners(&mut settings(free), &[foreign])
            .unwrap_err()
            .to_string();
        assert!(error.contains("192.0.2.1"), "{error}");
    }

    #[test]
    fn ddp_17_an_inherited_socket_is_checked_and_used_once() {
        let bound = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = bound.local_addr().unwrap();
        let fd = bound.into_raw_fd();
        let mut settings = settings(address);
        settings.listen_fd = Some(fd);
        let ours = listeners(&mut settings, &[]).unwrap();
        assert_eq!(ours[0].local_addr().unwrap(), address);
        assert!(
            rustix::io::fcntl_getfd(&ours[0])
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        settings.listen_fd = Some(fd);
        let error = listeners(&mut settings, &[]).unwrap_err().to_string();
        assert!(error.contains("used it already"), "{error}");
    }

    #[test]
    fn a_descriptor_that_is_no_listening_socket_is_refused() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let file = tempfile::tempfile().unwrap();
        use std::os::fd::AsRawFd;
        for fd in [stream.as_raw_fd(), file.as_raw_fd(), 1 << 20] {
            let mut settings = settings(listener.local_addr().unwrap());
            settings.listen_fd = Some(fd);
            assert!(matches!(
                listeners(&mut settings, &[]),
                Err(RendezvousError::InheritedListener { .. })
            ));
        }
    }
}
