//! What every process group must do, as tests over a function that makes one.
//!
//! `suite!(make)` makes the tests of one transport, where
//! `make(world_size, timeout) -> Vec<Arc<dyn ProcessGroup>>` gives the handles of all ranks, or of those that this
//! process has: the others then run the same test in processes of their own. Each rank runs on a thread of its own. Expected values are worked out by hand from the rank numbers; sizes in
//! elements cover nothing, one, fewer than ranks, odd, and (with the transports' small test pieces)
//! many pieces.
//!
//! | file | checks |
//! |---|---|
//! | `values` | what comes out |
//! | `buffers` | group buffers |
//! | `order` | operations, groups and threads beside each other |
//! | `mismatch` | ranks in different operations (DDP-25) |
//! | `failures` | time-outs, aborts, wrong arguments |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod buffers;
mod failures;
mod mismatch;
mod order;
mod values;

pub(crate) use {buffers::*, failures::*, mismatch::*, order::*, values::*};

use super::ProcessGroup;
use std::{sync::Arc, time::Duration};

pub(crate) type Group = Arc<dyn ProcessGroup>;
pub(crate) type Make<'a> = &'a dyn Fn(usize, Duration) -> Vec<Group>;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(300);
const SIZES: [usize; 9] = [0, 1, 2, 3, 17, 1000, 1023, 5000, 40_001];

macro_rules! suite {
    ($make:expr) => {
        $crate::group::conformance::cases!([$crate::group::conformance::suite] $make; timeout_names_all_missing);
    };
    // For groups whose ranks do not all hear from one another.
    (partial view: $make:expr) => {
        $crate::group::conformance::cases!([$crate::group::conformance::suite] $make; timeout_names_missing);
    };
    ($make:expr; $($name:ident),*) => {$(
        #[test]
        fn $name() {
            $crate::group::conformance::$name(&$make);
        }
    )*};
}
pub(crate) use suite;

/// `cases!([callback] argument; case)` is `callback!(argument; the name of every case)`; `case` is what a time-out must name.
macro_rules! cases {
    ([$($callback:tt)*] $argument:expr; $timeout:ident) => {
        $($callback)*! { $argument;
            all_reduce_of_every_type, all_reduce_of_every_operation, all_reduce_mean_of_halves,
            broadcast_from_every_root, all_gather_in_rank_order, reduce_scatter_own_block,
            barrier_waits_for_all, group_buffer, group_buffers_of_one_group,
            ddp_23_back_to_back, ddp_23_two_groups_interleaved, ddp_23_many_groups,
            ddp_25_sizes_differ, ddp_25_types_differ, ddp_25_kinds_differ, ddp_25_roots_differ,
            ddp_25_buffers_differ, $timeout, a_monitored_barrier_outlasts_the_limit, abort_ends_every_wait,
            invalid_arguments_leave_the_group_usable, one_rank_is_a_group, threads_of_a_rank_take_turns
        }
    };
}
pub(crate) use cases;

/// Runs `body` as every rank at once and returns what each returned, in rank order.
fn ranks<T: Send>(groups: &[Group], body: impl Fn(&Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = groups
            .iter()
            .map(|g| scope.spawn(move || body(g)))
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("a rank panicked"))
            .collect()
    })
}

fn bytes<T: bytemuck::Pod>(x: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(x)
}
