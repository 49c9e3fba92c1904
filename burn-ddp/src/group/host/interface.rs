//! Which network interface carries the data between machines.
//!
//! Without a choice it is the one by which a rank reaches rank 0. The forms of a choice are those of NCCL's
//! `NCCL_SOCKET_IFNAME`, since machines that need one have it in their scripts already.

use std::net::IpAddr;

/// `eth,ib` (interfaces whose names begin so), `=eth0,eth1` (these), and either behind `^` (all others).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InterfaceChoice {
    others: bool,
    exact: bool,
    names: Vec<String>,
}

impl InterfaceChoice {
    /// `None` for a text without a name.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (others, text) = match text.strip_prefix('^') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (exact, text) = match text.strip_prefix('=') {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty());
        let names: Vec<_> = names.map(str::to_owned).collect();
        (!names.is_empty()).then_some(Self {
            others,
            exact,
            names,
        })
    }

    fn allows(&self, interface: &str) -> bool {
        let named = self.names.iter().any(|name| match self.exact {
            true => interface == name,
            false => interface.starts_with(name.as_str()),
        });
        named != self.others
    }

    /// The address for data connections: `reaches_rank_0` if its interface is allowed, else the first address of an allowed
    /// interface, of the same family where there is one. Loopback and link-local addresses count only where
    /// rank 0 is reached by one. The error lists what there is.
    pub(super) fn choose(
        &self,
        interfaces: &[(String, IpAddr)],
        reaches_rank_0: IpAddr,
    ) -> Result<IpAddr, String> {
        let on_this_machine = reaches_rank_0.is_loopback();
        let allowed = interfaces.iter().filter(|(name, address)| {
            self.allows(name) && (on_this_machine || !is_local(*address))
        });
        let mut allowed: Vec<IpAddr> = allowed.map(|(_, address)| *address).collect();
        allowed.sort_by_key(|address| {
            let family = address.is_ipv4() != reaches_rank_0.is_ipv4();
            (*address != reaches_rank_0, family)
        });
        allowed.first().copied().ok_or_else(|| {
            let all = interfaces
                .iter()
                .map(|(name, address)| format!("{name} ({address})"));
            format!("it allows none of {}", all.collect::<Vec<_>>().join(", "))
        })
    }
}

/// An address that means another thing on every machine, or is none without a scope.
fn is_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_loopback(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local(),
    }
}

/// All addresses of this machine's interfaces.
pub(super) fn interfaces() -> std::io::Result<Vec<(String, IpAddr)>> {
    let all = if_addrs::get_if_addrs()?;
    Ok(all
        .into_iter()
        .map(|i| {
            let address = i.ip();
            (i.name, address)
        })
        .collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn machine() -> Vec<(String, IpAddr)> {
        [
            ("lo", "127.0.0.1"),
            ("docker0", "172.17.0.1"),
            ("eth0", "fe80::1"),
            ("eth0", "10.0.0.5"),
            ("eth1", "fd00::5"),
            ("eth1", "10.1.0.5"),
            ("ib0", "10.2.0.5"),
        ]
        .map(|(name, address)| (name.to_owned(), address.parse().unwrap()))
        .to_vec()
    }

    fn choose(text: &str, reaches_rank_0: &str) -> Result<String, String> {
        let choice = InterfaceChoice::parse(text).unwrap();
        choice
            .choose(&machine(), reaches_rank_0.parse().unwrap())
            .map(|address| address.to_string())
    }

    #[test]
    fn ddp_10_the_forms_of_an_interface_choice() {
        let control = "10.0.0.5";
        for (text, address) in [
            ("eth", "10.0.0.5"),
            ("=eth0", "10.0.0.5"),
            ("eth1", "10.1.0.5"),
            ("ib,eth1", "10.1.0.5"),
            ("=ib0", "10.2.0.5"),
            ("^docker", "10.0.0.5"),
            ("^eth,docker", "10.2.0.5"),
            ("^=eth0,docker0", "10.1.0.5"),
        ] {
            assert_eq!(choose(text, control).as_deref(), Ok(address), "{text}");
        }
        assert_eq!(choose("=eth1", "fd00::9").as_deref(), Ok("fd00::5"));
        assert_eq!(choose("lo", "127.0.0.1").as_deref(), Ok("127.0.0.1"));
        assert!(
            choose("=eth", control)
                .unwrap_err()
                .contains("ib0 (10.2.0.5)")
        );
        assert!(choose("lo", control).is_err());
        assert_eq!(InterfaceChoice::parse("^"), None);
    }
}
