//! One stream of bytes over several connections.

use std::net::TcpStream;

/// The connections to a neighbour, which take turns of a stripe each, and where the stream of one operation stands: both ends begin it with the first.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripes<'a> {
    streams: &'a [TcpStream],
    stripe: usize,
    /// Bytes that have moved.
    position: usize,
}

impl<'a> Stripes<'a> {
    /// There is one connection at least.
    pub(super) fn new(streams: &'a [TcpStream], stripe: usize) -> Self {
        Self {
            streams,
            stripe,
            position: 0,
        }
    }

    /// The connection whose turn it is, and for how many bytes.
    pub(super) fn current(&self) -> (&'a TcpStream, usize) {
        match self.streams {
            [only] => (only, usize::MAX),
            several => {
                let turn = self.position / self.stripe % several.len();
                (&several[turn], self.stripe - self.position % self.stripe)
            }
        }
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        self.position += bytes;
    }
}
