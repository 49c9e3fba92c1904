//! The side of every rank but 0.

use super::{
    super::{
        auth::{self, AuthError, Purpose},
        rendezvous_error::RendezvousError,
        secret::Secret,
        settings::{Endpoint, Rendezvous},
        wire,
    },
    Answer, FIRST_PAUSE, HELLO_LIMIT, Hello, Joined, LONGEST_PAUSE, REJOIN_LIMIT, REPORT_EVERY,
    answer_limit, first_report,
    resolve::{self, Resolver},
};
use crate::notice;
use std::{
    collections::BTreeMap,
    io::{self, ErrorKind},
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

/// For one address to answer at all.
const CONNECT_LIMIT: Duration = Duration::from_secs(3);
/// For rank 0 to prove itself.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(3);
/// Rank 0 knows which ranks are missing, so the others leave it the time to say so.
const GRACE: Duration = Duration::from_secs(1);

/// What one try at one address came to.
enum Attempt {
    /// Trying again cannot help.
    Final(RendezvousError),
    /// Rank 0 is not there yet.
    Again(String),
    /// It was there, knew of this rank, and is gone.
    Lost(String),
}

/// Calls rank 0 until it answers or the time is over.
pub(in super::super) fn join(settings: &Rendezvous) -> Result<Joined, RendezvousError> {
    join_with(settings, &resolve::system)
}

pub(super) fn join_with(
    settings: &Rendezvous,
    resolver: &Resolver,
) -> Result<Joined, RendezvousError> {
    let start = Instant::now();
    let deadline = start + settings.rendezvous_timeout;
    let mut tried = BTreeMap::new();
    let mut pause = FIRST_PAUSE;
    let mut report = start + first_report(settings.rendezvous_timeout);
    let mut lost_since = None;
    loop {
        // Each round anew: a name may appear, or move, while the job starts.
        match resolve::resolve(settings, resolver) {
            Ok(addresses) => {
                let secret = resolve::secret_for(settings, &addresses)?;
                for address in addresses {
                    if wire::remaining(deadline).is_err() && !tried.is_empty() {
                        // The causes of the earlier rounds say more than that time is over.
                        break;
                    }
                    match attempt(settings, &secret, address, deadline) {
                        Ok(joined) => return Ok(joined),
                        Err(Attempt::Final(error)) => return Err(error),
                        Err(Attempt::Again(cause)) => tried.insert(address.to_string(), cause),
                        Err(Attempt::Lost(cause)) => {
                            lost_since = Some(Instant::now());
                            tried.insert(address.to_string(), cause)
                        }
                    };
                }
            }
            Err(error) => {
                tried.insert(
                    settings.master_addr.clone(),
                    format!("cannot resolve it: {error}"),
                );
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RendezvousError::Timeout {
                rank: settings.rank,
                elapsed: start.elapsed(),
                reason: format!(
                    "cannot join rank 0 at {}. Tried {}",
                    master(settings),
                    list(&tried)
                ),
            });
        }
        if lost_since.is_some_and(|since| since.elapsed() >= REJOIN_LIMIT) {
            return Err(RendezvousError::PeerLost {
                rank: settings.rank,
                peer: 0,
                process: format!("at {}", master(settings)),
            });
        }
        if Instant::now() >= report {
            report += REPORT_EVERY;
            let elapsed = start.elapsed();
            notice::warn(format_args!(
                "rank {} still looks for rank 0 at {} after {elapsed:.0?}: {}; it gives up in {left:.0?}",
                settings.rank,
                master(settings),
                list(&tried)
            ));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn master(settings: &Rendezvous) -> String {
    Endpoint(&settings.master_addr, settings.master_port).to_string()
}

fn list(tried: &BTreeMap<String, String>) -> String {
    let each: Vec<_> = tried
        .iter()
        .map(|(address, cause)| format!("{address} ({cause})"))
        .collect();
    each.join(", ")
}

fn attempt(
    settings: &Rendezvous,
    secret: &Secret,
    address: SocketAddr,
    deadline: Instant,
) -> Result<Joined, Attempt> {
    let rank = settings.rank;
    let again = |error: io::Error| Attempt::Again(error.to_string());
    let limit = wire::remaining(deadline).map_err(again)?.min(CONNECT_LIMIT);
    let stream = TcpStream::connect_timeout(&address, limit).map_err(again)?;
    if stream.local_addr().map_err(again)? == address {
        // Nobody listens, and the kernel drew rank 0's port for this end: TCP connects such a socket to itself.
        return Err(Attempt::Again("nobody listens".into()));
    }
    stream.set_nodelay(true).map_err(again)?;

    let authenticated = auth::call(
        &stream,
        secret,
        Purpose::Control,
        deadline.min(Instant::now() + HANDSHAKE_LIMIT),
    );
    authenticated.map_err(|error| rejected(rank, secret, address, error))?;

    wire::send(&stream, &Hello::new(settings), HELLO_LIMIT, deadline).map_err(again)?;
    let limit = answer_limit(settings.world_size.get());
    let answer = wire::receive(&stream, limit, deadline + GRACE);
    let address = address.to_string();
    match answer.map_err(|error| match error.kind() {
        ErrorKind::TimedOut => Attempt::Again("rank 0 still waits for other ranks".into()),
        _ => Attempt::Lost(format!("rank 0 left before all ranks had come: {error}")),
    })? {
        Answer::Welcome { job, peers } => {
            let fits = peers.len() == settings.world_size.get()
                && peers
                    .iter()
                    .enumerate()
                    .all(|(rank, peer)| peer.rank == rank);
            if !fits {
                let reason = "its table of ranks is not this job's".to_owned();
                return Err(Attempt::Final(RendezvousError::Refused {
                    rank,
                    address,
                    reason,
                }));
            }
            Ok(Joined {
                job,
                secret: secret.clone(),
                peers,
                links: vec![(0, stream)],
                acceptor: None,
            })
        }
        Answer::Refused { reason } => Err(Attempt::Final(RendezvousError::Refused {
            rank,
            address,
            reason,
        })),
        Answer::Stale { generation } => Err(Attempt::Final(RendezvousError::Stale {
            rank,
            address,
            stale: settings.generation,
            generation,
        })),
        Answer::Inconsistent { reason } => Err(Attempt::Final(RendezvousError::Inconsistent {
            rank,
            reason,
        })),
        Answer::Lost { peer } => Err(Attempt::Final(peer.lost(rank))),
        Answer::TimedOut { reason } => Err(Attempt::Final(RendezvousError::Timeout {
            rank,
            elapsed: settings
                .rendezvous_timeout
                .saturating_sub(deadline.saturating_duration_since(Instant::now())),
            reason,
        })),
        Answer::Busy { reason } => Err(Attempt::Again(reason)),
    }
}

fn rejected(rank: usize, secret: &Secret, address: SocketAddr, error: AuthError) -> Attempt {
    let address = address.to_string();
    match error {
        AuthError::WrongSecret => Attempt::Final(RendezvousError::WrongSecret { rank, address }),
        AuthError::Foreign | AuthError::Version { .. } => {
            Attempt::Final(RendezvousError::NotRankZero {
                rank,
                address,
                cause: error.to_string(),
            })
        }
        // Silence. A launcher, which gives the secret, makes rank 0's socket before rank 0 runs, so there a
        // connection may wait long for its handshake. Without one rank 0 makes the socket itself and
        // answers at once.
        AuthError::Io(error) if error.kind() == ErrorKind::TimedOut && secret.is_of_this_user() => {
            let cause = format!("no handshake within {HANDSHAKE_LIMIT:?}");
            Attempt::Final(RendezvousError::NotRankZero {
                rank,
                address,
                cause,
            })
        }
        AuthError::Io(error) => Attempt::Again(format!("connected, but {error}")),
    }
}
