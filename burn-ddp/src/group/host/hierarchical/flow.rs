//! Bytes that move along a ring: plans one after the other, as one stream.

use super::{
    super::{
        control::Control,
        data_connection::{self, GRACE, SLICE},
        deadline::Deadline,
        poll,
        spans::Spans,
    },
    ring::{Plan, Receive, Reduction, Ring},
    stripes::Stripes,
};
use crate::group::{OpDescriptor, Result, reduce::accumulate};
use rustix::event::{PollFd, PollFlags};
use std::{
    io::{self, Read, Write},
    time::Instant,
};

/// Plans under way, and how far they have come.
///
/// Only the bytes of *open* plans move; the others' memory is still in other hands. Between two calls the system's
/// socket buffers keep the links busy.
pub(super) struct Flow<'a> {
    control: &'a dyn Control,
    next: (usize, Stripes<'a>),
    previous: (usize, Stripes<'a>),
    ours: OpDescriptor,
    reduction: Reduction,
    plans: &'a [Plan],
    /// [`Plan::outgoing`] of each.
    outgoing: Vec<Spans>,
    open: usize,
    /// Which plan is being sent, and how much of it is with the system.
    sending: usize,
    sent: usize,
    /// Which plan is being received, how much of it is in place, which of its entries is next, and how much of that is in place.
    receiving: usize,
    usable: usize,
    entry: usize,
    within: usize,
    /// Bytes of an incomplete element, at the start of `chunk`.
    held: usize,
    chunk: &'a mut [u8],
    deadline: &'a Deadline<'a>,
    closed: Option<(usize, Instant)>,
}

impl<'a> Flow<'a> {
    pub(super) fn new(ring: &'a mut Ring<'_>, plans: &'a [Plan], reduction: Reduction) -> Self {
        let (rank, streams) = &ring.neighbours.next;
        let next = (*rank, Stripes::new(streams, ring.stripe));
        let (rank, streams) = ring
            .neighbours
            .previous
            .as_ref()
            .unwrap_or(&ring.neighbours.next);
        let previous = (*rank, Stripes::new(streams, ring.stripe));
        Self {
            control: ring.control,
            next,
            previous,
            ours: ring.ours,
            reduction,
            plans,
            outgoing: plans.iter().map(Plan::outgoing).collect(),
            open: 0,
            sending: 0,
            sent: 0,
            receiving: 0,
            usable: 0,
            entry: 0,
            within: 0,
            held: 0,
            chunk: ring.chunk,
            deadline: &ring.deadline,
            closed: None,
        }
    }

    /// The memory of the next plan is ready.
    pub(super) fn open(&mut self) {
        self.open += 1;
    }

    /// Moves what can move without waiting; whether anything did.
    pub(super) fn poll(&mut self, data: &mut [u8]) -> bool {
        self.send(data) | self.receive(data)
    }

    /// Returns when this rank has done its part in the first `plans` plans, which are open: it has what it receives, and the
    /// system has what it sends, so that it may turn to other work without holding anybody up.
    pub(super) fn complete(&mut self, data: &mut [u8], plans: usize) -> Result<()> {
        loop {
            let moved = self.poll(data);
            if self.sending >= plans && self.receiving >= plans {
                return Ok(());
            }
            if !moved {
                self.pause()?;
            }
        }
    }

    /// What may be sent by now of the plan that is being sent.
    fn ready(&self, plan: &Plan) -> usize {
        let usable = match self.receiving.cmp(&self.sending) {
            std::cmp::Ordering::Less => 0,
            std::cmp::Ordering::Equal => self.usable,
            std::cmp::Ordering::Greater => plan.to_receive(),
        };
        plan.to_send().min(plan.lead.len() + usable)
    }

    /// Sends what may leave and fits the socket; whether anything moved.
    fn send(&mut self, data: &[u8]) -> bool {
        let mut moved = false;
        while let Some(plan) = self.plans[..self.open].get(self.sending) {
            if self.sent == plan.to_send() {
                (self.sending, self.sent) = (self.sending + 1, 0);
                continue;
            }
            let window = self.sent..self.ready(plan);
            let Some((_, range)) = self.outgoing[self.sending].within(window).next() else {
                break;
            };
            let (_, left) = self.next.1.current();
            let whole = range.len().min(left);
            let written = self.write(&data[range]);
            self.sent += written;
            moved |= written > 0;
            if written < whole {
                break;
            }
        }
        moved
    }

    /// Writes up to the end of a stripe.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let (rank, stripes) = self.next;
        let (mut stream, left) = stripes.current();
        let written = self.moved(rank, stream.write(&bytes[..left.min(bytes.len())]));
        self.next.1.advance(written);
        written
    }

    /// Reads up to the end of a stripe.
    fn read(&mut self, bytes: &mut [u8]) -> usize {
        let (rank, stripes) = self.previous;
        let (mut stream, left) = stripes.current();
        let end = left.min(bytes.len());
        let read = self.moved(rank, stream.read(&mut bytes[..end]));
        self.previous.1.advance(read);
        read
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
        let mut moved = false;
        while let Some(plan) = self.plans[..self.open].get(self.receiving) {
            let Some((spans, how)) = plan.receive.get(self.entry) else {
                (self.receiving, self.usable, self.entry) = (self.receiving + 1, 0, 0);
                continue;
            };
            let Some((_, range)) = spans.within(self.within..spans.len()).next() else {
                (self.entry, self.within) = (self.entry + 1, 0);
                continue;
            };
            // What follows a chunk is only looked at: is it over?
            if moved {
                break;
            }
            let (read, usable) = match how {
                Receive::Store => {
                    let read = self.read(&mut data[range]);
                    (read, read)
                }
                how => self.reduce(&mut data[range], *how),
            };
            self.within += usable;
            self.usable += usable;
            if read == 0 {
                break;
            }
            moved = true;
        }
        moved
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
        let unsent = self.plans[..self.open].get(self.sending);
        let sending = unsent.is_some_and(|plan| self.sent < self.ready(plan));
        let receiving = self.receiving < self.open;
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
            fds.push(PollFd::new(self.next.1.current().0, PollFlags::OUT));
        }
        if receiving {
            fds.push(PollFd::new(self.previous.1.current().0, PollFlags::IN));
        }
        poll::wait(&mut fds, SLICE)
            .map_err(|error| data_connection::failed(self.control, &self.ours, error.to_string()))
    }
}
