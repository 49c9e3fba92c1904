//! Whole groups, with threads as ranks.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;
use std::{
    net::{SocketAddr, TcpListener},
    thread,
    time::Duration,
};

fn connect_all(
    world_size: usize,
    change: impl Fn(Rendezvous) -> Rendezvous + Sync,
) -> Vec<Arc<HostGroup>> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut listener = Some(listener);
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let settings = change(settings(rank, world_size, address));
                let settings = match listener.take_if(|_| rank == 0) {
                    Some(listener) => settings.listener(listener),
                    None => settings,
                };
                scope.spawn(move || Arc::new(HostGroup::connect(settings).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn settings(rank: usize, world_size: usize, address: SocketAddr) -> Rendezvous {
    Rendezvous::new(rank, world_size, address.ip().to_string(), address.port())
        .unwrap()
        .secret(Secret::new(*b"a secret of the tests").unwrap())
        .rendezvous_timeout(Duration::from_secs(20))
}

fn as_groups(ranks: Vec<Arc<HostGroup>>) -> Vec<Arc<dyn ProcessGroup>> {
    ranks
        .into_iter()
        .map(|rank| rank as Arc<dyn ProcessGroup>)
        .collect()
}

mod tcp {
    use super::*;

    fn make(world_size: usize, timeout: Duration) -> Vec<Arc<dyn ProcessGroup>> {
        as_groups(connect_all(world_size, |settings| {
            settings
                .operation_timeout(timeout)
                .transport(Transport::Tcp)
        }))
    }
    crate::group::conformance::suite!(make);
}

#[cfg(target_os = "linux")]
mod shm {
    use super::*;

    fn make(world_size: usize, timeout: Duration) -> Vec<Arc<dyn ProcessGroup>> {
        as_groups(connect_all(world_size, |settings| {
            settings
                .operation_timeout(timeout)
                .transport(Transport::Shm)
        }))
    }
    crate::group::conformance::suite!(make);
}

#[test]
fn places_are_counted_unless_they_are_given() {
    let groups = connect_all(3, |settings| {
        settings.transport(Transport::Tcp).generation(4)
    });
    let places: Vec<_> = groups
        .iter()
        .map(|group| (group.local_rank(), group.local_world_size()))
        .collect();
    assert_eq!(places, [(0, 3), (1, 3), (2, 3)]);
    assert!(
        groups
            .iter()
            .all(|group| group.generation() == 4 && group.job() == groups[0].job())
    );
    assert!(groups.iter().all(|group| group.transport() == "tcp"));
}

#[test]
#[cfg(target_os = "linux")]
fn the_ranks_of_one_machine_share_memory_by_default() {
    let groups = connect_all(2, |settings| settings);
    assert!(groups.iter().all(|group| group.transport() == "shm"));
    assert!(groups.iter().all(|group| group.failure().is_none()));
}

/// Shared memory gives out after the first group, so the others are TCP groups that the number of a refused one leads to.
#[test]
#[cfg(target_os = "linux")]
fn ddp_35_groups_of_different_transports_have_different_numbers() {
    use super::shm::{MockControl, Options, ShmGroup};

    let directory = tempfile::tempdir().unwrap();
    let secret = Secret::random().unwrap();
    let numbers = |control: Arc<dyn Control>| {
        let options = Options {
            directory: directory.path().into(),
            ..Options::new(2)
        };
        let number = control.next_group();
        let first = ShmGroup::create(control.clone(), number, options);
        let first = first.unwrap().unwrap();
        first.barrier().unwrap();
        if first.rank() == 0 {
            std::fs::remove_dir(directory.path()).unwrap();
        }
        first.barrier().unwrap();
        let local = IpAddr::from([127, 0, 0, 1]);
        let context = Arc::new(Context::new(control, secret.clone(), local));
        let mut numbers = vec![number];
        for _ in 0..2 {
            let (number, refused) = first.child().unwrap();
            assert!(refused.is_err());
            let group = through_tcp(&context, number).unwrap();
            numbers.extend([number, group.engine().identity().group]);
        }
        numbers
    };
    let controls = MockControl::all(2, Duration::from_secs(60));
    thread::scope(|scope| {
        let ranks = controls
            .into_iter()
            .map(|control| scope.spawn(|| numbers(control)));
        for rank in ranks.collect::<Vec<_>>() {
            assert_eq!(rank.join().unwrap(), [0, 1, 2, 3, 4]);
        }
    });
}

#[test]
fn one_process_needs_nobody() {
    let settings = Rendezvous::new(0, 1, "an.address.that.nobody.looks.up", 1).unwrap();
    let group = HostGroup::connect(settings).unwrap();
    assert_eq!(
        (
            group.rank(),
            group.world_size(),
            group.local_rank(),
            group.transport()
        ),
        (0, 1, 0, "local")
    );
    group.new_group().unwrap().barrier().unwrap();
}

#[test]
fn ddp_26_an_extra_joiner_is_refused_at_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let zero = scope
            .spawn(move || HostGroup::connect(settings(0, 2, address).listener(listener)).unwrap());
        let one = HostGroup::connect(settings(1, 2, address)).unwrap();
        let zero = zero.join().unwrap();
        let error = HostGroup::connect(settings(1, 2, address))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("already runs with all its 2 ranks"),
            "{error}"
        );
        let error = HostGroup::connect(settings(3, 4, address))
            .unwrap_err()
            .to_string();
        assert!(error.contains("rank 3 of 4"), "{error}");
        // The job does not notice.
        scope.spawn(move || zero.barrier().unwrap());
        one.barrier().unwrap();
    });
}
