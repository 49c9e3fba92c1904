//! Ports for jobs that bind one themselves.

use std::{
    fs,
    net::{Ipv4Addr, TcpStream},
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

/// The IPv4 addresses, and the tables of IPv6 ones, on which somebody listens at `port`.
pub fn listening_addresses(port: u16) -> Vec<String> {
    let listening = |path: &str| {
        let table = fs::read_to_string(path).unwrap_or_default();
        let address = |line: &str| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let (address, local) = columns[1].rsplit_once(':').unwrap();
            let here = u16::from_str_radix(local, 16) == Ok(port) && columns[3] == "0A";
            here.then(|| address.to_owned())
        };
        table
            .lines()
            .skip(1)
            .filter_map(address)
            .collect::<Vec<_>>()
    };
    let v4 = listening("/proc/net/tcp").into_iter();
    let v4 = v4.map(|hex| {
        Ipv4Addr::from(u32::from_str_radix(&hex, 16).unwrap().to_ne_bytes()).to_string()
    });
    v4.chain(listening("/proc/net/tcp6")).collect()
}
