//! One ring of ranks, one per machine, as a stream.
//!
//! A rank receives from its predecessor and sends to its successor. What it sends is what it begins with (the *lead*)
//! followed by what it has received, so one rule drives every collective on a ring: *a byte may leave once it has
//! arrived and has been added*. There are no steps in which all wait for the slowest: receiving, adding and sending
//! overlap by themselves, and the kernel's socket buffers keep the links busy while a rank adds.

use super::{
    super::{control::Control, data_connection, deadline::Deadline, spans::Spans},
    flow::Flow,
};
use crate::group::{
    DType, GroupError, OpDescriptor, ReduceOp, Result,
    ops::{self, DESCRIPTOR_WORDS},
};
use std::{net::TcpStream, slice};

/// The connections of one rank on its ring, as many to either neighbour; the same ones where both neighbours are one rank.
#[derive(Debug)]
pub(super) struct Neighbours {
    pub(super) next: (usize, Vec<TcpStream>),
    /// `None` if it is the next one.
    pub(super) previous: Option<(usize, Vec<TcpStream>)>,
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
    /// All that is sent, and what is kept of what comes in, end to end.
    pub(super) fn outgoing(&self) -> Spans {
        let incoming = self.receive.iter().flat_map(|(spans, _)| spans.iter());
        self.lead.iter().chain(incoming).cloned().collect()
    }

    pub(super) fn to_send(&self) -> usize {
        self.lead.len() + self.to_receive() - self.keep
    }

    pub(super) fn to_receive(&self) -> usize {
        self.receive.iter().map(|(spans, _)| spans.len()).sum()
    }

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
    /// Bytes that go over one of several connections before the next one's turn.
    pub(super) stripe: usize,
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
        let mut flow = self.start(slice::from_ref(plan), reduction);
        flow.open();
        flow.complete(data, 1)
    }

    /// Begins to run `plans`, which all ranks of the ring have in the same order. None is open yet.
    pub(super) fn start<'a>(&'a mut self, plans: &'a [Plan], reduction: Reduction) -> Flow<'a> {
        Flow::new(self, plans, reduction)
    }
}
