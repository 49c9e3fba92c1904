//! Several hosts on one machine: network namespaces, joined by a bridge.

use crate::far_link::{self, Relay};
use std::{
    process::{Command, Output},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

/// Rank 0's port; every host has ports of its own.
pub const PORT: u16 = 29500;

/// `required`: a test that needs hosts (or the right to mount) fails where it would be skipped. For the gate, which should not be
/// green because nothing ran.
const REQUIRED: &str = "BURN_DDP_TEST_HOSTS";

/// Says why a test is skipped, or fails it if it must not be.
pub fn skip(why: &str) {
    let required = std::env::var(REQUIRED).is_ok_and(|value| value == "required");
    assert!(!required, "{REQUIRED}=required, but {why}");
    eprintln!("skipped: {why}");
}

/// Hosts that can reach one another at [`address`](Self::address). They are gone when this is dropped.
#[derive(Debug)]
pub struct Hosts {
    /// Namespaces of the hosts.
    names: Vec<String>,
    /// The namespace of the bridge.
    switch: String,
    relay: Option<Relay>,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl Hosts {
    /// Makes `count` hosts, or [skips](skip) the test.
    pub fn new(count: usize) -> Option<Self> {
        Self::named(count).made(|hosts| hosts.bridge())
    }

    fn named(count: usize) -> Self {
        let prefix = format!(
            "bd{}x{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        Self {
            names: (0..count).map(|k| format!("{prefix}h{k}")).collect(),
            switch: format!("{prefix}s"),
            relay: None,
        }
    }

    /// Two hosts at the ends of a link on which everything takes `delay`, and `loss` hundredths of the packets get lost.
    pub fn far(delay: Duration, loss: u32) -> Option<Self> {
        Self::named(2).made(|hosts| {
            let mut ends = Vec::new();
            for (k, name) in hosts.names.iter().enumerate() {
                ip(&format!("netns add {name}"))?;
                // Names of devices are short, and unique on the machine until the device has moved.
                let device = format!("bt{}{k}", std::process::id());
                ends.push(far_link::tap(&device).map_err(|e| format!("making a TAP device: {e}"))?);
                ip(&format!("link set {device} netns {name} name eth0"))?;
                hosts.configure(k)?;
            }
            let ends = ends.try_into().map_err(|_| "two ends".to_owned())?;
            let relay = Relay::start(ends, delay, loss).map_err(|e| e.to_string())?;
            hosts.relay = Some(relay);
            Ok(())
        })
    }

    /// In a rank, which is on one of the hosts already, nothing is made.
    fn made(mut self, make: impl FnOnce(&mut Self) -> Result<(), String>) -> Option<Self> {
        if super::in_rank() {
            return Some(self);
        }
        match make(&mut self) {
            Ok(()) => Some(self),
            Err(why) => {
                skip(&format!("hosts cannot be made here: {why}"));
                None
            }
        }
    }

    fn bridge(&self) -> Result<(), String> {
        let switch = &self.switch;
        succeed(Command::new("nft").arg("--version"))?;
        ip(&format!("netns add {switch}"))?;
        ip(&format!("-n {switch} link add bridge type bridge"))?;
        ip(&format!("-n {switch} link set bridge up"))?;
        for (k, name) in self.names.iter().enumerate() {
            ip(&format!("netns add {name}"))?;
            ip(&format!(
                "link add eth0 netns {name} type veth peer name port{k} netns {switch}"
            ))?;
            ip(&format!("-n {switch} link set port{k} master bridge up"))?;
            self.configure(k)?;
        }
        Ok(())
    }

    fn configure(&self, host: usize) -> Result<(), String> {
        let (name, address) = (&self.names[host], self.address(host));
        ip(&format!("-n {name} addr add {address}/24 dev eth0"))?;
        let number = host + 1;
        ip(&format!(
            "-n {name} addr add fd77::{number}/64 dev eth0 nodad"
        ))?;
        ip(&format!("-n {name} link set eth0 up"))?;
        ip(&format!("-n {name} link set lo up"))
    }

    /// IPv4 address of a host.
    pub fn address(&self, host: usize) -> String {
        format!("10.77.0.{}", host + 1)
    }

    /// Starts `program` on a host.
    pub fn command(&self, host: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.names[host]])
            .arg(program);
        command
    }

    /// Runs a command line on a host.
    #[track_caller]
    pub fn run(&self, host: usize, line: &str) {
        let mut words = line.split_whitespace();
        let mut command = self.command(host, words.next().unwrap());
        succeed(command.args(words)).unwrap();
    }

    /// Takes a host's link down.
    pub fn cut(&self, host: usize) {
        ip(&format!("-n {} link set port{host} down", self.switch)).unwrap();
    }

    /// Drops this share (in hundredths) of the packets that a host receives, and of those that it sends.
    pub fn lose(&self, host: usize, hundredths: u32) {
        self.run(host, "nft add table inet loss");
        let random = match hundredths {
            100.. => String::new(),
            share => format!("numgen random mod 100 < {share}"),
        };
        for (hook, way) in [("input", "iifname"), ("output", "oifname")] {
            self.run(
                host,
                &format!(
                    "nft add chain inet loss {hook} {{ type filter hook {hook} priority 0 ; }}"
                ),
            );
            self.run(
                host,
                &format!("nft add rule inet loss {hook} {way} eth0 {random} drop"),
            );
        }
    }

    /// Limits what every host sends, in Mbit/s.
    pub fn shape(&self, mbit: u32) {
        for host in 0..self.names.len() {
            self.run(
                host,
                &format!("tc qdisc add dev eth0 root tbf rate {mbit}mbit burst 256k latency 100ms"),
            );
        }
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if super::in_rank() {
            return;
        }
        // The devices' other ends first.
        self.relay = None;
        for name in self.names.iter().chain([&self.switch]) {
            let _ = ip(&format!("netns del {name}"));
        }
    }
}

fn ip(line: &str) -> Result<(), String> {
    succeed(Command::new("ip").args(line.split_whitespace()))
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let Output { status, stderr, .. } = command
        .output()
        .map_err(|e| format!("{command:?}: {e} (is iproute2 or nftables not installed?)"))?;
    match status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&stderr))),
    }
}
