//! Waiting for the other ranks of a round.

use super::sync::Line;
use crate::group::{
    Result,
    host::{control::Control, deadline::Deadline},
    ops::Call,
};
use std::{
    fmt::Display,
    num::NonZero,
    thread,
    time::{Duration, Instant},
};

/// How long a rank sleeps before it looks whether the job has failed.
const SLICE: Duration = Duration::from_millis(50);

/// How long a rank spins before it sleeps: some times what a wake-up costs, if every rank has a core.
const SPIN: Duration = Duration::from_micros(40);
/// If ranks share cores, the one that is waited for may need this one.
const SPIN_CROWDED: Duration = Duration::from_micros(1);

/// How long to spin in a group of `world_size` ranks on this machine.
pub(super) fn spin_time(world_size: usize) -> Duration {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    if world_size <= cores {
        SPIN
    } else {
        SPIN_CROWDED
    }
}

/// One operation's patience.
pub(super) struct Patience<'a> {
    control: &'a dyn Control,
    spin: Duration,
    deadline: Deadline<'a>,
    operation: &'a dyn Display,
}

impl<'a> Patience<'a> {
    pub(super) fn new(
        control: &'a dyn Control,
        spin: Duration,
        call: Call,
        operation: &'a dyn Display,
    ) -> Self {
        Self {
            control,
            spin,
            deadline: Deadline::new(control, call),
            operation,
        }
    }

    /// What errors call rank `rank`.
    pub(super) fn name(&self, rank: usize) -> usize {
        self.control.name(rank)
    }

    /// Returns when all ranks have published `round`, the job has failed, or the operation's time is over.
    pub(super) fn wait(&self, lines: &[Line], round: u32) -> Result<()> {
        if self.spin(lines, round) {
            return Ok(());
        }
        let operation = || self.operation.to_string();
        loop {
            let missing = || {
                (0..lines.len())
                    .filter(|r| !lines[*r].reached(round))
                    .collect::<Vec<_>>()
            };
            let failure = self.control.check(&missing, &operation).err();
            // Whoever failed may have published first, so that all are here after all and find the
            // same error by themselves.
            let Some(late) = lines.iter().find(|line| !line.reached(round)) else {
                return Ok(());
            };
            if let Some(error) = failure {
                return Err(error);
            }
            self.deadline.check(&operation, &missing)?;
            late.sleep(round, self.deadline.slice(SLICE));
        }
    }

    /// Whether all ranks came while spinning paid.
    fn spin(&self, lines: &[Line], round: u32) -> bool {
        let mut late = lines;
        let mut started = None;
        loop {
            for _ in 0..64 {
                while let [first, rest @ ..] = late
                    && first.reached(round)
                {
                    late = rest;
                }
                if late.is_empty() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if started.get_or_insert_with(Instant::now).elapsed() >= self.spin {
                return false;
            }
            // The scheduler may have put the late rank on this core.
            thread::yield_now();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{super::mock::MockControl, *};
    use crate::group::GroupError;

    #[test]
    fn rounds_wrap_around() {
        let line = Line::new();
        assert!(line.reached(0) && !line.reached(1));
        line.publish(u32::MAX);
        assert!(line.reached(u32::MAX) && !line.reached(0));
        line.publish(0);
        assert!(line.reached(u32::MAX) && line.reached(0) && !line.reached(1));
    }

    #[test]
    fn late_ranks_are_named_and_ranks_that_are_ahead_are_not() {
        let limit = Duration::from_millis(10);
        let controls = MockControl::all(4, limit);
        let patience = Patience::new(&*controls[1], SPIN_CROWDED, Call::barrier(), &"barrier");
        let lines = [Line::new(), Line::new(), Line::new(), Line::new()];
        lines[0].publish(2);
        lines[1].publish(1);
        let error = patience.wait(&lines, 1).unwrap_err();
        let GroupError::Timeout {
            rank: 1,
            operation,
            elapsed,
            missing,
            hosts,
        } = error
        else {
            unreachable!("{error}");
        };
        assert_eq!((operation.as_str(), missing), ("barrier", vec![2, 3]));
        assert_eq!(hosts, ["node2", "node3"]);
        assert!(elapsed >= limit);
        // Who has come is not kept by the time being over.
        lines[2].publish(1);
        lines[3].publish(1);
        assert_eq!(patience.wait(&lines, 1), Ok(()));
    }
}
