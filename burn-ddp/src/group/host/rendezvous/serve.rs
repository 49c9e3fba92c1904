//! Rank 0's side.

use super::{
    super::{
        acceptor::{Acceptor, Outcome},
        poll::{self, Waker},
        rejection_log::RejectionLog,
        rendezvous_error::RendezvousError,
        secret::Secret,
        settings::Rendezvous,
        wire,
    },
    Answer, Hello, Joined, Peer, REJOIN_LIMIT, REPORT_EVERY, VERSION,
    accept::{self, JoinRequest},
    answer_limit, first_report, listen, resolve,
    verdict::{Verdict, duplicate},
};
use crate::notice;
use rustix::event::{PollFd, PollFlags};
use std::{
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::{Duration, Instant},
};

/// For one rank to take its answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// Longest sleep while waiting, so that nothing depends on a wake-up alone.
const SLICE: Duration = Duration::from_millis(500);

/// Waits until all ranks have come, or says why they cannot.
pub(in super::super) fn serve(
    settings: &mut Rendezvous,
    waker: &Arc<Waker>,
) -> Result<Joined, RendezvousError> {
    let start = Instant::now();
    let handed = settings.listener.is_some() || settings.listen_fd.is_some();
    // An address that was bound by somebody else need not mean anything here.
    let mut addresses = if handed {
        Vec::new()
    } else {
        resolve::wait_for_name(settings, &resolve::system, start)?
    };
    // Before anything listens; again below, for what a launcher bound.
    let listeners = if handed {
        let listeners = listen::listeners(settings, &[])?;
        addresses.extend(
            listeners
                .iter()
                .filter_map(|listener| listener.local_addr().ok()),
        );
        listeners
    } else {
        resolve::secret_for(settings, &addresses)?;
        listen::listeners(settings, &addresses)?
    };
    let secret = resolve::secret_for(settings, &addresses)?;
    let at: Vec<String> = listeners
        .iter()
        .filter_map(|listener| Some(listener.local_addr().ok()?.to_string()))
        .collect();
    let at = at.join(" and ");
    tracing::debug!(
        "rank 0 waits for {} ranks on {at}",
        settings.world_size.get() - 1
    );
    let late = clones(&listeners).map_err(|error| failed("keeping the listening socket", error))?;
    let server = Server {
        acceptor: accept::acceptor(listeners, waker.clone(), secret.clone()),
        us: Hello::new(settings),
        requests: BTreeMap::new(),
        gone: BTreeMap::new(),
        rejected: BTreeMap::new(),
        rejections: RejectionLog::default(),
        at,
        secret: secret.clone(),
        start,
    };
    let mut joined = server.run(waker, start + settings.rendezvous_timeout)?;
    joined.acceptor = Some(accept::late_acceptor(
        late,
        waker.clone(),
        secret,
        Hello::new(settings),
    ));
    Ok(joined)
}

fn failed(operation: &'static str, cause: io::Error) -> RendezvousError {
    RendezvousError::Io {
        rank: 0,
        operation,
        cause,
    }
}

fn clones(listeners: &[TcpListener]) -> io::Result<Vec<TcpListener>> {
    listeners.iter().map(TcpListener::try_clone).collect()
}

pub(super) struct Server {
    pub(super) acceptor: Acceptor<JoinRequest>,
    pub(super) us: Hello,
    pub(super) requests: BTreeMap<usize, JoinRequest>,
    /// Ranks that had come and are not there any more, since when.
    gone: BTreeMap<usize, (Peer, Instant)>,
    /// Why, and how many.
    pub(super) rejected: BTreeMap<String, usize>,
    rejections: RejectionLog,
    /// Where rank 0 listens.
    pub(super) at: String,
    secret: Secret,
    pub(super) start: Instant,
}

impl Server {
    fn run(mut self, waker: &Waker, deadline: Instant) -> Result<Joined, RendezvousError> {
        let mut report = self.start + first_report(deadline - self.start);
        while self.requests.len() + 1 < self.us.world_size {
            if Instant::now() >= deadline {
                return Err(self.time_out());
            }
            if Instant::now() >= report {
                report += REPORT_EVERY;
                notice::warn(format_args!(
                    "rank 0 listens on {} and still waits for rank(s) {:?} after {:.0?}; it gives up in {:.0?}",
                    self.at,
                    self.missing(),
                    self.start.elapsed(),
                    deadline.saturating_duration_since(Instant::now())
                ));
            }
            if let Some((peer, since)) = self.gone.values().next()
                && since.elapsed() >= REJOIN_LIMIT
            {
                let peer = peer.clone();
                return Err(self.lost(peer, waker));
            }
            self.wait(waker, deadline)?;
            // One by one: should this one end the rendezvous, the others are still there to be told.
            while let Some(outcome) = self.acceptor.next_outcome() {
                self.handle(outcome, waker)?;
            }
        }
        self.welcome()
    }

    /// Sleeps until somebody comes, or a rank that has come leaves again: its place is then free for a restarted process.
    pub(super) fn wait(&mut self, waker: &Waker, deadline: Instant) -> Result<(), RendezvousError> {
        let left = deadline
            .saturating_duration_since(Instant::now())
            .min(SLICE);
        let gone: Vec<usize> = {
            let mut fds = vec![waker.fd()];
            fds.extend(
                self.requests
                    .values()
                    .map(|request| PollFd::new(&request.stream, PollFlags::IN)),
            );
            fds.extend(self.acceptor.fds());
            poll::wait(&mut fds, left)
                .map_err(|error| failed("waiting for the other ranks", error))?;
            // A rank has nothing to say until it is answered, so anything to read is its end.
            self.requests
                .keys()
                .zip(&fds[1..])
                .filter(|(_, fd)| poll::readable(fd))
                .map(|(rank, _)| *rank)
                .collect()
        };
        for rank in gone {
            if let Some(request) = self.requests.remove(&rank) {
                tracing::warn!(
                    "rank {rank} ({}) left again before all ranks had come",
                    request.hello.peer
                );
                self.gone.insert(rank, (request.hello.peer, Instant::now()));
            }
        }
        waker.drain();
        self.acceptor.accept();
        Ok(())
    }

    fn handle(
        &mut self,
        outcome: Outcome<JoinRequest>,
        waker: &Waker,
    ) -> Result<(), RendezvousError> {
        let request = match outcome {
            Outcome::Accepted(request) => request,
            Outcome::Rejected { from, why } => {
                self.reject(from, why);
                return Ok(());
            }
        };
        match self.us.verdict(&request.hello) {
            Verdict::Fits => {}
            Verdict::Reject(answer) => {
                self.answer(&request, &answer);
                if let Some(reason) = answer.rejection() {
                    self.reject(request.from, reason);
                }
                return Ok(());
            }
            Verdict::Ahead => return Err(self.superseded(&request)),
            Verdict::Contradicts(reason) => return Err(self.contradiction(reason, request, waker)),
        }
        let rank = request.hello.peer.rank;
        match self.requests.get(&rank) {
            None => {
                self.gone.remove(&rank);
                self.requests.insert(rank, request);
                Ok(())
            }
            Some(first) => {
                let reason = duplicate(rank, &first.hello.peer, &request.hello.peer);
                Err(self.contradiction(reason, request, waker))
            }
        }
    }

    fn reject(&mut self, from: SocketAddr, why: String) {
        self.rejections.rejected(0, from, &why);
        // Texts of the callers' making do not get here, but their kinds are not ours to bound.
        if self.rejected.len() < 32 || self.rejected.contains_key(&why) {
            *self.rejected.entry(why).or_default() += 1;
        }
    }

    pub(super) fn answer(&self, request: &JoinRequest, answer: &Answer) -> bool {
        let deadline = Instant::now() + ANSWER_LIMIT;
        let sent = wire::send(
            &request.stream,
            answer,
            answer_limit(self.us.world_size),
            deadline,
        );
        if let Err(error) = &sent {
            tracing::debug!("could not answer {}: {error}", request.from);
        }
        sent.is_ok()
    }

    pub(super) fn missing(&self) -> Vec<usize> {
        (1..self.us.world_size)
            .filter(|rank| !self.requests.contains_key(rank))
            .collect()
    }

    fn welcome(self) -> Result<Joined, RendezvousError> {
        let mut number = [0; 8];
        getrandom::fill(&mut number)
            .map_err(|error| failed("drawing the job's number", io::Error::other(error)))?;
        let job = u64::from_ne_bytes(number);
        let mut peers = vec![self.us.peer.clone()];
        peers.extend(
            self.requests
                .values()
                .map(|request| request.hello.peer.clone()),
        );
        let answer = Answer::Welcome {
            job,
            peers: peers.clone(),
        };
        for request in self.requests.values() {
            // One that is gone by now shows on its control connection, by name.
            self.answer(request, &answer);
        }
        let links = self
            .requests
            .into_iter()
            .map(|(rank, request)| (rank, request.stream))
            .collect();
        tracing::info!(
            "all {} ranks have come in {:.1?} (burn-ddp {VERSION}, job {job:016x})",
            peers.len(),
            self.start.elapsed()
        );
        Ok(Joined {
            job,
            secret: self.secret,
            peers,
            links,
            acceptor: None,
        })
    }
}
