//! Length-prefixed frames, with a deadline on every read and write.
//!
//! A frame is a little-endian `u32` length and that many bytes of postcard. The length is compared
//! with the bound of the message kind before anything is allocated for it.

use serde::{Serialize, de::DeserializeOwned};
use std::{
    io::{self, ErrorKind, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

const PREFIX: usize = size_of::<u32>();

/// Time left until `deadline`, or the error of a wait that is over.
pub(super) fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        Err(ErrorKind::TimedOut.into())
    } else {
        Ok(left)
    }
}

/// Reads exactly `buffer.len()` bytes from a blocking socket.
pub(super) fn read_exact(
    mut stream: &TcpStream,
    buffer: &mut [u8],
    deadline: Instant,
) -> io::Result<()> {
    let mut done = 0;
    while done < buffer.len() {
        stream.set_read_timeout(Some(remaining(deadline)?))?;
        match stream.read(&mut buffer[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) => retry(error)?,
        }
    }
    Ok(())
}

/// Writes all of `bytes` to a blocking socket.
pub(super) fn write_all(mut stream: &TcpStream, bytes: &[u8], deadline: Instant) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        stream.set_write_timeout(Some(remaining(deadline)?))?;
        match stream.write(&bytes[done..]) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(error) => retry(error)?,
        }
    }
    Ok(())
}

/// Socket time-outs show as `WouldBlock` on Unix; the next round's `remaining` turns them into `TimedOut`.
fn retry(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(error),
    }
}

/// The bytes of one frame.
pub(super) fn encode<T: Serialize>(message: &T, limit: usize) -> io::Result<Vec<u8>> {
    let frame = postcard::to_extend(message, vec![0; PREFIX]).map_err(invalid)?;
    let length = frame.len() - PREFIX;
    let prefix = u32::try_from(length).ok().filter(|_| length <= limit);
    let Some(prefix) = prefix else {
        return Err(invalid(format!(
            "a message of {length} bytes is over its limit of {limit} bytes"
        )));
    };
    let mut frame = frame;
    frame[..PREFIX].copy_from_slice(&prefix.to_le_bytes());
    Ok(frame)
}

/// Sends one frame on a blocking socket.
pub(super) fn send<T: Serialize>(
    stream: &TcpStream,
    message: &T,
    limit: usize,
    deadline: Instant,
) -> io::Result<()> {
    write_all(stream, &encode(message, limit)?, deadline)
}

/// Receives one frame of at most `limit` bytes from a blocking socket.
pub(super) fn receive<T: DeserializeOwned>(
    stream: &TcpStream,
    limit: usize,
    deadline: Instant,
) -> io::Result<T> {
    let mut prefix = [0; PREFIX];
    read_exact(stream, &mut prefix, deadline)?;
    let mut body = vec![0; bounded(prefix, limit)?];
    read_exact(stream, &mut body, deadline)?;
    decode(&body)
}

/// The message of a whole frame that came by another way.
pub(super) fn decode_frame<T: DeserializeOwned>(frame: &[u8]) -> io::Result<T> {
    let (prefix, body) = frame
        .split_first_chunk::<PREFIX>()
        .ok_or(ErrorKind::UnexpectedEof)?;
    if bounded(*prefix, body.len())? != body.len() {
        return Err(invalid("a message with bytes after its end"));
    }
    decode(body)
}

/// Collects frames from a non-blocking socket.
#[derive(Debug)]
pub(super) struct FrameReader {
    buffer: Vec<u8>,
    limit: usize,
}

/// What one [`FrameReader::fill`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fill {
    /// Some bytes came.
    Data,
    /// Nothing there at the moment.
    Empty,
    /// The peer closed its end.
    Eof,
}

impl FrameReader {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            limit,
        }
    }

    /// Reads what is there, one buffer full at most, so that what is held stays near the limit.
    pub(super) fn fill(&mut self, mut stream: &TcpStream) -> io::Result<Fill> {
        let mut chunk = [0; 16 << 10];
        loop {
            return match stream.read(&mut chunk) {
                Ok(0) => Ok(Fill::Eof),
                Ok(n) => {
                    self.buffer.extend_from_slice(&chunk[..n]);
                    Ok(Fill::Data)
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Fill::Empty),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
        }
    }

    /// As if a socket had had `bytes`.
    #[cfg(any(test, fuzzing))]
    pub(super) fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Forgets what was read and not taken.
    pub(super) fn clear(&mut self) {
        self.buffer.clear();
    }

    /// The next whole frame, if there is one.
    pub(super) fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX>() else {
            return Ok(None);
        };
        let length = bounded(*prefix, self.limit)?;
        let Some(body) = rest.get(..length) else {
            return Ok(None);
        };
        let message = decode(body)?;
        self.buffer.drain(..PREFIX + length);
        Ok(Some(message))
    }
}

fn bounded(prefix: [u8; PREFIX], limit: usize) -> io::Result<usize> {
    let length = u32::from_le_bytes(prefix) as usize;
    if length > limit {
        return Err(invalid(format!(
            "the peer announced a message of {length} bytes; the limit is {limit}"
        )));
    }
    Ok(length)
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(invalid("a message with bytes after its end")),
        Err(error) => Err(invalid(error)),
    }
}

fn invalid(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, cause)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near, listener.accept().unwrap().0)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn a_frame_is_its_length_and_postcard() {
        // postcard: a string is its varint length and its bytes.
        assert_eq!(encode(&"ab", 3).unwrap(), [3, 0, 0, 0, 2, b'a', b'b']);
        assert_eq!(
            encode(&"abc", 3).unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }

    #[test]
    fn frames_round_trip_in_order() {
        let (near, far) = pair();
        send(&near, &(1u8, "x".to_owned()), 64, soon()).unwrap();
        send(&near, &(2u8, "y".to_owned()), 64, soon()).unwrap();
        assert_eq!(
            receive::<(u8, String)>(&far, 64, soon()).unwrap(),
            (1, "x".to_owned())
        );
        assert_eq!(
            receive::<(u8, String)>(&far, 64, soon()).unwrap(),
            (2, "y".to_owned())
        );
    }

    #[test]
    fn a_huge_length_is_refused_before_the_body() {
        let (near, far) = pair();
        write_all(&near, &u32::MAX.to_le_bytes(), soon()).unwrap();
        let error = receive::<String>(&far, 64, soon()).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("4294967295 bytes; the limit is 64"),
            "{error}"
        );
    }

    #[test]
    fn a_silent_or_closed_peer_ends_the_read() {
        let (near, far) = pair();
        let error =
            receive::<String>(&far, 64, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        drop(near);
        assert_eq!(
            receive::<String>(&far, 64, soon()).unwrap_err().kind(),
            ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn the_reader_joins_pieces_and_splits_runs() {
        let (mut near, far) = pair();
        far.set_nonblocking(true).unwrap();
        let mut reader = FrameReader::new(8);
        let mut run = encode(&7u8, 8).unwrap();
        run.extend(encode(&9u8, 8).unwrap());
        let mut seen = Vec::new();
        for byte in run {
            near.write_all(&[byte]).unwrap();
            while reader.fill(&far).unwrap() == Fill::Empty {
                std::thread::yield_now();
            }
            while let Some(value) = reader.next::<u8>().unwrap() {
                seen.push(value);
            }
        }
        assert_eq!(seen, [7, 9]);
        assert!(reader.buffer.is_empty());
        near.write_all(&9u32.to_le_bytes()).unwrap();
        drop(near);
        while reader.fill(&far).unwrap() != Fill::Eof {}
        assert_eq!(
            reader.next::<u8>().unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }

    #[test]
    fn trailing_bytes_are_an_error() {
        let (near, far) = pair();
        write_all(&near, &[2, 0, 0, 0, 5, 6], soon()).unwrap();
        assert_eq!(
            receive::<u8>(&far, 64, soon()).unwrap_err().kind(),
            ErrorKind::InvalidData
        );
    }
}
