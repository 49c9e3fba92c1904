//! From MASTER_ADDR to addresses.

use super::{
    super::{
        rendezvous_error::RendezvousError,
        secret::Secret,
        settings::{Endpoint, Rendezvous},
    },
    FIRST_PAUSE, LONGEST_PAUSE, REPORT_EVERY,
};
use crate::notice;
use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    thread,
    time::Instant,
};

pub(super) type Resolver = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

/// The system's resolver. Addresses are used as typed, in brackets or not.
pub(super) fn system(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let mut addresses: Vec<SocketAddr> = Vec::new();
    for address in (bare, port).to_socket_addrs()? {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

/// Every address of rank 0, in the resolver's order.
pub(super) fn resolve(settings: &Rendezvous, resolver: &Resolver) -> io::Result<Vec<SocketAddr>> {
    let addresses = resolver(&settings.master_addr, settings.master_port)?;
    if addresses.is_empty() {
        Err(io::Error::other("the name has no address"))
    } else {
        Ok(addresses)
    }
}

/// For rank 0, whose own name may appear after it has started, as that of a pod behind a headless service: tries until it has an address,
/// or until the time of the rendezvous, which began at `start`, is over.
pub(super) fn wait_for_name(
    settings: &Rendezvous,
    resolver: &Resolver,
    start: Instant,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    // At once: a name that is wrong should not look like a job that starts slowly.
    let mut report = start;
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match resolve(settings, resolver) {
            Ok(addresses) => return Ok(addresses),
            Err(error) => error,
        };
        let (rank, master) = (settings.rank, &settings.master_addr);
        let left = (start + settings.rendezvous_timeout).saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RendezvousError::Resolve {
                rank,
                master: master.clone(),
                elapsed: start.elapsed(),
                cause: error.to_string(),
            });
        }
        if Instant::now() >= report {
            report = Instant::now() + REPORT_EVERY;
            notice::warn(format_args!(
                "rank {rank} cannot resolve MASTER_ADDR {master:?}: {error}; it tries again and gives up in {left:.0?}"
            ));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The explicit secret, or the user's key if no other machine is involved.
pub(super) fn secret_for(
    settings: &Rendezvous,
    addresses: &[SocketAddr],
) -> Result<Secret, RendezvousError> {
    if let Some(secret) = &settings.secret {
        return Ok(secret.clone());
    }
    match addresses
        .iter()
        .find(|address| !address.ip().to_canonical().is_loopback())
    {
        None => Ok(Secret::of_this_user()?),
        Some(address) => Err(RendezvousError::SecretRequired {
            rank: settings.rank,
            master: Endpoint(&settings.master_addr, settings.master_port).to_string(),
            address: address.ip().to_string(),
        }),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use std::{cell::Cell, time::Duration};

    fn settings(master: &str) -> Rendezvous {
        Rendezvous::new(0, 2, master, 29500).unwrap()
    }

    fn text(addresses: &[SocketAddr]) -> Vec<String> {
        addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn ddp_10_addresses_are_used_as_typed() {
        for (typed, expected) in [
            ("127.0.0.1", "127.0.0.1:29500"),
            ("::1", "[::1]:29500"),
            ("[::1]", "[::1]:29500"),
            ("10.1.2.3", "10.1.2.3:29500"),
        ] {
            assert_eq!(
                text(&resolve(&settings(typed), &system).unwrap()),
                [expected]
            );
        }
    }

    #[test]
    fn ddp_10_the_resolvers_answers_are_all_kept_and_its_failure_is_named() {
        let both = |_: &str, port| {
            Ok(vec![
                SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], port)),
                SocketAddr::from(([127, 0, 0, 1], port)),
            ])
        };
        assert_eq!(
            text(&resolve(&settings("localhost"), &both).unwrap()),
            ["[::1]:29500", "127.0.0.1:29500"]
        );
        let fails = |_: &str, _| Err(io::Error::other("no such host"));
        let error = resolve(&settings("nowhere"), &fails).unwrap_err();
        assert_eq!(error.to_string(), "no such host");
        let empty = |_: &str, _| Ok(Vec::new());
        assert!(
            resolve(&settings("nowhere"), &empty)
                .unwrap_err()
                .to_string()
                .contains("no address")
        );
    }

    #[test]
    fn ddp_10_rank_0_waits_for_its_name() {
        let tries = Cell::new(0);
        let late = move |_: &str, port| {
            tries.set(tries.get() + 1);
            match tries.get() {
                3 => Ok(vec![SocketAddr::from(([10, 0, 0, 1], port))]),
                _ => Err(io::Error::other("not yet")),
            }
        };
        let found = wait_for_name(&settings("pod-0.train"), &late, Instant::now());
        assert_eq!(text(&found.unwrap()), ["10.0.0.1:29500"]);

        let never = |_: &str, _| Err(io::Error::other("no such host"));
        let limit = Duration::from_millis(30);
        let hasty = settings("nowhere").rendezvous_timeout(limit);
        let error = wait_for_name(&hasty, &never, Instant::now()).unwrap_err();
        let RendezvousError::Resolve { elapsed, .. } = &error else {
            panic!("{error}")
        };
        assert!(*elapsed >= limit);
        let error = error.to_string();
        for part in [
            "rank 0: cannot resolve MASTER_ADDR \"nowhere\", tried for ",
            "ms: no such host. ",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn ddp_36_a_reachable_address_needs_an_explicit_secret() {
        let addresses = |ip: &str| vec![SocketAddr::new(ip.parse().unwrap(), 29500)];
        for open in ["10.0.0.1", "0.0.0.0", "::", "fe80::1"] {
            let error = secret_for(&settings(open), &addresses(open))
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(open) && error.contains("BURN_DDP_SECRET"),
                "{error}"
            );
        }
        let given = Secret::new(*b"given to the test").unwrap();
        let settings = settings("10.0.0.1").secret(given.clone());
        assert_eq!(
            secret_for(&settings, &addresses("10.0.0.1")).unwrap(),
            given
        );
    }
}
