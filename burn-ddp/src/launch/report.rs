//! What a failing rank tells the launcher, on a pipe of its own.

use super::blame::Blame;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};

/// Longest record, with its length prefix: what a pipe takes in one piece (`PIPE_BUF` on Linux), so
/// that records of several threads never mix.
const MAX_RECORD: usize = 4096;
/// Longest text in a record, which leaves room for the other fields.
const MAX_TEXT: usize = 3500;
/// Most ranks in a record.
const MAX_SILENT: usize = 32;

/// One failure in a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    /// When, in nanoseconds of a clock that all processes of the machine share.
    pub(super) nanos: u64,
    pub(super) pid: u32,
    pub(super) kind: Kind,
    /// Panic message with its place, or the error's text.
    pub(super) text: String,
    /// A consequence of another rank's failure.
    pub(super) secondary: bool,
    /// Ranks that did not answer, the first few.
    pub(super) silent: Vec<usize>,
    /// See [`Blame::generation`].
    pub(super) generation: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// A panic has begun somewhere; it may still be caught.
    PanicBegun,
    /// A panic left the training function.
    Panic,
    /// The training function returned an error.
    Error,
}

impl Record {
    pub(super) fn new(kind: Kind, text: &str, mut blame: Blame) -> Self {
        blame.silent.truncate(MAX_SILENT);
        let text = shorten(text, MAX_TEXT);
        Self {
            nanos: now(),
            pid: std::process::id(),
            kind,
            text,
            secondary: blame.secondary,
            silent: blame.silent,
            generation: blame.generation,
        }
    }

    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let body = postcard::to_stdvec(self).map_err(io::Error::other)?;
        let len = u16::try_from(body.len()).map_err(io::Error::other)?;
        let mut bytes = len.to_le_bytes().to_vec();
        bytes.extend(body);
        to.write_all(&bytes)
    }

    /// The next record, `None` at the end.
    pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut len = [0; 2];
        match from.read_exact(&mut len) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            result => result?,
        }
        let mut body = vec![0; usize::from(u16::from_le_bytes(len))];
        if body.len() > MAX_RECORD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "a rank's report is too long",
            ));
        }
        from.read_exact(&mut body)?;
        postcard::from_bytes(&body)
            .map(Some)
            .map_err(io::Error::other)
    }
}

/// `text` cut to at most `max` bytes at a character boundary, with a mark where something is missing.
fn shorten(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let end = (0..=max)
        .rev()
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(0);
    format!("{} [...]", &text[..end])
}

/// Nanoseconds of a clock that is common to all processes of this machine and, on Unix, never set back.
#[cfg(unix)]
pub(super) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (time.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(time.tv_nsec as u64)
}

/// See the Unix version.
#[cfg(not(unix))]
pub(super) fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn records_survive_the_pipe_and_stay_within_it() {
        let short = Record::new(Kind::Error, "no such file", Blame::default());
        let blame = Blame {
            secondary: true,
            silent: vec![usize::MAX; 1000],
            generation: Some(u32::MAX),
        };
        let long = Record::new(Kind::Panic, &"é".repeat(5000), blame);
        let mut bytes = Vec::new();
        short.write(&mut bytes).unwrap();
        let first = bytes.len();
        long.write(&mut bytes).unwrap();
        assert!(bytes.len() - first <= MAX_RECORD);
        assert!(long.text.ends_with("é [...]"));
        let mut from = &bytes[..];
        assert_eq!(Record::read(&mut from).unwrap(), Some(short));
        assert_eq!(Record::read(&mut from).unwrap(), Some(long));
        assert_eq!(Record::read(&mut from).unwrap(), None);
    }

    #[test]
    fn a_damaged_report_is_an_error() {
        assert!(Record::read(&mut &[0xff, 0xff, 1, 2][..]).is_err());
        assert!(Record::read(&mut &[3, 0, 0xff, 0xff, 0xff][..]).is_err());
        assert!(Record::read(&mut &[9, 0, 1][..]).is_err());
    }
}
