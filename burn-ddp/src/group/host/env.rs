//! Who this process is in its job, from arguments and from the environment.
//!
//! Explicit arguments beat the environment. The environment is read by families of variables
//! ([`Family`]), the first that is present; half a family is an error.

use super::{
    family::Family,
    interface::InterfaceChoice,
    secret::Secret,
    settings::{Endpoint, Heartbeat, Overrides, Rendezvous, SettingsError, Transport},
    tcp::MOST_SOCKETS,
};
use std::{num::NonZeroUsize, os::fd::RawFd, time::Duration};

/// Global rank of a process, `0..WORLD_SIZE`. The names without prefix are torchrun's and Kubeflow's.
pub const RANK: &str = "RANK";
/// Number of processes of the job.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// Rank within the machine.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Number of the job's processes on the machine.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// Where rank 0 can be reached: a name or an address.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of rank 0's rendezvous.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// How often the launcher has restarted the job.
pub const GENERATION: &str = "BURN_DDP_GENERATION";
/// The job's secret, the same text in all processes: 16 random bytes or more, as from `openssl rand -hex 32`.
pub const SECRET: &str = "BURN_DDP_SECRET";
/// Number of an inherited descriptor: rank 0's socket, bound and listening.
pub const LISTEN_FD: &str = "BURN_DDP_LISTEN_FD";
/// Seconds that rendezvous may take.
pub const RENDEZVOUS_TIMEOUT: &str = "BURN_DDP_RENDEZVOUS_TIMEOUT";
/// Seconds that one operation may take.
pub const TIMEOUT: &str = "BURN_DDP_TIMEOUT";
/// `auto`, `shm` or `tcp`.
pub const TRANSPORT: &str = "BURN_DDP_TRANSPORT";
/// Network interfaces for data between machines, in the forms of `NCCL_SOCKET_IFNAME`: `eth`, `=eth0`, `^docker,lo`.
pub const SOCKET_IFNAME: &str = "BURN_DDP_SOCKET_IFNAME";
/// Connections between two neighbours on a ring between machines.
pub const NSOCKS: &str = "BURN_DDP_NSOCKS";

impl Rendezvous {
    /// Rank `rank` of `world_size`, with rank 0 at `master_addr` (a name or an address) and `master_port`; the
    /// environment is not looked at.
    ///
    /// # Errors
    ///
    /// [`SettingsError::RankTooLarge`].
    pub fn new(
        rank: usize,
        world_size: usize,
        master_addr: impl Into<String>,
        master_port: u16,
    ) -> Result<Self, SettingsError> {
        let overrides = Overrides {
            rank: Some(rank),
            world_size: Some(world_size),
            master_addr: Some(master_addr.into()),
            master_port: Some(master_port),
            ..Overrides::default()
        };
        let size =
            NonZeroUsize::new(world_size).ok_or(too_large("rank", rank, "the world size", 0))?;
        Self::read(None, overrides, rank, size, &|_| None)
    }

    /// From the environment alone. `None` if no launcher has said who this process is.
    ///
    /// # Errors
    ///
    /// A variable that is missing, empty or malformed, or a rank beyond its world size.
    pub fn from_env() -> Result<Option<Self>, SettingsError> {
        Self::resolve(Overrides::default())
    }

    /// From `overrides`, and from the environment for what they leave open. `None` if neither says who this
    /// process is.
    ///
    /// # Errors
    ///
    /// See [`from_env`](Self::from_env).
    pub fn resolve(overrides: Overrides) -> Result<Option<Self>, SettingsError> {
        Self::resolve_with(overrides, &system)
    }

    pub(super) fn resolve_with(
        mut overrides: Overrides,
        lookup: Lookup<'_>,
    ) -> Result<Option<Self>, SettingsError> {
        let (family, source) = if overrides.rank.is_some() && overrides.world_size.is_some() {
            (None, "arguments")
        } else {
            let Some(family) = Family::find(lookup) else {
                return match (overrides.rank, overrides.world_size) {
                    (None, None) => Ok(None),
                    (Some(_), _) => Err(missing(&[WORLD_SIZE], &["the argument rank"])),
                    _ => Err(missing(&[RANK], &["the argument world_size"])),
                };
            };
            if overrides.rank.is_none() {
                overrides.rank = family.rank(lookup)?;
                // The machine's numbers belong to the process that the rank names.
                overrides.local_rank = overrides.local_rank.or(family.local_rank(lookup)?);
                overrides.local_world_size = overrides
                    .local_world_size
                    .or(family.local_world_size(lookup)?);
            }
            if overrides.world_size.is_none() {
                overrides.world_size = family.world_size(lookup)?;
            }
            if overrides.master_addr.is_none() {
                overrides.master_addr = family.master_addr(lookup)?;
            }
            if overrides.master_port.is_none() {
                overrides.master_port = family.master_port(lookup)?;
            }
            (Some(family), family.name)
        };
        let (Some(rank), Some(size)) = (overrides.rank, overrides.world_size) else {
            return Err(incomplete(family, &overrides, lookup));
        };
        let names = names(family);
        let world_size = NonZeroUsize::new(size).ok_or(too_large(names.0, rank, names.1, 0))?;
        let settings = Self::read(family, overrides, rank, world_size, lookup)?;
        tracing::info!(
            "rank {rank} of {world_size}, generation {}, from {source}; rank 0 at {}",
            settings.generation,
            Endpoint(&settings.master_addr, settings.master_port)
        );
        Ok(Some(settings))
    }

    fn read(
        family: Option<&Family>,
        overrides: Overrides,
        rank: usize,
        world_size: NonZeroUsize,
        lookup: Lookup<'_>,
    ) -> Result<Self, SettingsError> {
        let (rank_name, size_name) = names(family);
        within(rank_name, rank, size_name, world_size.get())?;
        if let Some(local_rank) = overrides.local_rank {
            let size = overrides.local_world_size.unwrap_or(world_size.get());
            within("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", size)?;
        }
        let listen_fd = optional(lookup, LISTEN_FD, fd_of)?.filter(|_| rank == 0);
        let addr = overrides.master_addr.clone();
        let addr = addr.map_or_else(|| optional(lookup, MASTER_ADDR, text_of), |a| Ok(Some(a)))?;
        let port = overrides.master_port;
        let port = port.map_or_else(|| optional(lookup, MASTER_PORT, port_of), |p| Ok(Some(p)))?;
        let (master_addr, master_port) = match (addr, port) {
            (Some(addr), Some(port)) => (addr, port),
            (addr, port) if world_size.get() == 1 => {
                (addr.unwrap_or("127.0.0.1".to_owned()), port.unwrap_or(0))
            }
            _ => return Err(incomplete(family, &overrides, lookup)),
        };
        let variables = Variables::read(lookup)?;
        Ok(Self {
            rank,
            world_size,
            local_rank: overrides.local_rank,
            local_world_size: overrides.local_world_size,
            master_addr,
            master_port,
            generation: variables.generation.unwrap_or(0),
            secret: variables.secret,
            listener: None,
            listen_fd,
            rendezvous_timeout: variables
                .rendezvous_timeout
                .unwrap_or(Self::DEFAULT_RENDEZVOUS_TIMEOUT),
            operation_timeout: variables.timeout.unwrap_or(Self::DEFAULT_OPERATION_TIMEOUT),
            heartbeat: Heartbeat::default(),
            transport: variables.transport.unwrap_or_default(),
            interface: variables.interface,
            sockets: variables.sockets.unwrap_or(NonZeroUsize::MIN),
        })
    }
}

/// What is the same in all processes of a job.
struct Variables {
    generation: Option<u32>,
    secret: Option<Secret>,
    rendezvous_timeout: Option<Duration>,
    timeout: Option<Duration>,
    transport: Option<Transport>,
    interface: Option<InterfaceChoice>,
    sockets: Option<NonZeroUsize>,
}

impl Variables {
    fn read(lookup: Lookup<'_>) -> Result<Self, SettingsError> {
        Ok(Self {
            generation: optional(lookup, GENERATION, generation_of)?,
            secret: secret(lookup)?,
            rendezvous_timeout: optional(lookup, RENDEZVOUS_TIMEOUT, seconds_of)?,
            timeout: optional(lookup, TIMEOUT, seconds_of)?,
            transport: optional(lookup, TRANSPORT, transport_of)?,
            interface: optional(lookup, SOCKET_IFNAME, interface_of)?,
            sockets: optional(lookup, NSOCKS, sockets_of)?,
        })
    }
}

/// For a launcher: finds a mistake in the variables that all ranks will read before any of them starts.
pub(crate) fn check_variables() -> Result<(), SettingsError> {
    Variables::read(&system).map(|_| ())
}

/// The environment's limit for one operation, for a group that has its ranks from elsewhere.
#[cfg(feature = "mpi")]
pub(crate) fn operation_timeout() -> Result<Option<Duration>, SettingsError> {
    optional(&system, TIMEOUT, seconds_of)
}

/// A value that is not Unicode is as malformed as any other; its lossy form is what the error shows.
fn system(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn missing(missing: &[&'static str], present: &[&'static str]) -> SettingsError {
    SettingsError::Missing {
        missing: missing.to_vec(),
        present: present.to_vec(),
    }
}

/// Of rank and world size.
fn names(family: Option<&Family>) -> (&'static str, &'static str) {
    family.map_or((RANK, WORLD_SIZE), |f| (f.rank, f.world_size))
}

/// Everything that is missing, at once.
fn incomplete(family: Option<&Family>, overrides: &Overrides, lookup: Lookup<'_>) -> SettingsError {
    let (rank, world_size) = names(family);
    let given = |name: &'static str, argument: bool| (name, argument || lookup(name).is_some());
    let (present, missing): (Vec<_>, Vec<_>) = [
        given(rank, overrides.rank.is_some()),
        given(world_size, overrides.world_size.is_some()),
        given(MASTER_ADDR, overrides.master_addr.is_some()),
        given(MASTER_PORT, overrides.master_port.is_some()),
    ]
    .into_iter()
    .partition(|(_, given)| *given);
    let names = |list: Vec<(&'static str, bool)>| list.into_iter().map(|(name, _)| name).collect();
    SettingsError::Missing {
        missing: names(missing),
        present: names(present),
    }
}

/// Who a launcher has started this process as, if one has: its variables, the rank and the number of ranks. `None` for a
/// number that is missing or wrong.
pub(crate) fn started() -> Option<(&'static str, Option<usize>, Option<usize>)> {
    let family = Family::find(&system)?;
    let (rank, world_size) = (family.rank(&system), family.world_size(&system));
    Some((family.name, rank.ok().flatten(), world_size.ok().flatten()))
}

pub(super) type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What a variable should hold, and its value if it does.
pub(super) type Parse<T> = fn(&str) -> Result<T, &'static str>;

pub(super) fn optional<T>(
    lookup: Lookup<'_>,
    variable: &'static str,
    parse: Parse<T>,
) -> Result<Option<T>, SettingsError> {
    let Some(value) = lookup(variable) else {
        return Ok(None);
    };
    let trimmed = value.trim();
    if trimmed.is_empty() {
        return Err(SettingsError::Empty { variable });
    }
    // A secret never gets here: any text parses as one.
    parse(trimmed)
        .map(Some)
        .map_err(|expected| SettingsError::Invalid {
            variable,
            value: trimmed.to_owned(),
            expected,
        })
}

fn secret(lookup: Lookup<'_>) -> Result<Option<Secret>, SettingsError> {
    let text = optional(lookup, SECRET, text_of)?;
    text.map(Secret::new)
        .transpose()
        .map_err(|cause| SettingsError::ShortSecret {
            variable: SECRET,
            cause,
        })
}

pub(super) fn usize_of(text: &str) -> Result<usize, &'static str> {
    text.parse().map_err(|_| "a whole number from 0")
}

fn generation_of(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "a whole number from 0")
}

pub(super) fn text_of(text: &str) -> Result<String, &'static str> {
    Ok(text.to_owned())
}

pub(super) fn port_of(text: &str) -> Result<u16, &'static str> {
    text.parse()
        .ok()
        .filter(|port| *port != 0)
        .ok_or("a port number from 1 to 65535")
}

fn fd_of(text: &str) -> Result<RawFd, &'static str> {
    text.parse()
        .ok()
        .filter(|fd| *fd > 2)
        .ok_or("the number of an open descriptor above 2")
}

fn seconds_of(text: &str) -> Result<Duration, &'static str> {
    let seconds: Option<f64> = text.parse().ok().filter(|seconds| *seconds <= 1e8);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        // A number above 0 may still be none of nanoseconds.
        .filter(|limit| !limit.is_zero())
        .ok_or("a number of seconds above 0")
}

fn interface_of(text: &str) -> Result<InterfaceChoice, &'static str> {
    InterfaceChoice::parse(text).ok_or("a list of interfaces, as in `eth,ib`, `=eth0` or `^docker`")
}

fn sockets_of(text: &str) -> Result<NonZeroUsize, &'static str> {
    let sockets = text.parse().ok();
    sockets
        .filter(|sockets: &NonZeroUsize| sockets.get() <= MOST_SOCKETS)
        .ok_or("a number from 1 to 16")
}

fn transport_of(text: &str) -> Result<Transport, &'static str> {
    match text {
        "auto" => Ok(Transport::Auto),
        "shm" => Ok(Transport::Shm),
        "tcp" => Ok(Transport::Tcp),
        _ => Err("auto, shm or tcp"),
    }
}

fn within(
    what: &'static str,
    rank: usize,
    whole: &'static str,
    size: usize,
) -> Result<(), SettingsError> {
    if rank < size {
        Ok(())
    } else {
        Err(too_large(what, rank, whole, size))
    }
}

fn too_large(what: &'static str, rank: usize, whole: &'static str, size: usize) -> SettingsError {
    SettingsError::RankTooLarge {
        what,
        rank,
        whole,
        size,
    }
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
