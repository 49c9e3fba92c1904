//! Waiting on several sockets at once, and waking such a wait from another thread.

use rustix::event::{PollFd, PollFlags, Timespec};
use std::{
    io::{self, Read, Write},
    os::{fd::AsFd, unix::net::UnixStream},
    time::Duration,
};

/// Sleeps until one of `fds` is ready, `timeout` passes or a signal arrives; the caller looks at `revents`.
pub(super) fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    let timeout = Timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Something to read, an end of file or an error: all of these show in the next read.
pub(super) fn readable(fd: &PollFd<'_>) -> bool {
    fd.revents()
        .intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
}

/// Ends another thread's [`wait`].
#[derive(Debug)]
pub(super) struct Waker {
    near: UnixStream,
    far: UnixStream,
}

impl Waker {
    pub(super) fn new() -> io::Result<Self> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        Ok(Self { near, far })
    }

    /// A full buffer means that a wake-up is pending already.
    pub(super) fn wake(&self) {
        let _ = (&self.near).write(&[1]);
    }

    /// Forgets the wake-ups so far; to be called before the waiter looks at what it was woken for.
    pub(super) fn drain(&self) {
        let mut sink = [0; 64];
        while matches!((&self.far).read(&mut sink), Ok(n) if n == sink.len()) {}
    }

    /// What to wait on.
    pub(super) fn fd(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(self.far.as_fd(), PollFlags::IN)
    }
}
