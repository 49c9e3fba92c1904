//! From MASTER_ADDR to addresses.

use super::super::{
    rendezvous_error::RendezvousError,
    secret::Secret,
    settings::{Endpoint, Rendezvous},
};
use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
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
pub(super) fn resolve(
    settings: &Rendezvous,
    resolver: &Resolver,
) -> Result<Vec<SocketAddr>, RendezvousError> {
    let master = &settings.master_addr;
    let failed = |cause: String| RendezvousError::Resolve {
        rank: settings.rank,
        master: master.clone(),
        cause,
    };
    let addresses =
        resolver(master, settings.master_port).map_err(|error| failed(error.to_string()))?;
    if addresses.is_empty() {
        Err(failed("the name has no address".into()))
    } else {
        Ok(addresses)
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
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
        let error = resolve(&settings("nowhere"), &fails)
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "rank 0: cannot resolve MASTER_ADDR \"nowhere\": no such host"
        );
        let empty = |_: &str, _| Ok(Vec::new());
        assert!(
            resolve(&settings("nowhere"), &empty)
                .unwrap_err()
                .to_string()
                .contains("no address")
        );
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
