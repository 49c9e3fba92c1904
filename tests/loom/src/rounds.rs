//! Two ranks run operations through the protocol of `rounds.rs` and `buffer.rs`. Their memory is in
//! loom's cells, which report every access that another one is not ordered with.

use super::sync::{Line, Turn};
use loom::{cell::UnsafeCell, sync::Arc, thread};
use std::{convert::Infallible, time::Duration};

const RANKS: usize = 2;
const PREEMPTIONS: usize = 2;

struct Segment {
    lines: [Line; RANKS],
    /// Areas of rank and half.
    areas: [[UnsafeCell<u32>; 2]; RANKS],
    /// A group buffer: the inputs, and each rank's share of the result.
    inputs: [UnsafeCell<u32>; RANKS],
    result: [UnsafeCell<u32>; RANKS],
}

impl Segment {
    fn new() -> Self {
        let cell = || UnsafeCell::new(0);
        let pair = || [cell(), cell()];
        Self {
            lines: [Line::new(), Line::new()],
            areas: [pair(), pair()],
            inputs: pair(),
            result: pair(),
        }
    }

    fn advance(&self, turn: &mut Turn, rank: usize) {
        let wait = |round| -> Result<(), Infallible> {
            for line in &self.lines {
                while !line.reached(round) {
                    line.sleep(round, Duration::ZERO);
                }
            }
            Ok(())
        };
        let Ok(()) = turn.advance(&self.lines[rank], wait);
    }

    fn write(cell: &UnsafeCell<u32>, value: u32) {
        // SAFETY: loom checks that no other access overlaps, which is what is being tested.
        cell.with_mut(|p| unsafe { *p = value });
    }

    fn read(cell: &UnsafeCell<u32>) -> u32 {
        // SAFETY: as above.
        cell.with(|p| unsafe { *p })
    }

    /// A small all-reduce: one round, everybody adds up everything.
    fn one_shot(&self, turn: &mut Turn, rank: usize, value: u32) -> u32 {
        Self::write(&self.areas[rank][turn.writes()], value);
        self.advance(turn, rank);
        self.areas
            .iter()
            .map(|halves| Self::read(&halves[turn.reads()]))
            .sum()
    }

    /// An all-reduce in a group buffer: arrive, reduce the own share, done, read the result.
    fn in_buffer(&self, turn: &mut Turn, rank: usize, value: u32) -> [u32; RANKS] {
        Self::write(&self.inputs[rank], value);
        self.advance(turn, rank);
        let sum: u32 = self.inputs.iter().map(Self::read).sum();
        Self::write(&self.result[rank], sum + rank as u32);
        self.advance(turn, rank);
        [Self::read(&self.result[0]), Self::read(&self.result[1])]
    }
}

fn explore(body: impl Fn(&Segment, &mut Turn, usize) + Sync + Send + Copy + 'static) {
    let mut model = loom::model::Builder::new();
    // Unbounded, three operations take hours; what a protocol gets wrong shows with very few switches
    // (Musuvathi and Qadeer, "Iterative context bounding", PLDI 2007).
    model.preemption_bound = Some(PREEMPTIONS);
    model.check(move || {
        let segment = Arc::new(Segment::new());
        let other = segment.clone();
        let peer = thread::spawn(move || body(&other, &mut Turn::first(), 1));
        body(&segment, &mut Turn::first(), 0);
        peer.join().unwrap();
    });
}

#[test]
fn three_small_operations() {
    explore(|segment, turn, rank| {
        for step in 0..3 {
            let sum = segment.one_shot(turn, rank, 10 * step + rank as u32);
            assert_eq!(sum, 20 * step + 1);
        }
    });
}

#[test]
fn two_operations_on_one_buffer() {
    explore(|segment, turn, rank| {
        for step in 0..2 {
            let result = segment.in_buffer(turn, rank, 10 * step + rank as u32);
            assert_eq!(result, [20 * step + 1, 20 * step + 2]);
        }
    });
}

#[test]
fn small_operation_between_two_on_a_buffer() {
    explore(|segment, turn, rank| {
        assert_eq!(segment.in_buffer(turn, rank, 1), [2, 3]);
        assert_eq!(segment.one_shot(turn, rank, 5), 10);
        assert_eq!(segment.in_buffer(turn, rank, 2), [4, 5]);
    });
}
