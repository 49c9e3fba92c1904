//! Ports for jobs that bind one themselves.

use std::{
    net::TcpListener,
    sync::atomic::{AtomicU16, Ordering},
};

/// A port that nobody listens on, outside the range from which the system picks (32768 and up), so that no other
/// test is given it before the job binds it.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = std::process::id() as u16 % 500 * 20;
    let candidates =
        (0..10_000).map(|_| 20_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000);
    let mut free = candidates.filter(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    free.next().unwrap()
}
