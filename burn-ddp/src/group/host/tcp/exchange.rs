//! One step of a collective: every rank sends something to every other and receives something from it.
//!
//! All connections are served at once and none blocks, so no order of full socket buffers can
//! deadlock. Each message begins with the sender's descriptor; it is compared with ours before the step counts as
//! done, and a difference stops the job on all ranks.

use super::super::{
    control::Control,
    data_connection::{self, GRACE, SLICE},
    deadline::Deadline,
    poll,
};
use crate::group::{
    GroupError, OpDescriptor, Result,
    ops::{self, Call, DESCRIPTOR_WORDS},
};
use rustix::event::{PollFd, PollFlags};
use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::TcpStream,
    time::Instant,
};

/// The descriptor and the number of the step.
const HEADER: usize = (DESCRIPTOR_WORDS + 1) * size_of::<u64>();

/// What goes to and comes from one peer in a step; up to two pieces each, so that two stages of a pipeline share it.
#[derive(Debug)]
pub(super) struct Transfer<'a> {
    pub(super) peer: usize,
    pub(super) send: [&'a [u8]; 2],
    pub(super) recv: [&'a mut [u8]; 2],
}

/// A collective under way.
pub(super) struct Exchange<'a> {
    pub(super) control: &'a dyn Control,
    pub(super) streams: &'a [Vec<TcpStream>],
    pub(super) ours: OpDescriptor,
    deadline: Deadline<'a>,
    step: u64,
}

/// A transfer and how far it has come.
struct Progress<'a> {
    transfer: Transfer<'a>,
    stream: &'a TcpStream,
    sent: usize,
    received: usize,
    header: [u8; HEADER],
    matches: bool,
    closed: bool,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        control: &'a dyn Control,
        streams: &'a [Vec<TcpStream>],
        call: Call,
        ours: OpDescriptor,
    ) -> Self {
        Self {
            control,
            streams,
            ours,
            deadline: Deadline::new(control, call),
            step: 0,
        }
    }

    /// Runs one step to its end. `transfers` has one entry for each peer, in rank order.
    pub(super) fn step(&mut self, transfers: Vec<Transfer<'_>>) -> Result<()> {
        let header = self.header();
        let mut all: Vec<Progress<'_>> = transfers
            .into_iter()
            .filter_map(|transfer| {
                Some(Progress::new(
                    self.streams.get(transfer.peer)?.first()?,
                    transfer,
                ))
            })
            .collect();
        let mut closed_since = None;
        self.check(&mut all)?;
        loop {
            // All sends before any receive: should the comparison fail, every peer has our side of it.
            let mut moved = false;
            for progress in &mut all {
                moved |= progress.push(&header);
            }
            for progress in &mut all {
                moved |= self.pull(progress)?;
            }
            if all.iter().all(Progress::done) {
                self.step += 1;
                return Ok(());
            }
            if moved {
                continue;
            }
            self.check(&mut all)?;
            self.judge(&all, &mut closed_since)?;
            wait(&all).map_err(|error| self.failed(error.to_string()))?;
        }
    }

    fn header(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        let words = ops::encode(&self.ours).into_iter().chain([self.step]);
        for (place, word) in header.chunks_exact_mut(size_of::<u64>()).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        header
    }

    fn rank(&self) -> usize {
        self.control.rank()
    }

    /// Receives what is there; an error if the peer is in another operation.
    fn pull(&self, progress: &mut Progress<'_>) -> Result<bool> {
        let moved = progress.pull();
        if progress.matches || progress.received < HEADER {
            return Ok(moved);
        }
        let mut words = [0; DESCRIPTOR_WORDS + 1];
        for (word, bytes) in words.iter_mut().zip(progress.header.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let [descriptor @ .., step] = words;
        let peer = progress.transfer.peer;
        match ops::decode(&descriptor) {
            Some(theirs) if theirs == self.ours && step == self.step => {
                progress.matches = true;
                Ok(moved)
            }
            Some(theirs) if theirs != self.ours => Err(GroupError::Mismatch {
                rank: self.rank(),
                peer,
                ours: Box::new(self.ours),
                theirs: Box::new(theirs),
            }),
            _ => Err(self.failed(format!("rank {peer} sent a malformed header"))),
        }
    }

    /// The control plane's verdict. A departure counts only for peers whose connection has come to its
    /// end: what they sent before they left may still be on its way.
    fn check(&self, all: &mut [Progress<'_>]) -> Result<()> {
        let gone = || {
            all.iter()
                .filter(|progress| progress.closed)
                .map(|progress| progress.transfer.peer)
                .collect()
        };
        let verdict = self.control.check(&gone, &|| self.ours.to_string());
        if let Err(GroupError::Mismatch { rank, .. }) = &verdict
            && *rank != self.rank()
        {
            // Others have found it first; this rank's own comparison says more here.
            for progress in all {
                self.pull(progress)?;
            }
        }
        verdict
    }

    /// Nothing moves: is it over?
    fn judge(&self, all: &[Progress<'_>], closed_since: &mut Option<Instant>) -> Result<()> {
        if let Some(progress) = all.iter().find(|progress| progress.closed) {
            let now = Instant::now();
            if now.duration_since(*closed_since.get_or_insert(now)) > GRACE {
                let peer = progress.transfer.peer;
                return Err(data_connection::lost(self.control, &self.ours, peer));
            }
            return Ok(());
        }
        let peers = |waiting: &dyn Fn(&Progress<'_>) -> bool| {
            let waiting = all.iter().filter(|progress| waiting(progress));
            waiting.map(|progress| progress.transfer.peer).collect()
        };
        let missing = || {
            let silent: Vec<usize> = peers(&|progress| progress.received < progress.expected());
            match silent.is_empty() {
                false => silent,
                // They have sent everything and do not read.
                true => peers(&|progress| !progress.done()),
            }
        };
        self.deadline.check(&|| self.ours.to_string(), &missing)
    }

    fn failed(&self, cause: String) -> GroupError {
        data_connection::failed(self.control, &self.ours, cause)
    }
}

impl<'a> Progress<'a> {
    fn new(stream: &'a TcpStream, transfer: Transfer<'a>) -> Self {
        Self {
            transfer,
            stream,
            sent: 0,
            received: 0,
            header: [0; HEADER],
            matches: false,
            closed: false,
        }
    }

    fn to_send(&self) -> usize {
        HEADER
            + self
                .transfer
                .send
                .iter()
                .map(|piece| piece.len())
                .sum::<usize>()
    }

    fn expected(&self) -> usize {
        HEADER
            + self
                .transfer
                .recv
                .iter()
                .map(|piece| piece.len())
                .sum::<usize>()
    }

    fn done(&self) -> bool {
        self.matches && self.sent == self.to_send() && self.received == self.expected()
    }

    /// Header and payload in one write.
    fn push(&mut self, header: &[u8; HEADER]) -> bool {
        if self.closed || self.sent == self.to_send() {
            return false;
        }
        let [first, second] = self.transfer.send;
        let mut pieces = [
            IoSlice::new(header),
            IoSlice::new(first),
            IoSlice::new(second),
        ];
        let mut pieces = &mut pieces[..];
        IoSlice::advance_slices(&mut pieces, self.sent);
        let result = self.stream.write_vectored(pieces);
        let moved = self.moved(result);
        self.sent += moved;
        moved > 0
    }

    /// Header and payload in one read; nothing of it is used before the header has been compared.
    fn pull(&mut self) -> bool {
        if self.closed || self.received == self.expected() {
            return false;
        }
        let [first, second] = &mut self.transfer.recv;
        let mut pieces = [
            IoSliceMut::new(&mut self.header),
            IoSliceMut::new(first),
            IoSliceMut::new(second),
        ];
        let mut pieces = &mut pieces[..];
        IoSliceMut::advance_slices(&mut pieces, self.received);
        let result = self.stream.read_vectored(pieces);
        let moved = self.moved(result);
        self.received += moved;
        moved > 0
    }

    fn moved(&mut self, result: io::Result<usize>) -> usize {
        let moved = data_connection::moved(result);
        self.closed |= moved.is_none();
        moved.unwrap_or(0)
    }
}

fn wait(all: &[Progress<'_>]) -> io::Result<()> {
    let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(all.len());
    for progress in all.iter().filter(|progress| !progress.closed) {
        let mut flags = PollFlags::empty();
        if progress.sent < progress.to_send() {
            flags |= PollFlags::OUT;
        }
        if progress.received < progress.expected() {
            flags |= PollFlags::IN;
        }
        if !flags.is_empty() {
            fds.push(PollFd::new(progress.stream, flags));
        }
    }
    poll::wait(&mut fds, SLICE)
}
