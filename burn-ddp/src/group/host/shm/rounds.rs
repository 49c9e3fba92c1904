//! The protocol by which ranks read each other's memory.
//!
//! In the base segment every rank has a counter and two areas. Time runs in rounds; rank `r` in
//! round `t`
//!
//! 1. writes its own area of `t` (the areas alternate),
//! 2. publishes `t` and waits until all ranks have published `t`,
//! 3. reads the areas of `t` of all ranks.
//!
//! **Invariant: an area of round `t` is written only before its owner publishes `t`, and read only after
//! every rank has published `t` and before the reader publishes `t + 1`.**
//!
//! So nobody reads what is not yet written: reading comes after the owner's publication, with
//! release and acquire between. And nobody overwrites what is still being read: the area is next written in
//! round `t + 2`, which its owner enters after all ranks have published `t + 1`, and they did that
//! after their last read. One wait per round does both, because of the two areas. It is the invariant for
//! inputs, for results and for descriptors alike, and it holds across operations: an operation is one round or
//! several, and how many follows from its descriptor, which the first round compares before anything else is
//! read.
//!
//! Borrows keep it on this rank: what [`Rounds::split`] hands out must be gone before
//! [`Rounds::advance`].
//!
//! After an error a rank never publishes again, and writes nothing: the group is poisoned.

use super::{
    segment::Segment,
    sync::{Line, Turn},
    wait::Patience,
};
use crate::group::{
    GroupError, OpDescriptor, Result,
    ops::{self, DESCRIPTOR_WORDS},
};
use std::ops::Range;

/// An area starts with the descriptor, on a line of its own.
const HEADER: usize = 64;
const PAGE: usize = 4096;

/// Where things lie in a base segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    ranks: usize,
    /// Bytes of an area after its header.
    payload: usize,
}

impl Layout {
    pub(super) fn new(ranks: usize, payload: usize) -> Self {
        Self { ranks, payload }
    }

    fn stride(&self) -> usize {
        (HEADER + self.payload).next_multiple_of(PAGE)
    }

    fn first(&self) -> usize {
        (self.ranks * size_of::<Line>()).next_multiple_of(PAGE)
    }

    pub(super) fn bytes(&self) -> usize {
        self.first() + 2 * self.ranks * self.stride()
    }

    fn header(&self, rank: usize, half: usize) -> Range<usize> {
        let start = self.first() + (2 * rank + half) * self.stride();
        start..start + HEADER
    }

    fn payload(&self, rank: usize, half: usize) -> Range<usize> {
        let start = self.header(rank, half).end;
        start..start + self.payload
    }
}

/// This rank's place in the protocol.
#[derive(Debug)]
pub(super) struct Rounds {
    segment: Segment,
    layout: Layout,
    rank: usize,
    turn: Turn,
}

impl Rounds {
    /// `segment` is fresh, of `layout.bytes()` bytes, and no other value of this rank uses it.
    pub(super) fn new(segment: Segment, layout: Layout, rank: usize) -> Self {
        assert!(segment.len() >= layout.bytes() && rank < layout.ranks);
        Self {
            segment,
            layout,
            rank,
            turn: Turn::first(),
        }
    }

    /// Bytes that a rank can write in a round.
    pub(super) fn payload(&self) -> usize {
        self.layout.payload
    }

    /// Writes the descriptor of the operation that starts with this round.
    pub(super) fn announce(&mut self, operation: &OpDescriptor) {
        let range = self.layout.header(self.rank, self.turn.writes());
        // SAFETY: the invariant: no rank reads this area before this one has published the
        // round, which takes `&mut self`, and so does every other way to write it.
        let header = unsafe { self.segment.write(range) };
        let words = ops::encode(operation);
        for (to, word) in header.as_chunks_mut().0.iter_mut().zip(words) {
            *to = word.to_ne_bytes();
        }
    }

    /// The descriptors that the ranks wrote in the round before.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = Option<OpDescriptor>> {
        (0..self.layout.ranks).map(|rank| {
            let range = self.layout.header(rank, self.turn.reads());
            // SAFETY: the invariant: all ranks have published that round, and write this area again
            // after this rank has published the present one, which takes `&mut self`.
            let header = unsafe { self.segment.read(range) };
            let mut words = [0; DESCRIPTOR_WORDS];
            for (word, from) in words.iter_mut().zip(header.as_chunks().0) {
                *word = u64::from_ne_bytes(*from);
            }
            ops::decode(&words)
        })
    }

    /// What all ranks wrote in the round before, and the memory to write for this one.
    pub(super) fn split(&mut self) -> (Peers<'_>, &mut [u8]) {
        let range = self.layout.payload(self.rank, self.turn.writes());
        // SAFETY: as in `announce`. `Peers` reads the other half of the areas.
        let own = unsafe { self.segment.write(range) };
        (Peers { rounds: self }, own)
    }

    /// What all ranks wrote in the round before.
    pub(super) fn peers(&self) -> Peers<'_> {
        Peers { rounds: self }
    }

    /// Publishes this round and waits until all ranks have.
    pub(super) fn advance(&mut self, patience: &Patience<'_>) -> Result<()> {
        let lines = self.segment.lines(self.layout.ranks);
        self.turn
            .advance(&lines[self.rank], |round| patience.wait(lines, round))
    }
}

/// The ranks' areas of a round that all have published.
#[derive(Clone, Copy)]
pub(super) struct Peers<'a> {
    rounds: &'a Rounds,
}

impl<'a> Peers<'a> {
    pub(super) fn area(&self, rank: usize) -> &'a [u8] {
        let Rounds {
            segment,
            layout,
            turn,
            ..
        } = self.rounds;
        assert!(rank < layout.ranks);
        // SAFETY: as in `descriptors`: while this borrow of the rounds lives, this rank does
        // not publish, so no rank gets to write this half.
        unsafe { segment.read(layout.payload(rank, turn.reads())) }
    }
}

/// A descriptor that does not decode.
pub(super) fn corrupt(rank: usize, peer: usize, operation: &OpDescriptor) -> GroupError {
    GroupError::Transport {
        rank,
        operation: operation.to_string(),
        cause: format!("rank {peer} wrote a header that is none (another version of burn-ddp?)"),
    }
}
