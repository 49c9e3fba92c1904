//! Ports for jobs that bind one themselves.

use std::{
    net::TcpStream,
    sync::atomic::{AtomicU16, Ordering},
};

/// A port that nobody listens on, outside the range from which the system picks (32768 and up), so that no other
/// test is given it before the job binds it.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (std::process::id() % 500) as u16 * 20;
    let next = || 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
    // A trial `bind` would hold the port a little longer than its socket lives, in a process that is being started meanwhile.
    let free = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).is_err();
    (0..10_000).map(|_| next()).find(free).unwrap()
}
