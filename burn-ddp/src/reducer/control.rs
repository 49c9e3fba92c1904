//! What the ranks tell each other in a round besides gradients, without a message of its own.

use crate::group::ProcessGroup;
use std::collections::BTreeSet;

/// What one rank says of itself in a round. It travels in the tail of the first bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contribution {
    /// Whether the rank has run a backward pass; one that has run out of data only answers.
    pub(crate) active: bool,
    /// The rank has met a parameter that is trainable now and was frozen before, or the other way round.
    pub(crate) changed: bool,
    /// Backward passes in the accumulation window that the round closes. Compared modulo [`WINDOW_MODULUS`].
    pub(crate) window: u32,
    /// Samples behind this rank's gradients, where the mean is one over samples.
    pub(crate) samples: u64,
}

/// Window lengths are compared modulo this.
pub(crate) const WINDOW_MODULUS: u32 = 1 << BITS;

/// Of a digit. The sum over ranks has one digit of one rank in each place and zeros of the others, so a sum is exact in every
/// float type, and a mean comes within half a unit of the digit once it is multiplied again, in bf16 too (8 bits of precision).
const BITS: u32 = 7;
/// Of a number of samples.
const SAMPLES: usize = 63usize.div_ceil(BITS as usize);

impl Contribution {
    /// Elements of the tail that each rank has.
    pub(super) const DIGITS: usize = 2 + SAMPLES;

    /// The digits of all ranks, zero but for those of `rank`.
    pub(super) fn digits(&self, rank: usize, world_size: usize) -> Vec<u8> {
        let digit = |x: u64| (x & u64::from(WINDOW_MODULUS - 1)) as u8;
        let flags = u8::from(self.active) | u8::from(self.changed) << 1;
        let samples = (0..SAMPLES).map(|k| digit(self.samples >> (k as u32 * BITS)));
        let own = [flags, digit(self.window.into())]
            .into_iter()
            .chain(samples);
        let mut all = vec![0; world_size * Self::DIGITS];
        for (place, digit) in all[rank * Self::DIGITS..].iter_mut().zip(own) {
            *place = digit;
        }
        all
    }

    /// The contributions of all ranks from the sum of their digits.
    pub(super) fn read(sum: &[f64]) -> Vec<Self> {
        let read = |digits: &[f64]| {
            let digit = |k: usize| digits[k].round() as u64;
            let samples = (0..SAMPLES).map(|k| digit(2 + k) << (k as u32 * BITS));
            Self {
                active: digit(0) & 1 != 0,
                changed: digit(0) & 2 != 0,
                window: digit(1) as u32,
                samples: samples.fold(0, |a, b| a | b),
            }
        };
        sum.chunks_exact(Self::DIGITS).map(read).collect()
    }
}

/// What the buckets' check has found; equal on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The first parameter with a NaN or an infinity.
    pub(crate) path: Option<String>,
    /// The ranks that sent one, ascending.
    pub(crate) ranks: BTreeSet<usize>,
}

impl Finding {
    pub(crate) fn unite(&mut self, later: Finding) {
        self.ranks.extend(later.ranks);
        if self.path.is_none() {
            self.path = later.path;
        }
    }
}

/// A step whose gradients are not all numbers. Equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// Which synchronised backward pass of the model this was, from 1.
    pub step: u64,
    /// The ranks whose own gradients had a NaN or an infinity; empty if finite numbers have overflowed in the reduction.
    pub ranks: Vec<usize>,
    /// Module path of the first parameter whose reduced gradient has one.
    pub path: String,
}

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { step, ranks, path } = self;
        write!(
            f,
            "backward pass {step}: the gradient of `{path}` is not finite"
        )?;
        match ranks.is_empty() {
            true => write!(
                f,
                ", though every rank's own is: it overflowed in the reduction"
            ),
            false => write!(f, "; it came from rank(s) {ranks:?}"),
        }
    }
}

/// This rank's flag among those of all ranks.
pub(super) fn own_flag(group: &dyn ProcessGroup, set: bool) -> Vec<u8> {
    let mut flags = vec![0; group.world_size()];
    flags[group.rank()] = u8::from(set);
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_reads_what_all_have_said() {
        let say = |rank: u32| Contribution {
            active: rank != 1,
            changed: rank == 2,
            window: 100 + rank,
            samples: (1 << 62) + u64::from(rank),
        };
        let mut sum = vec![0.0; 3 * Contribution::DIGITS];
        for rank in 0..3 {
            for (sum, digit) in sum.iter_mut().zip(say(rank).digits(rank as usize, 3)) {
                *sum += f64::from(digit);
            }
        }
        assert_eq!(Contribution::read(&sum), [0, 1, 2].map(say));
    }
}
