//! The thread that serves a process's control connections.

use super::{
    super::{
        acceptor::Outcome,
        poll,
        rejection_log::RejectionLog,
        rendezvous::LateAcceptor,
        wire::{self, Fill, FrameReader},
    },
    frame::{self, Failure, Frame},
    state::Shared,
};
use rustix::event::{PollFd, PollFlags};
use std::{
    io::{self, ErrorKind, Write},
    net::{Shutdown, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

/// Bound of an orderly goodbye: the last frames out, and the peers' ends closed.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

pub(super) struct Monitor {
    shared: Arc<Shared>,
    links: Vec<Link>,
    acceptor: Option<LateAcceptor>,
    rejections: RejectionLog,
    next_beat: Instant,
    last_round: Instant,
}

/// One connection.
struct Link {
    peer: usize,
    stream: TcpStream,
    reader: FrameReader,
    outgoing: Vec<u8>,
    last_heard: Instant,
    open: bool,
}

impl Monitor {
    pub(super) fn new(
        shared: Arc<Shared>,
        links: Vec<(usize, TcpStream)>,
        acceptor: Option<LateAcceptor>,
    ) -> io::Result<Self> {
        let now = Instant::now();
        let limit = frame::limit(shared.member.world_size);
        let link = |(peer, stream): (usize, TcpStream)| {
            stream.set_nonblocking(true)?;
            let reader = FrameReader::new(limit);
            Ok(Link {
                peer,
                stream,
                reader,
                outgoing: Vec::new(),
                last_heard: now,
                open: true,
            })
        };
        let links = links.into_iter().map(link).collect::<io::Result<_>>()?;
        Ok(Self {
            shared,
            links,
            acceptor,
            rejections: RejectionLog::default(),
            next_beat: now,
            last_round: now,
        })
    }

    pub(super) fn run(mut self) {
        loop {
            let work = self.shared.work();
            for frame in &work.frames {
                self.post(frame);
            }
            if work.closing && self.shared.report_due().is_none() {
                break;
            }
            self.beat();
            self.flush();
            if work
                .frames
                .iter()
                .any(|frame| matches!(frame, Frame::Failed(_)))
            {
                self.shared.announced();
            }
            let due = self.shared.report_due();
            self.sleep(due.map_or(self.next_beat, |due| due.min(self.next_beat)));
            self.receive();
            self.judge_silence();
            if self.shared.member.rank == 0 {
                self.shared.expire(self.last_round);
                let open = self.links.iter().filter(|link| link.open);
                let reachable = open.map(|link| link.peer);
                self.shared.report(reachable, self.last_round);
            }
            self.reject_late();
        }
        let shared = self.shared.clone();
        self.goodbye();
        shared.finish();
    }

    /// Queues a frame on every open connection.
    fn post(&mut self, frame: &Frame) {
        match wire::encode(frame, frame::limit(self.shared.member.world_size)) {
            Ok(bytes) => {
                for link in self.links.iter_mut().filter(|link| link.open) {
                    link.outgoing.extend_from_slice(&bytes);
                }
            }
            // The sizes of all parts are bounded where they are made.
            Err(error) => tracing::error!("a control message was not sent: {error}"),
        }
    }

    fn beat(&mut self) {
        let now = Instant::now();
        if now >= self.next_beat {
            self.next_beat = now + self.shared.member.heartbeat.interval;
            self.post(&Frame::Heartbeat);
        }
    }

    fn flush(&mut self) {
        for link in self.links.iter_mut().filter(|link| link.open) {
            // A broken connection shows in the next read, after what the peer said last.
            let _ = link.flush();
        }
    }

    fn sleep(&mut self, until: Instant) {
        let acceptor = self.acceptor.as_ref();
        let mut fds = vec![self.shared.waker.fd()];
        fds.extend(self.links.iter().filter(|link| link.open).map(|link| {
            let out = if link.outgoing.is_empty() {
                PollFlags::empty()
            } else {
                PollFlags::OUT
            };
            PollFd::new(&link.stream, PollFlags::IN | out)
        }));
        fds.extend(acceptor.into_iter().flat_map(LateAcceptor::fds));
        let left = until.saturating_duration_since(Instant::now());
        if let Err(error) = poll::wait(&mut fds, left) {
            // Out of kernel memory; the heartbeat's pace is kept meanwhile.
            tracing::warn!("waiting for control messages failed: {error}");
            std::thread::sleep(left.min(Duration::from_millis(100)));
        }
        self.shared.waker.drain();
    }

    fn receive(&mut self) {
        let now = Instant::now();
        // A long pause was this process's own (stopped, or starved): the peers' signs of life of that time
        // may still be under way, so their silence counts from here.
        let asleep = now.saturating_duration_since(self.last_round)
            > self.shared.member.heartbeat.interval * 3;
        self.last_round = now;
        for link in self.links.iter_mut().filter(|link| link.open) {
            if asleep {
                link.last_heard = now;
            }
            link.receive(&self.shared, now);
        }
    }

    fn judge_silence(&mut self) {
        let limit = self.shared.member.heartbeat.limit;
        for link in self.links.iter_mut().filter(|link| link.open) {
            if self.last_round.saturating_duration_since(link.last_heard) > limit {
                link.lost(&self.shared, format!("no sign of life for {limit:.0?}"));
            }
        }
    }

    fn reject_late(&mut self) {
        let Some(acceptor) = &self.acceptor else {
            return;
        };
        acceptor.accept();
        while let Some(outcome) = acceptor.next_outcome() {
            if let Outcome::Rejected { from, why } = outcome {
                self.rejections.rejected(0, from, &why);
            }
        }
    }

    /// Sends what is queued and a farewell, then waits until the peers have read it: a socket that is closed
    /// with something unread resets the connection, and the peer might lose the last words.
    fn goodbye(mut self) {
        self.acceptor = None;
        self.post(&Frame::Bye);
        let deadline = Instant::now() + GOODBYE;
        let mut said = vec![false; self.links.len()];
        while self.links.iter().any(|link| link.open) && Instant::now() < deadline {
            for (link, said) in self
                .links
                .iter_mut()
                .zip(&mut said)
                .filter(|(link, _)| link.open)
            {
                if link.flush().is_err() {
                    link.open = false;
                } else if link.outgoing.is_empty() && !*said {
                    *said = true;
                    let _ = link.stream.shutdown(Shutdown::Write);
                }
            }
            self.sleep(deadline);
            for link in self.links.iter_mut().filter(|link| link.open) {
                link.discard();
            }
        }
    }
}

impl Link {
    fn flush(&mut self) -> io::Result<()> {
        let mut done = 0;
        let result = loop {
            if done == self.outgoing.len() {
                break Ok(());
            }
            match self.stream.write(&self.outgoing[done..]) {
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break Err(error),
            }
        };
        self.outgoing.drain(..done);
        result
    }

    fn receive(&mut self, shared: &Shared, now: Instant) {
        while self.open {
            let fill = match self.reader.fill(&self.stream) {
                Ok(fill) => fill,
                Err(error) => return self.lost(shared, format!("its connection broke: {error}")),
            };
            match fill {
                Fill::Empty => return,
                Fill::Data => self.last_heard = now,
                Fill::Eof => {
                    return self.lost(shared, "its process ended or its connection closed".into());
                }
            }
            while self.open {
                match self.reader.next::<Frame>() {
                    Ok(Some(frame)) => self.handle(shared, frame),
                    Ok(None) => break,
                    Err(error) => {
                        self.lost(shared, format!("it sent a malformed message: {error}"))
                    }
                }
            }
        }
    }

    fn handle(&mut self, shared: &Shared, frame: Frame) {
        let (on_zero, size) = (shared.member.rank == 0, shared.member.world_size);
        match frame {
            Frame::Heartbeat => {}
            Frame::Bye => {
                self.open = false;
                // Ours goes too, which tells the peer that its last words were read.
                let _ = self.flush();
                let _ = self.stream.shutdown(Shutdown::Both);
                shared.left(self.peer);
            }
            Frame::Failed(failure) => shared.fail(failure),
            Frame::Left { peer } if !on_zero => shared.left(peer),
            Frame::Give {
                tag,
                sequence,
                data,
            } if on_zero && data.len() <= frame::EXCHANGE_LIMIT => {
                shared.give((tag, sequence), self.peer, data);
            }
            Frame::All {
                tag,
                sequence,
                parts,
            } if !on_zero && parts.len() == size => {
                shared.complete((tag, sequence), parts);
            }
            Frame::Tail(tail) if on_zero && tail.is_bounded() => shared.tail(self.peer, tail),
            Frame::Left { .. } | Frame::Tail(_) | Frame::Give { .. } | Frame::All { .. } => {
                self.lost(
                    shared,
                    "it sent a message that its place does not allow".into(),
                );
            }
        }
    }

    fn lost(&mut self, shared: &Shared, cause: String) {
        self.open = false;
        let _ = self.stream.shutdown(Shutdown::Both);
        shared.fail(Failure::Lost {
            peer: self.peer,
            cause,
        });
    }

    /// Reads to the end without heeding it.
    fn discard(&mut self) {
        loop {
            match self.reader.fill(&self.stream) {
                Ok(Fill::Empty) => return,
                Ok(Fill::Data) => self.reader.clear(),
                Ok(Fill::Eof) | Err(_) => {
                    self.open = false;
                    return;
                }
            }
        }
    }
}
