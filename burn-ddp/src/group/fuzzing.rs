//! What reads bytes from the network or text from the environment, as functions that must hold for any input.
//!
//! The fuzz targets in `fuzz/` run them without end, a test runs them on some inputs.

// A finding is a panic.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::{
    host, ops,
    recorder::{self},
};

/// A parser and what has to hold for it.
#[derive(Debug)]
pub struct Target {
    /// As in `fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Panics if the property does not hold for these bytes.
    pub run: fn(&[u8]),
    /// Inputs of the right form, to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target {
        name: "control_frames",
        run: host::fuzzing::control_frames,
        seeds: host::fuzzing::control_frame_seeds,
    },
    Target {
        name: "handshake",
        run: host::fuzzing::handshake,
        seeds: host::fuzzing::handshake_seeds,
    },
    Target {
        name: "hello",
        run: host::fuzzing::hello,
        seeds: host::fuzzing::hello_seeds,
    },
    Target {
        name: "data_hello",
        run: host::fuzzing::data_hello,
        seeds: host::fuzzing::data_hello_seeds,
    },
    Target {
        name: "environment",
        run: host::fuzzing::environment,
        seeds: host::fuzzing::environment_seeds,
    },
    Target {
        name: "descriptor",
        run: descriptor,
        seeds: descriptor_seeds,
    },
    Target {
        name: "report",
        run: recorder::fuzzing::report,
        seeds: recorder::fuzzing::report_seeds,
    },
];

/// Runs the target of that name; for the fuzz targets.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("a target of this name").run)(input);
}

/// The header of a collective's message: what is understood is written the same way again.
fn descriptor(input: &[u8]) {
    let mut words = [0; ops::DESCRIPTOR_WORDS];
    for (word, bytes) in words.iter_mut().zip(input.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    if let Some(descriptor) = ops::decode(&words) {
        let again = ops::encode(&descriptor);
        assert_eq!(ops::decode(&again), Some(descriptor));
        assert!(descriptor.to_string().len() < 1000);
    }
}

fn descriptor_seeds() -> Vec<Vec<u8>> {
    // Job, generation and group, sequence; kind, operation, type and buffer; root; count.
    let words = |codes: u64| [7, 1 << 32 | 2, 3, codes, 1, 1000];
    let codes = (1..=7).map(|kind| kind | 1 << 8 | 1 << 16);
    codes
        .map(|codes| words(codes).iter().flat_map(|w| w.to_le_bytes()).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{prelude::*, sample::Index};

    /// Any bytes, or an input of the right form with some bytes changed and its end cut off or repeated.
    fn input(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
        let edits = prop::collection::vec((any::<Index>(), any::<u8>()), 0..4);
        let edited = (prop::sample::select(seeds), edits, any::<Option<Index>>());
        let edited = edited.prop_map(|(mut bytes, edits, cut)| {
            for (at, byte) in edits {
                *at.get_mut(&mut bytes) = byte;
            }
            if let Some(cut) = cut {
                let cut = cut.index(bytes.len() + 1);
                bytes = [&bytes[..cut], &bytes[cut / 2..cut]].concat();
            }
            bytes
        });
        prop_oneof![prop::collection::vec(any::<u8>(), 0..400), edited]
    }

    #[test]
    fn ddp_36_parsers_hold_for_any_bytes() {
        for target in TARGETS {
            let seeds = (target.seeds)();
            assert!(!seeds.is_empty(), "{}", target.name);
            seeds.iter().for_each(|seed| (target.run)(seed));
            proptest!(ProptestConfig::with_cases(200), |(bytes in input(seeds))| {
                (target.run)(&bytes);
            });
        }
    }
}
