//! Who this process is in its job, from arguments and from the environment.
//!
//! Explicit arguments beat the environment. The environment is read by families of variables
//! ([`FAMILIES`]), the first that is present as a whole; half a family is an error.

use super::{
    secret::Secret,
    settings::{Endpoint, Heartbeat, Overrides, Rendezvous, SettingsError, Transport},
};
use std::{num::NonZeroUsize, os::fd::RawFd, time::Duration};

/// Names under which a launcher says who a process is.
struct Family {
    name: &'static str,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    local_world_size: &'static str,
}

/// In order of precedence.
const FAMILIES: &[Family] = &[
    // torchrun, Kubeflow's operators and burn-ddp's own launcher.
    Family {
        name: "RANK/WORLD_SIZE",
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world_size: "LOCAL_WORLD_SIZE",
    },
];

const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
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
        Self::read(overrides, rank, size, &|_| None)
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
        // A value that is not Unicode is as malformed as any other; its lossy form is what the error shows.
        Self::resolve_with(overrides, &|name| {
            std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn resolve_with(
        mut overrides: Overrides,
        lookup: Lookup<'_>,
    ) -> Result<Option<Self>, SettingsError> {
        let source = if overrides.rank.is_some() && overrides.world_size.is_some() {
            "arguments"
        } else {
            let present = |family: &&Family| {
                lookup(family.rank).is_some() || lookup(family.world_size).is_some()
            };
            let Some(family) = FAMILIES.iter().find(present) else {
                return match (overrides.rank, overrides.world_size) {
                    (None, None) => Ok(None),
                    (Some(_), _) => Err(SettingsError::Missing {
                        missing: "WORLD_SIZE",
                        present: "the argument rank",
                    }),
                    _ => Err(SettingsError::Missing {
                        missing: "RANK",
                        present: "the argument world_size",
                    }),
                };
            };
            let number = |name| optional(lookup, name, usize_of);
            let missing = |missing, present| SettingsError::Missing { missing, present };
            if overrides.rank.is_none() {
                let rank = number(family.rank)?.ok_or(missing(family.rank, family.world_size))?;
                overrides.rank = Some(rank);
                // The machine's numbers belong to the process that the rank names.
                overrides.local_rank = overrides.local_rank.or(number(family.local_rank)?);
                overrides.local_world_size = overrides
                    .local_world_size
                    .or(number(family.local_world_size)?);
            }
            if overrides.world_size.is_none() {
                overrides.world_size = Some(
                    number(family.world_size)?.ok_or(missing(family.world_size, family.rank))?,
                );
            }
            family.name
        };
        let (rank, size) = (
            overrides.rank.unwrap_or(0),
            overrides.world_size.unwrap_or(0),
        );
        let world_size = NonZeroUsize::new(size).ok_or(too_large("RANK", rank, "WORLD_SIZE", 0))?;
        let settings = Self::read(overrides, rank, world_size, lookup)?;
        tracing::info!(
            "rank {rank} of {world_size}, generation {}, from {source}; rank 0 at {}",
            settings.generation,
            Endpoint(&settings.master_addr, settings.master_port)
        );
        Ok(Some(settings))
    }

    fn read(
        overrides: Overrides,
        rank: usize,
        world_size: NonZeroUsize,
        lookup: Lookup<'_>,
    ) -> Result<Self, SettingsError> {
        within("RANK", rank, "WORLD_SIZE", world_size.get())?;
        if let Some(local_rank) = overrides.local_rank {
            let size = overrides.local_world_size.unwrap_or(world_size.get());
            within("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", size)?;
        }
        let listen_fd = optional(lookup, LISTEN_FD, fd_of)?.filter(|_| rank == 0);
        let alone = world_size.get() == 1;
        let required = |missing| SettingsError::Missing {
            missing,
            present: "WORLD_SIZE",
        };
        let master_addr = match overrides
            .master_addr
            .map_or_else(|| optional(lookup, MASTER_ADDR, text_of), |a| Ok(Some(a)))?
        {
            Some(addr) => addr,
            None if alone => "127.0.0.1".to_owned(),
            None => return Err(required(MASTER_ADDR)),
        };
        let master_port = match overrides
            .master_port
            .map_or_else(|| optional(lookup, MASTER_PORT, port_of), |p| Ok(Some(p)))?
        {
            Some(port) => port,
            None if alone => 0,
            None => return Err(required(MASTER_PORT)),
        };
        Ok(Self {
            rank,
            world_size,
            local_rank: overrides.local_rank,
            local_world_size: overrides.local_world_size,
            master_addr,
            master_port,
            generation: optional(lookup, GENERATION, generation_of)?.unwrap_or(0),
            secret: secret(lookup)?,
            listener: None,
            listen_fd,
            rendezvous_timeout: optional(lookup, RENDEZVOUS_TIMEOUT, seconds_of)?
                .unwrap_or(Self::DEFAULT_RENDEZVOUS_TIMEOUT),
            operation_timeout: optional(lookup, TIMEOUT, seconds_of)?
                .unwrap_or(Self::DEFAULT_OPERATION_TIMEOUT),
            heartbeat: Heartbeat::default(),
            transport: optional(lookup, TRANSPORT, transport_of)?.unwrap_or_default(),
        })
    }
}

type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What a variable should hold, and its value if it does.
type Parse<T> = fn(&str) -> Result<T, &'static str>;

fn optional<T>(
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

fn usize_of(text: &str) -> Result<usize, &'static str> {
    text.parse().map_err(|_| "a whole number from 0")
}

fn generation_of(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "a whole number from 0")
}

fn text_of(text: &str) -> Result<String, &'static str> {
    Ok(text.to_owned())
}

fn port_of(text: &str) -> Result<u16, &'static str> {
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
    let seconds: Option<f64> = text
        .parse()
        .ok()
        .filter(|seconds| *seconds > 0.0 && *seconds <= 1e8);
    seconds
        .map(Duration::from_secs_f64)
        .ok_or("a number of seconds above 0")
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
