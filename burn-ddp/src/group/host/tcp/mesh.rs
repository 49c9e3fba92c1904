//! The data connections of one group, between any two ranks or neighbours on a ring.
//!
//! Each group has connections of its own, so operations of different groups cannot meet. Every rank
//! listens for the time of the set-up on the address by which it reached rank 0; the rank with the higher number calls. All calls of a rank and
//! its answers run at the same time, so a group's set-up takes as many round trips on a hundred machines as on two.

use super::{
    super::{
        acceptor::{Acceptor, Outcome},
        auth::{self, Purpose},
        data_connection, machine,
        poll::{self, Waker},
        secret::Secret,
        wire,
    },
    Context,
    call::call,
};
use crate::group::{GroupError, Result, ops::Identity};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener, TcpStream},
    num::NonZeroUsize,
    sync::{
        Arc,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

pub(super) const HELLO_LIMIT: usize = 128;
/// For a peer's answer: all ranks are in the set-up when the first of them calls.
const CALL_LIMIT: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(50);

/// More connections between two ranks than any network needs.
pub(in crate::group::host) const MOST_SOCKETS: usize = 16;

/// A connection: the peer, and its number among those to this peer.
type Place = (usize, usize);
/// The connections that are wanted, and those that have been made.
type Made = BTreeMap<Place, Option<TcpStream>>;

/// What each rank tells the others before they connect.
#[derive(Serialize, Deserialize)]
struct Contact {
    address: SocketAddr,
    /// The new group's number; rank 0's counts.
    group: u32,
    /// The [boot id](machine::boot_id) of its kernel.
    kernel: String,
    /// Connections between two ranks; rank 0's number counts.
    sockets: NonZeroUsize,
}

/// Who calls, for which group, and which of their connections this one is.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DataHello {
    pub(super) job: u64,
    pub(super) generation: u32,
    pub(super) group: u32,
    pub(super) rank: usize,
    pub(super) index: usize,
}

/// Non-blocking connections by rank, as many to each; none to this rank itself.
#[derive(Debug)]
pub(in crate::group::host) struct Mesh {
    pub(in crate::group::host) group: u32,
    pub(in crate::group::host) streams: Vec<Vec<TcpStream>>,
}

/// Makes the connections of a new group, `sockets` each: this rank's to `peers`, who name it among theirs. Collective; `tag` orders it
/// among the control exchanges.
pub(in crate::group::host) fn connect(
    context: &Context,
    tag: u64,
    peers: &[usize],
    sockets: NonZeroUsize,
) -> Result<Mesh> {
    let rank = context.control.rank();
    let proposed = context.control.next_group();
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
        sockets,
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

    let first = contacts.first().unwrap_or(&ours);
    let (group, sockets) = (first.group, first.sockets.get().min(MOST_SOCKETS));
    let hello = |rank, index| DataHello {
        job: context.control.job(),
        generation: context.control.generation(),
        group,
        rank,
        index,
    };
    let waker = Arc::new(Waker::new().map_err(failed("making a wake-up pipe"))?);
    let acceptor = acceptor(listener, waker.clone(), context.secret.clone(), hello(0, 0));
    let wanted = |peer: &usize| *peer != rank && peers.contains(peer);
    let wanted = (0..contacts.len()).filter(wanted);
    let mut made: Made = wanted
        .flat_map(|peer| (0..sockets).map(move |index| ((peer, index), None)))
        .collect();
    // Calls and answers at the same time: would a rank answer only after its own calls, then on a ring each waited for the one before it.
    thread::scope(|scope| {
        let (sender, calls) = mpsc::channel();
        let start = |(peer, index): Place| {
            let (sender, waker, hello) = (sender.clone(), waker.clone(), hello(rank, index));
            let address = contacts[peer].address;
            let deadline = deadline.min(Instant::now() + CALL_LIMIT);
            let call = move || {
                // Nobody receives it once another connection has failed.
                let _ = sender.send((
                    (peer, index),
                    call(context, peer, address, &hello, deadline),
                ));
                waker.wake();
            };
            let thread = thread::Builder::new()
                .name("burn-ddp-call".into())
                .stack_size(256 << 10);
            thread.spawn_scoped(scope, call).map(drop)
        };
        let lower = made.keys().copied().filter(|(peer, _)| *peer < rank);
        lower
            .collect::<Vec<_>>()
            .into_iter()
            .try_for_each(start)
            .map_err(failed("starting a thread"))
            .and_then(|()| meet(context, &acceptor, &calls, &waker, &mut made, deadline))
            // Which ends the calls that are still under way.
            .inspect_err(|error| context.control.fail(error.clone()))
    })?;
    let mut streams: Vec<Vec<TcpStream>> = contacts.iter().map(|_| Vec::new()).collect();
    for ((peer, _), stream) in made {
        let Some(stream) = stream else { continue };
        let one_kernel = !ours.kernel.is_empty() && contacts[peer].kernel == ours.kernel;
        data_connection::set_up(&stream, one_kernel)
            .map_err(failed("setting up a data connection"))?;
        streams[peer].push(stream);
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
) -> Acceptor<(Place, TcpStream)> {
    Acceptor::new(vec![listener], waker, move |stream, _, deadline| {
        auth::accept(&stream, &secret, Purpose::Data, deadline)
            .map_err(|error| error.to_string())?;
        let hello: DataHello =
            wire::receive(&stream, HELLO_LIMIT, deadline).map_err(|error| error.to_string())?;
        let (rank, index) = (hello.rank, hello.index);
        if hello
            != (DataHello {
                rank,
                index,
                ..expected
            })
        {
            return Err(format!("it belongs to another job or group: {hello:?}"));
        }
        Ok(((rank, index), stream))
    })
}

/// Waits until all connections are `made`: by this rank's calls, or by those of the others.
fn meet(
    context: &Context,
    acceptor: &Acceptor<(Place, TcpStream)>,
    calls: &Receiver<(Place, Result<TcpStream>)>,
    waker: &Waker,
    made: &mut Made,
    deadline: Instant,
) -> Result<()> {
    let rank = context.control.rank();
    let start = Instant::now();
    let operation = || "connecting the ranks of a group".to_owned();
    loop {
        for (place, called) in calls.try_iter() {
            made.insert(place, Some(called?));
        }
        while let Some(outcome) = acceptor.next_outcome() {
            match outcome {
                Outcome::Accepted((place, stream))
                    if place.0 > rank && matches!(made.get(&place), Some(None)) =>
                {
                    made.insert(place, Some(stream));
                }
                Outcome::Accepted(((peer, _), _)) => {
                    tracing::warn!("rank {rank} did not expect a call from rank {peer}")
                }
                Outcome::Rejected { from, why } => {
                    tracing::warn!("rank {rank} rejected {from}: {why}")
                }
            }
        }
        let missing = || {
            let missing = made.iter().filter(|(_, stream)| stream.is_none());
            let mut missing: Vec<usize> = missing.map(|((peer, _), _)| *peer).collect();
            missing.dedup();
            missing
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
    use std::net::Ipv4Addr;

    /// On a ring of a hundred machines, rank 2 must not wait until rank 1 has got through to rank 0.
    #[test]
    fn a_rank_answers_while_it_calls() {
        let controls = MockControl::all(3, Duration::from_secs(60));
        let secret = Secret::random().unwrap();
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let contact = Contact {
            address: silent.local_addr().unwrap(),
            group: 0,
            kernel: String::new(),
            sockets: NonZeroUsize::MIN,
        };
        let connect = |rank: usize, peers: &[usize]| {
            let local = Ipv4Addr::LOCALHOST.into();
            let context = Context::new(controls[rank].clone(), secret.clone(), local);
            connect(&context, 7, peers, NonZeroUsize::MIN)
        };
        thread::scope(|scope| {
            let one = scope.spawn(|| connect(1, &[0, 2]));
            let two = scope.spawn(|| connect(2, &[1]));
            let contact = wire::encode(&contact, HELLO_LIMIT).unwrap();
            controls[0].exchange(7, &contact).unwrap();
            // Rank 0 says nothing to rank 1, which has its connection and waits for its first word.
            let _held = silent.accept().unwrap();
            let mesh = two.join().unwrap().unwrap();
            assert_eq!(mesh.streams[1].len(), 1);
            assert!(!one.is_finished());
            controls[0].fail(GroupError::aborted(0, 0, "the test is over"));
            let error = one.join().unwrap().unwrap_err();
            assert!(
                matches!(error, GroupError::Aborted { rank: 1, .. }),
                "{error}"
            );
        });
    }
}
