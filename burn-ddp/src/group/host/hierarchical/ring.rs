//! One ring of ranks, one per machine, as a stream.
//!
//! A rank receives from its predecessor and sends to its successor. What it sends is what it begins with (the *lead*)
//! followed by what it has received, so one rule drives every collective on a ring: *a byte may leave once it has
//! arrived and has been added*. There are no steps in which all wait for the slowest: receiving, adding and sending
//! overlap by themselves, and the kernel's socket buffers keep the links busy while a rank adds.

use super::super::{
    control::Control,
    data_connection::{self, GRACE, SLICE},
    deadline::Deadline,
    poll,
    spans::Spans,
};
use crate::group::{
    DType, GroupError, OpDescriptor, ReduceOp, Result,
    ops::{self, DESCRIPTOR_WORDS},
    reduce::accumulate,
};
use rustix::event::{PollFd, PollFlags};
use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::Instant,
};

/// The connections of one rank on its ring; one connection where both neighbours are the same rank.
#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) next: (usize, TcpStream),
    /// `None` if it is the next one.
    pub(super) previous: Option<(usize, TcpStream)>,
}

/// What to do with received bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receive {
    /// Put them in place.
    Store,
    /// Reduce them into what is there, which is on its way elsewhere.
    Reduce,
    /// Reduce them into what is there, which is then complete: a mean is divided.
    Complete,
}

/// A collective on a ring, as this rank sees it.
#[derive(Clone, Debug, Default)]
pub(super) struct Plan {
    /// Sent first.
    pub(super) lead: Spans,
    /// Received in this order. All but the last `keep` bytes of it are sent on.
    pub(super) receive: Vec<(Spans, Receive)>,
    pub(super) keep: usize,
}

impl Plan {
    /// Everything but the last thing received is sent on.
    pub(super) fn passing_on(lead: Spans, receive: Vec<(Spans, Receive)>) -> Self {
        let keep = receive.last().map_or(0, |(spans, _)| spans.len());
        Self {
            lead,
            receive,
            keep,
        }
    }
}

/// How to reduce.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reduction {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    /// What completes a mean, if that is left to the ring.
    pub(super) divisor: Option<usize>,
}

impl Reduction {
    /// For plans that only store.
    pub(super) const NONE: Self = Self {
        dtype: DType::U8,
        op: ReduceOp::Sum,
        divisor: None,
    };
}

/// One operation on a ring.
pub(super) struct Ring<'a> {
    pub(super) control: &'a dyn Control,
    pub(super) neighbours: &'a Neighbours,
    /// The ranks of the ring, one per machine, and which of them this one is.
    pub(super) ranks: Vec<usize>,
    pub(super) position: usize,
    pub(super) ours: OpDescriptor,
    pub(super) deadline: Deadline<'a>,
    /// Received bytes on their way into a reduction.
    pub(super) chunk: &'a mut [u8],
}

impl Ring<'_> {
    /// Compares the descriptors of all ranks of the ring, before any of them uses what another sends.
    pub(super) fn meet(&mut self) -> Result<()> {
        const DESCRIPTOR: usize = DESCRIPTOR_WORDS * size_of::<u64>();
        let (ranks, position) = (self.ranks.len(), self.position);
        let place = |k: usize| k * DESCRIPTOR..(k + 1) * DESCRIPTOR;
        let spans = |k: usize| Spans::from_iter([place(k)]);
        let mut all = vec![0; ranks * DESCRIPTOR];
        let words = ops::encode(&self.ours);
        for (to, word) in all[place(position)].as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        let before = (1..ranks).map(|step| (position + ranks - step) % ranks);
        let receive = before.map(|k| (spans(k), Receive::Store)).collect();
        let plan = Plan::passing_on(spans(position), receive);
        self.run(&mut all, &plan, Reduction::NONE)?;
        for (k, &peer) in self.ranks.iter().enumerate() {
            let mut words = [0; DESCRIPTOR_WORDS];
            for (word, bytes) in words.iter_mut().zip(all[place(k)].as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            match ops::decode(&words) {
                Some(theirs) if theirs == self.ours => {}
                Some(theirs) => {
                    return Err(GroupError::Mismatch {
                        rank: self.control.rank(),
                        peer,
                        ours: Box::new(self.ours),
                        theirs: Box::new(theirs),
                    });
                }
                None => {
                    let cause = format!("rank {peer} sent a malformed header");
                    return Err(data_connection::failed(self.control, &self.ours, cause));
                }
            }
        }
        Ok(())
    }

    /// Runs `plan` on `data`.
    pub(super) fn run(&mut self, data: &mut [u8], plan: &Plan, reduction: Reduction) -> Result<()> {
        let mut flow = Flow::new(self, plan, reduction);
        loop {
            let moved = flow.send(data) | flow.receive(data);
            if flow.done() {
                return Ok(());
            }
            if !moved {
                flow.pause()?;
            }
        }
    }
}

/// How far a plan has come.
struct Flow<'a> {
    control: &'a dyn Control,
    next: (usize, &'a TcpStream),
    previous: (usize, &'a TcpStream),
    ours: OpDescriptor,
    reduction: Reduction,
    plan: &'a Plan,
    /// Lead and received ranges, end to end.
    outgoing: Spans,
    sent: usize,
    /// Bytes received and put in place.
    usable: usize,
    /// Which entry of the plan is being received, and how much of it is in place.
    entry: usize,
    within: usize,
    /// Bytes of an incomplete element, at the start of `chunk`.
    held: usize,
    chunk: &'a mut [u8],
    deadline: &'a Deadline<'a>,
    closed: Option<(usize, Instant)>,
}

impl<'a> Flow<'a> {
    fn new(ring: &'a mut Ring<'_>, plan: &'a Plan, reduction: Reduction) -> Self {
        let next = (ring.neighbours.next.0, &ring.neighbours.next.1);
        let previous = match &ring.neighbours.previous {
            Some((rank, stream)) => (*rank, stream),
            None => next,
        };
        let incoming = plan.receive.iter().flat_map(|(spans, _)| spans.iter());
        let outgoing = plan.lead.iter().chain(incoming).cloned().collect();
        Self {
            control: ring.control,
            next,
            previous,
            ours: ring.ours,
            reduction,
            plan,
            outgoing,
            sent: 0,
            usable: 0,
            entry: 0,
            within: 0,
            held: 0,
            chunk: ring.chunk,
            deadline: &ring.deadline,
            closed: None,
        }
    }

    /// All that this rank sends.
    fn to_send(&self) -> usize {
        self.outgoing.len() - self.plan.keep
    }

    /// What may be sent by now.
    fn ready(&self) -> usize {
        self.to_send().min(self.plan.lead.len() + self.usable)
    }

    fn all_received(&self) -> bool {
        let incoming = self.plan.receive.iter().map(|(spans, _)| spans.len());
        self.usable == incoming.sum::<usize>()
    }

    fn done(&self) -> bool {
        self.sent == self.to_send() && self.all_received()
    }

    /// Sends what may leave and fits the socket; whether anything moved.
    fn send(&mut self, data: &[u8]) -> bool {
        let before = self.sent;
        loop {
            let window = self.sent..self.ready();
            let Some((_, range)) = self.outgoing.within(window).next() else {
                break;
            };
            let whole = range.len();
            let written = self.write(&data[range]);
            self.sent += written;
            if written < whole {
                break;
            }
        }
        self.sent > before
    }

    fn write(&mut self, bytes: &[u8]) -> usize {
        let (rank, mut stream) = self.next;
        self.moved(rank, stream.write(bytes))
    }

    fn read(&mut self, bytes: &mut [u8]) -> usize {
        let (rank, mut stream) = self.previous;
        self.moved(rank, stream.read(bytes))
    }

    /// Bytes that a system call moved; notes the end of a connection.
    fn moved(&mut self, peer: usize, result: io::Result<usize>) -> usize {
        let moved = data_connection::moved(result);
        if moved.is_none() {
            self.closed.get_or_insert((peer, Instant::now()));
        }
        moved.unwrap_or(0)
    }

    /// Receives what is there, a chunk at most, so that what becomes ready leaves soon; whether anything moved.
    fn receive(&mut self, data: &mut [u8]) -> bool {
        let plan = self.plan;
        while let Some((spans, how)) = plan.receive.get(self.entry) {
            let Some((_, range)) = spans.within(self.within..spans.len()).next() else {
                (self.entry, self.within) = (self.entry + 1, 0);
                continue;
            };
            let (read, usable) = match how {
                Receive::Store => {
                    let read = self.read(&mut data[range]);
                    (read, read)
                }
                how => self.reduce(&mut data[range], *how),
            };
            self.within += usable;
            self.usable += usable;
            return read > 0;
        }
        false
    }

    /// Receives into the chunk and reduces whole elements of it into `target`; bytes read, and bytes reduced.
    fn reduce(&mut self, target: &mut [u8], how: Receive) -> (usize, usize) {
        let chunk = std::mem::take(&mut self.chunk);
        // What is left of a target is whole elements, so there is room beyond a part of one.
        let room = chunk.len().min(target.len());
        let read = self.read(&mut chunk[self.held..room]);
        let filled = self.held + read;
        let Reduction { dtype, op, divisor } = self.reduction;
        let whole = filled / dtype.size() * dtype.size();
        let divisor = divisor.filter(|_| how == Receive::Complete);
        accumulate(&mut target[..whole], &chunk[..whole], dtype, op, divisor);
        chunk.copy_within(whole..filled, 0);
        self.held = filled - whole;
        self.chunk = chunk;
        (read, whole)
    }

    /// Nothing moves: is it over? If not, waits for the sockets a little.
    fn pause(&mut self) -> Result<()> {
        let missing = || self.closed.map(|(peer, _)| peer).into_iter().collect();
        self.control.check(&missing, &|| self.ours.to_string())?;
        let (sending, receiving) = (self.sent < self.ready(), !self.all_received());
        match self.closed {
            Some((peer, since)) if since.elapsed() > GRACE => {
                return Err(data_connection::lost(self.control, &self.ours, peer));
            }
            Some(_) => {
                std::thread::sleep(SLICE);
                return Ok(());
            }
            None => {
                // The one that this rank waits for; whom that one waits for is in its own error.
                let peer = match receiving {
                    true => self.previous.0,
                    false => self.next.0,
                };
                self.deadline
                    .check(&|| self.ours.to_string(), &|| vec![peer])?;
            }
        }
        let mut fds = Vec::with_capacity(2);
        if sending {
            fds.push(PollFd::new(self.next.1, PollFlags::OUT));
        }
        if receiving {
            fds.push(PollFd::new(self.previous.1, PollFlags::IN));
        }
        poll::wait(&mut fds, SLICE)
            .map_err(|error| data_connection::failed(self.control, &self.ours, error.to_string()))
    }
}
