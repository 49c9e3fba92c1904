//! What this process can say of where it runs. None of it is trusted for more than choosing a transport, tuning it, and texts.

/// What one running kernel is called, and no other; empty if it does not say.
pub(super) fn boot_id() -> String {
    kernel("random/boot_id").unwrap_or_default()
}

/// The name that texts call this machine by.
pub(super) fn hostname() -> String {
    let name = kernel("hostname").or_else(|| std::env::var("HOSTNAME").ok());
    shortened(&name.unwrap_or_else(|| "this host".into()))
}

/// Equal for processes that can share memory, as far as one can tell without trying.
///
/// The boot id tells machines with one name apart; name, network and process namespace tell containers of one
/// machine apart, which could not open each other's memory.
pub(super) fn memory_domain() -> String {
    let (boot, hostname) = (boot_id(), hostname());
    let (network, processes) = (namespace("net"), namespace("pid"));
    format!("{boot}/{hostname}/{network}/{processes}")
}

/// A text that the Linux kernel keeps about this machine.
fn kernel(name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?;
    Some(shortened(text.trim()))
}

/// The Linux kernel's name of the namespace of this kind that this process is in.
fn namespace(kind: &str) -> String {
    let link = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    shortened(&link.to_string_lossy())
}

/// They travel in messages of limited length.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}
