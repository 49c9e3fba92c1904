//! The conformance suite on imagined machines of one computer.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::{
    super::{control_tcp::tests::star_with, secret::Secret},
    *,
};
use std::{num::NonZeroUsize, thread, time::Duration};

/// One group per rank; `machine_of(rank)` says where it is.
fn make(
    machine_of: impl Fn(usize) -> usize,
    world_size: usize,
    timeout: Duration,
) -> Vec<Arc<dyn ProcessGroup>> {
    make_with(machine_of, world_size, timeout, Duration::from_secs(10), 1)
}

fn make_with(
    machine_of: impl Fn(usize) -> usize,
    world_size: usize,
    timeout: Duration,
    silence: Duration,
    sockets: usize,
) -> Vec<Arc<dyn ProcessGroup>> {
    let secret = Secret::random().unwrap();
    let machines: Vec<usize> = (0..world_size).map(machine_of).collect();
    let controls = star_with(world_size, |member| {
        member.operation_timeout = timeout;
        member.heartbeat.limit = silence;
        member.heartbeat.interval = silence / 10;
    });
    thread::scope(|scope| {
        let ranks: Vec<_> = controls
            .into_iter()
            .map(|control| {
                let (secret, machines) = (secret.clone(), &machines);
                scope.spawn(move || {
                    let local = control.local_address();
                    let context = Context::new(Arc::new(control), secret, local);
                    // Rank 0's number counts.
                    let sockets = if context.control.rank() == 0 {
                        sockets
                    } else {
                        1
                    };
                    let sockets = NonZeroUsize::new(sockets).unwrap();
                    let context = Arc::new(context.sockets(sockets));
                    let small = |here| Options {
                        shm: shm::Options::small(here),
                        stage: 1000,
                        stripe: 100,
                    };
                    let group = HierarchicalGroup::create_with(&context, machines, small, 0);
                    Arc::new(group.unwrap().unwrap()) as Arc<dyn ProcessGroup>
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Machines of two ranks, which are neighbours in rank order.
mod pairs {
    crate::group::conformance::suite!(partial view: |n, timeout| super::make(|rank| rank / 2, n, timeout));
}

/// Two machines, the ranks dealt out in turn.
mod dealt_out {
    crate::group::conformance::suite!(partial view: |n, timeout| super::make(|rank| rank % 2, n, timeout));
}

/// One rank on the first machine, the others on the second.
mod uneven {
    crate::group::conformance::suite!(partial view: |n, timeout| super::make(|rank| rank.min(1), n, timeout));
}

/// A machine for each rank.
mod one_ring {
    crate::group::conformance::suite!(partial view: |n, timeout| super::make(|rank| rank, n, timeout));
}

/// Two machines whose neighbours have three connections each.
mod striped {
    use std::time::Duration;

    crate::group::conformance::suite!(partial view: |n, timeout| {
        super::make_with(|rank| rank / 2, n, timeout, Duration::from_secs(10), 3)
    });
}

/// Rank 1 waits for ranks of its own machine only, and has no connection to rank 0 but the control connection.
#[test]
fn a_rank_that_hears_of_nobody_learns_that_rank_0_has_left() {
    let mut groups = make_with(
        |rank| rank.min(1),
        3,
        Duration::from_secs(60),
        Duration::from_millis(500),
        1,
    );
    let two = groups.pop().unwrap();
    drop(groups.remove(0));
    // Rank 1, whose neighbour rank 0 is, does not even come.
    let error = two.monitored_barrier().unwrap_err();
    assert!(
        matches!(
            error,
            GroupError::PeerLeft {
                rank: 2,
                peer: 0,
                ..
            }
        ),
        "{error}"
    );
}
