//! The conformance suite over loopback sockets, and what only this transport has.
#![allow(clippy::unwrap_used, clippy::panic)]

use super::{super::control_tcp::tests::star_with, *};
use std::{thread, time::Duration};

/// Small pieces, so that small data takes the paths of large data.
const PIECES: Tuning = Tuning {
    small: 64,
    segment: 4096,
};

fn make_with(tuning: Tuning, world_size: usize, timeout: Duration) -> Vec<Arc<dyn ProcessGroup>> {
    let secret = Secret::random().unwrap();
    let controls = star_with(world_size, |member| member.operation_timeout = timeout);
    thread::scope(|scope| {
        let ranks: Vec<_> = controls
            .into_iter()
            .map(|control| {
                let secret = secret.clone();
                scope.spawn(move || {
                    let local = control.local_address();
                    let context = Arc::new(Context::with_tuning(
                        Arc::new(control),
                        secret,
                        local,
                        tuning,
                    ));
                    Arc::new(TcpGroup::create(&context, 0).unwrap()) as Arc<dyn ProcessGroup>
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

mod small_pieces {
    fn make(
        world_size: usize,
        timeout: std::time::Duration,
    ) -> Vec<std::sync::Arc<dyn super::ProcessGroup>> {
        super::make_with(super::PIECES, world_size, timeout)
    }
    crate::group::conformance::suite!(make);
}

mod default_sizes {
    fn make(
        world_size: usize,
        timeout: std::time::Duration,
    ) -> Vec<std::sync::Arc<dyn super::ProcessGroup>> {
        super::make_with(super::Tuning::default(), world_size, timeout)
    }
    crate::group::conformance::suite!(make);
}

#[test]
fn a_buffer_that_no_memory_holds_fails_the_group() {
    let groups = make_with(Tuning::default(), 2, Duration::from_secs(60));
    thread::scope(|scope| {
        for group in &groups {
            scope.spawn(move || {
                assert!(group.buffer(usize::MAX / 4).is_err());
                assert!(group.failure().is_some());
            });
        }
    });
}
