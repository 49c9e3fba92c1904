//! What a launcher starts on this machine.

use super::{LaunchError, env, spawn::setup};
use std::{ffi::OsString, net::TcpListener, ops::Range, path::PathBuf};

/// The ranks of one machine, and what they have in common.
pub(super) struct Plan {
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    /// Their numbers in the job.
    pub(super) ranks: Range<usize>,
    /// Number of ranks on all machines.
    pub(super) world_size: usize,
    pub(super) master: Master,
    /// What each rank gets besides the variables that say who it is.
    pub(super) variables: Vec<(&'static str, String)>,
    /// Where each rank's output is kept.
    pub(super) logs: Option<PathBuf>,
}

/// Where rank 0 is.
pub(super) enum Master {
    /// Here, on a socket that listens before anything starts: no other program can take the port in between.
    Handed(TcpListener),
    /// Where it listens by itself.
    #[cfg_attr(
        not(feature = "cli"),
        allow(dead_code, reason = "only the command is told where")
    )]
    At(String, u16),
}

impl Master {
    /// On this machine, at a port that the system picks.
    pub(super) fn here() -> Result<Self, LaunchError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(setup("a port on 127.0.0.1"))?;
        Ok(Self::Handed(listener))
    }

    pub(super) fn variables(&self) -> Result<[(&'static str, String); 2], LaunchError> {
        let (addr, port) = match self {
            Self::Handed(listener) => {
                let address = listener.local_addr();
                let address = address.map_err(setup("the port's number"))?;
                (address.ip().to_string(), address.port())
            }
            Self::At(addr, port) => (addr.clone(), *port),
        };
        Ok([
            (env::MASTER_ADDR, addr),
            (env::MASTER_PORT, port.to_string()),
        ])
    }

    /// Only rank 0 gets it.
    pub(super) fn listener(&self, rank: usize) -> Option<&TcpListener> {
        match self {
            Self::Handed(listener) if rank == 0 => Some(listener),
            _ => None,
        }
    }
}

impl Plan {
    /// Copies of this program, with a secret of their own.
    pub(super) fn of_this_program(nproc: usize) -> Result<Self, LaunchError> {
        let program = std::env::current_exe().map_err(setup("the path of this executable"))?;
        Ok(Self {
            program: program.into(),
            arguments: std::env::args_os().skip(1).collect(),
            ranks: 0..nproc,
            world_size: nproc,
            master: Master::here()?,
            variables: vec![(env::SECRET, env::secret()?)],
            logs: None,
        })
    }
}
