//! A rank's output, line by line, under its name.

use crate::notice;
use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Read, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Longest line that is kept together; a longer one comes in pieces.
const MAX_LINE: usize = 64 * 1024;
/// How much of a rank's stderr a failure report shows.
const TAIL_LINES: usize = 20;
/// Longest line in a report, in bytes.
const TAIL_LINE: usize = 512;

/// The last lines of a rank's stderr.
#[derive(Clone, Debug, Default)]
pub(super) struct Tail(Arc<Mutex<VecDeque<Vec<u8>>>>);

impl Tail {
    fn push(&self, line: &[u8]) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(line[..line.len().min(TAIL_LINE)].to_vec());
    }

    pub(super) fn lines(&self) -> Vec<String> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines
            .iter()
            .map(|line| String::from_utf8_lossy(line).into_owned())
            .collect()
    }
}

/// A file with a rank's stdout and stderr.
#[derive(Clone, Debug)]
pub(super) struct Log {
    /// `None` after the first write that failed.
    file: Arc<Mutex<Option<File>>>,
    path: PathBuf,
}

impl Log {
    /// Empties what is there.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = Arc::new(Mutex::new(Some(File::create(path)?)));
        let path = path.to_owned();
        Ok(Self { file, path })
    }

    fn push(&self, line: &[u8]) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let written = file
            .as_mut()
            .map_or(Ok(()), |file| file.write_all(&[line, b"\n"].concat()));
        if let Err(error) = written {
            *file = None;
            notice::warn(format_args!(
                "{}: {error}; nothing more is written to it",
                self.path.display()
            ));
        }
    }
}

/// Where a rank's lines go besides the launcher's own output.
#[derive(Clone, Debug, Default)]
pub(super) struct Copies {
    pub(super) tail: Option<Tail>,
    pub(super) log: Option<Log>,
}

/// Copies `from` to `to` until its end, `prefix` before each line. Each line goes out in one write, so that
/// lines of several ranks never mix. Bytes that are no UTF-8 pass unchanged.
///
/// A closed or full `to` does not stop the reading: a rank must not block on its output.
pub(super) fn pump(mut from: impl Read, mut to: impl Write, prefix: &str, copies: &Copies) {
    let mut emit = |line: &[u8]| {
        let mut out = Vec::with_capacity(prefix.len() + line.len() + 1);
        out.extend_from_slice(prefix.as_bytes());
        out.extend_from_slice(line);
        out.push(b'\n');
        let _ = to.write_all(&out).and_then(|()| to.flush());
        if let Some(tail) = &copies.tail {
            tail.push(line);
        }
        if let Some(log) = &copies.log {
            log.push(line);
        }
    };
    let mut line = Vec::new();
    let mut chunk = vec![0; 8192];
    loop {
        let mut read = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(len) => &chunk[..len],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        while let Some(end) = read.iter().position(|byte| *byte == b'\n') {
            line.extend_from_slice(&read[..end]);
            emit(&line);
            line.clear();
            read = &read[end + 1..];
        }
        line.extend_from_slice(read);
        if line.len() >= MAX_LINE {
            emit(&line);
            line.clear();
        }
    }
    if !line.is_empty() {
        emit(&line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies(tail: &Tail) -> Copies {
        Copies {
            tail: Some(tail.clone()),
            log: None,
        }
    }

    fn pumped(input: &[u8]) -> (Vec<u8>, Tail) {
        let (mut out, tail) = (Vec::new(), Tail::default());
        pump(input, &mut out, "[rank 1] ", &copies(&tail));
        (out, tail)
    }

    #[test]
    fn every_line_has_the_prefix() {
        let (out, tail) = pumped(b"one\n\ntwo\xff\xfe\nlast without end");
        assert_eq!(
            out,
            b"[rank 1] one\n[rank 1] \n[rank 1] two\xff\xfe\n[rank 1] last without end\n"
        );
        assert_eq!(
            tail.lines(),
            ["one", "", "two\u{fffd}\u{fffd}", "last without end"]
        );
    }

    #[test]
    fn an_endless_line_comes_in_pieces() {
        let (out, _) = pumped(&vec![b'x'; 3 * MAX_LINE]);
        let lines: Vec<&[u8]> = out.split(|byte| *byte == b'\n').collect();
        assert_eq!(
            lines.len(),
            4,
            "three pieces and the empty rest after the last"
        );
        assert!(
            lines[..3]
                .iter()
                .all(|line| line.len() == MAX_LINE + "[rank 1] ".len())
        );
    }

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let input: String = (0..50).map(|i| format!("line {i}\n")).collect();
        let (_, tail) = pumped(input.as_bytes());
        assert_eq!(tail.lines().len(), TAIL_LINES);
        assert_eq!(tail.lines()[0], "line 30");
        assert_eq!(tail.lines()[19], "line 49");
    }

    #[test]
    fn a_closed_output_does_not_stop_the_reading() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let tail = Tail::default();
        pump(&b"a\nb\n"[..], Closed, "", &copies(&tail));
        assert_eq!(tail.lines(), ["a", "b"]);
    }
}
