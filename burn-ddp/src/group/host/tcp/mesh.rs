//! The data connections of one group: one between any two ranks.
//!
//! Each group has connections of its own, so operations of different groups cannot meet. Every rank
//! listens for the time of the set-up on the address by which it reached rank 0; the rank with the higher number calls.

use super::{
    super::{
        auth::{self, Purpose},
        door::{Door, Visit},
        poll::{self, Waker},
        secret::Secret,
        wire,
    },
    Plane,
};
use crate::group::{GroupError, Result, ops::Identity};
use serde::{Deserialize, Serialize};
use std::{
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

const HELLO_LIMIT: usize = 64;
/// For a peer's answer: all ranks are in the set-up when the first of them calls.
const CALL_LIMIT: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(50);

/// What each rank tells the others before they connect.
#[derive(Serialize, Deserialize)]
struct Contact {
    address: SocketAddr,
    /// The new group's number; rank 0's counts.
    group: u32,
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
pub(super) struct Mesh {
    pub(super) group: u32,
    pub(super) streams: Vec<Option<TcpStream>>,
}

/// Makes the connections of a new group. Collective; `tag` orders it among the control exchanges.
pub(super) fn connect(plane: &Plane, tag: u64, proposed: u32) -> Result<Mesh> {
    let rank = plane.control.rank();
    let deadline = Instant::now() + plane.control.operation_timeout();
    let failed = |operation: &str| {
        let operation = operation.to_owned();
        move |cause: io::Error| GroupError::Transport {
            rank,
            operation,
            cause: cause.to_string(),
        }
    };
    let (listener, address) = listen(plane).map_err(failed("listening for data connections"))?;
    let contact = wire::encode(
        &Contact {
            address,
            group: proposed,
        },
        HELLO_LIMIT,
    )
    .map_err(failed("describing a group"))?;
    let contacts = plane.control.exchange(tag, &contact)?;
    let contacts: Vec<Contact> = contacts
        .iter()
        .map(|bytes| wire::decode_frame(bytes))
        .collect::<io::Result<_>>()
        .map_err(failed("reading the peers' addresses"))?;

    let group = contacts.first().map_or(proposed, |contact| contact.group);
    let hello = |rank| DataHello {
        job: plane.control.job(),
        generation: plane.control.generation(),
        group,
        rank,
    };
    let waker = Arc::new(Waker::new().map_err(failed("making a wake-up pipe"))?);
    let door = door(listener, waker.clone(), plane.secret.clone(), hello(0));
    let mut streams: Vec<Option<TcpStream>> = contacts.iter().map(|_| None).collect();

    // The lowest rank answers at once, then the next, and so on: no cycle.
    for (peer, contact) in contacts.iter().enumerate().take(rank) {
        plane
            .control
            .check(&|| vec![peer], &|| format!("connecting to rank {peer}"))?;
        let call = call(
            contact.address,
            &plane.secret,
            &hello(rank),
            deadline.min(Instant::now() + CALL_LIMIT),
        );
        streams[peer] = Some(call.map_err(failed(&format!(
            "connecting to rank {peer} at {}",
            contact.address
        )))?);
    }
    answer(plane, &door, &waker, &mut streams, deadline)?;
    for stream in streams.iter().flatten() {
        stream
            .set_nonblocking(true)
            .map_err(failed("setting up a data connection"))?;
    }
    Ok(Mesh { group, streams })
}

fn listen(plane: &Plane) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((plane.local, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

fn door(
    listener: TcpListener,
    waker: Arc<Waker>,
    secret: Secret,
    expected: DataHello,
) -> Door<(usize, TcpStream)> {
    Door::new(vec![listener], waker, move |stream, _, deadline| {
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

fn call(
    address: SocketAddr,
    secret: &Secret,
    hello: &DataHello,
    deadline: Instant,
) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, wire::remaining(deadline)?)?;
    stream.set_nodelay(true)?;
    auth::call(&stream, secret, Purpose::Data, deadline).map_err(io::Error::other)?;
    wire::send(&stream, hello, HELLO_LIMIT, deadline)?;
    Ok(stream)
}

/// Waits for the calls of all higher ranks.
fn answer(
    plane: &Plane,
    door: &Door<(usize, TcpStream)>,
    waker: &Waker,
    streams: &mut [Option<TcpStream>],
    deadline: Instant,
) -> Result<()> {
    let rank = plane.control.rank();
    let start = Instant::now();
    let operation = || "connecting the ranks of a group".to_owned();
    loop {
        while let Some(visit) = door.visit() {
            match visit {
                Visit::Admitted((peer, stream)) if peer > rank && peer < streams.len() => {
                    streams[peer] = Some(stream)
                }
                Visit::Admitted((peer, _)) => {
                    tracing::warn!("rank {rank} did not expect a call from rank {peer}")
                }
                Visit::TurnedAway { from, why } => {
                    tracing::warn!("rank {rank} turned away {from}: {why}")
                }
            }
        }
        let missing = || {
            (rank + 1..streams.len())
                .filter(|peer| streams[*peer].is_none())
                .collect::<Vec<_>>()
        };
        if missing().is_empty() {
            return Ok(());
        }
        plane.control.check(&missing, &operation)?;
        if Instant::now() >= deadline {
            return Err(GroupError::Timeout {
                rank,
                operation: operation(),
                elapsed: start.elapsed(),
                missing: missing(),
            });
        }
        let mut fds = vec![waker.fd()];
        fds.extend(door.fds());
        poll::wait(&mut fds, SLICE).map_err(|error| GroupError::Transport {
            rank,
            operation: operation(),
            cause: error.to_string(),
        })?;
        waker.drain();
        door.accept();
    }
}

/// The part of a group's [`Identity`] that its control connections know.
pub(super) fn identity(plane: &Plane, group: u32) -> Identity {
    Identity {
        rank: plane.control.rank(),
        world_size: plane.control.world_size(),
        job: plane.control.job(),
        generation: plane.control.generation(),
        group,
    }
}
