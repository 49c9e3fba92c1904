//! Whether to join through MPI.

use super::{MpiError, MpiGroup, MpiOptions};
use crate::{
    Error,
    group::{
        ProcessGroup,
        host::{TRANSPORT, operation_timeout},
    },
};
use std::env;

/// A variable that an MPI launcher gives to every process: Open MPI's, MPICH's and Intel's, and that of `srun --mpi=pmix`.
const RANKS: [&str; 3] = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];
/// What another launcher says goes first: torchrun and burn-ddp's own may themselves run under mpirun, once per machine.
const OTHERS: [&str; 2] = ["RANK", "WORLD_SIZE"];

/// The group of the job that an MPI launcher has started this process for, if one has and nothing that goes first
/// says otherwise. Collective, and blocks as [`MpiGroup::connect`] does.
pub(crate) fn join() -> Result<Option<MpiGroup>, Error> {
    let Some(variable) = chosen() else {
        return Ok(None);
    };
    // Before MPI starts: Open MPI sets these variables itself in a process that was started alone.
    let started = started_by();
    let group = MpiGroup::connect(MpiOptions {
        operation_timeout: operation_timeout()?,
        ..MpiOptions::default()
    })?;
    if group.world_size() == 1 && variable == TRANSPORT && started.is_none() {
        return Err(MpiError::NotStarted.into());
    }
    tracing::info!("joined through MPI because of {variable}");
    Ok(Some(group))
}

fn lookup(name: &str) -> Option<String> {
    // What is not Unicode is no name of a transport, and is refused where transports are read.
    env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn started_by() -> Option<&'static str> {
    RANKS.into_iter().find(|name| env::var_os(name).is_some())
}

/// What makes this process an MPI rank: the name of a variable.
pub(crate) fn chosen() -> Option<&'static str> {
    choose(&lookup)
}

fn choose(lookup: &dyn Fn(&str) -> Option<String>) -> Option<&'static str> {
    let set = |name: &&str| lookup(name).is_some();
    match lookup(TRANSPORT).as_deref().map(str::trim) {
        Some("mpi") => return Some(TRANSPORT),
        Some("auto") | None => {}
        Some(_) => return None,
    }
    if OTHERS.iter().any(set) {
        return None;
    }
    RANKS.into_iter().find(|name| set(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_speaks_first() {
        let choice = |variables: &[(&str, &str)]| {
            choose(&|name| {
                let found = variables.iter().find(|(n, _)| *n == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        let ompi = ("OMPI_COMM_WORLD_RANK", "1");
        assert_eq!(choice(&[]), None);
        assert_eq!(choice(&[ompi]), Some("OMPI_COMM_WORLD_RANK"));
        assert_eq!(choice(&[("PMI_RANK", "0")]), Some("PMI_RANK"));
        assert_eq!(choice(&[ompi, ("RANK", "0")]), None);
        assert_eq!(choice(&[ompi, ("WORLD_SIZE", "2")]), None);
        assert_eq!(choice(&[ompi, (TRANSPORT, "tcp")]), None);
        assert_eq!(choice(&[ompi, (TRANSPORT, "auto")]), Some(ompi.0));
        assert_eq!(
            choice(&[(TRANSPORT, "mpi"), ("RANK", "0")]),
            Some(TRANSPORT)
        );
    }
}
