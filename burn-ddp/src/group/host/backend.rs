//! Which transport carries a job's data.

use super::{
    control::Control,
    rendezvous_error::RendezvousError,
    settings::{Rendezvous, Transport},
    tcp::{Context, TcpGroup},
};
#[cfg(target_os = "linux")]
use super::{hierarchical::HierarchicalGroup, shm};
use crate::group::{Result, engine::Engine, local::LocalGroup};
use std::sync::Arc;

/// A group of one of the kinds that the host group has.
#[derive(Debug)]
pub(super) enum Backend {
    Local(LocalGroup),
    #[cfg(target_os = "linux")]
    Shm(shm::ShmGroup),
    #[cfg(target_os = "linux")]
    Hierarchical(HierarchicalGroup),
    Tcp(TcpGroup),
}

impl Backend {
    pub(super) fn engine(&self) -> &dyn Engine {
        match self {
            Backend::Local(group) => group,
            #[cfg(target_os = "linux")]
            Backend::Shm(group) => group,
            #[cfg(target_os = "linux")]
            Backend::Hierarchical(group) => group,
            Backend::Tcp(group) => group,
        }
    }
}

/// The job's first group. Collective; the machines and the settings' transport are the same on all ranks.
pub(super) fn choose(
    settings: &Rendezvous,
    machines: &[&str],
    control: &Arc<dyn Control>,
    context: &Arc<Context>,
) -> Result<Backend, RendezvousError> {
    if settings.transport == Transport::Tcp {
        return Ok(through_tcp(context, 0)?);
    }
    let made = if machines.iter().all(|machine| *machine == machines[0]) {
        shared_memory(control)?
    } else {
        hierarchical(context, machines)?
    };
    let reason = match made {
        Ok(backend) => return Ok(backend),
        Err(reason) => reason,
    };
    if settings.transport == Transport::Shm {
        return Err(RendezvousError::NoSharedMemory {
            rank: settings.rank,
            reason,
        });
    }
    if settings.rank == 0 {
        tracing::warn!("no shared memory, data goes through TCP, which is slower: {reason}");
    }
    Ok(through_tcp(context, 0)?)
}

/// A job of more ranks that cannot share memory takes a ring, which has two connections a rank, and not a mesh.
const LARGEST_MESH: usize = 8;

/// A group without shared memory, the same kind on all ranks. Collective, like the groups that it makes.
pub(super) fn through_tcp(context: &Arc<Context>, number: u32) -> Result<Backend> {
    #[cfg(target_os = "linux")]
    if context.control.world_size() > LARGEST_MESH {
        let ranks: Vec<usize> = (0..context.control.world_size()).collect();
        return match HierarchicalGroup::create(context, &ranks, number)? {
            Ok(group) => Ok(Backend::Hierarchical(group)),
            // Not asked for any.
            Err(_) => Ok(Backend::Tcp(TcpGroup::create(context, number)?)),
        };
    }
    Ok(Backend::Tcp(TcpGroup::create(context, number)?))
}

/// The inner error is the same on all ranks.
#[cfg(target_os = "linux")]
fn shared_memory(control: &Arc<dyn Control>) -> Result<Result<Backend, String>> {
    let options = shm::Options::new(control.world_size());
    // All ranks propose the same: there is no other group yet.
    let group = shm::ShmGroup::create(control.clone(), control.next_group(), options)?;
    Ok(group.map(Backend::Shm).map_err(|reason| reason.to_string()))
}

/// The inner error is the same on all ranks.
#[cfg(target_os = "linux")]
fn hierarchical(context: &Arc<Context>, machines: &[&str]) -> Result<Result<Backend, String>> {
    let group = HierarchicalGroup::create(context, machines, 0)?;
    Ok(group
        .map(Backend::Hierarchical)
        .map_err(|reason| reason.to_string()))
}

#[cfg(not(target_os = "linux"))]
fn shared_memory(_: &Arc<dyn Control>) -> Result<Result<Backend, String>> {
    Ok(Err("this system is not Linux".to_owned()))
}

#[cfg(not(target_os = "linux"))]
fn hierarchical(_: &Arc<Context>, _: &[&str]) -> Result<Result<Backend, String>> {
    Ok(Err("this system is not Linux".to_owned()))
}
