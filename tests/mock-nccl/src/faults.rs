//! What goes wrong on demand.
//!
//! `MOCK_NCCL_FAULT` is a list of `name[:number][@rank]`, separated by commas; without a rank all have it. `number` is that of an operation of
//! the communicator, from 0, unless said otherwise.
//!
//! | name | what happens |
//! |---|---|
//! | `version` | ncclGetVersion says `number` |
//! | `init-refused` | ncclCommInitRankConfig returns an error and no communicator |
//! | `init-error` | the start fails in the background |
//! | `init-hang` | this rank never comes to the start |
//! | `call-error` | the call of the operation returns ncclInvalidUsage |
//! | `call-unknown` | it returns 99, which no NCCL has so far |
//! | `call-hang` | it never returns |
//! | `enqueue-hang` | the operation stays in progress and never gets to the stream |
//! | `hang` | the operation gets to the stream and never ends |
//! | `async-error` | it does, and ncclCommGetAsyncError says ncclRemoteError |
//! | `finalize-hang` | ncclCommFinalize stays in progress |
//! | `destroy-hang`, `abort-hang` | ncclCommDestroy or ncclCommAbort never returns |

use std::env;

const VARIABLE: &str = "MOCK_NCCL_FAULT";

pub(crate) struct Fault {
    name: String,
    number: Option<u64>,
    rank: Option<usize>,
}

fn all() -> Vec<Fault> {
    let list = env::var(VARIABLE).unwrap_or_default();
    list.split(',').filter_map(parse).collect()
}

fn parse(fault: &str) -> Option<Fault> {
    let (fault, rank) = match fault.trim().split_once('@') {
        Some((fault, rank)) => (fault, Some(rank.parse().ok()?)),
        None => (fault.trim(), None),
    };
    let (name, number) = match fault.split_once(':') {
        Some((name, number)) => (name, Some(number.parse().ok()?)),
        None => (fault, None),
    };
    let name = name.to_owned();
    Some(Fault { name, number, rank })
}

/// The version that the library claims to have.
pub(crate) fn version() -> Option<u64> {
    let mut faults = all().into_iter();
    faults.find(|fault| fault.name == "version")?.number
}

/// The faults of one communicator.
pub(crate) struct Faults(Vec<Fault>);

impl Faults {
    /// Those of `rank`, from the environment as it is now.
    pub(crate) fn of(rank: usize) -> Self {
        let mut faults = all();
        faults.retain(|fault| fault.rank.is_none_or(|of| of == rank));
        Self(faults)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|fault| fault.name == name)
    }

    /// Whether operation `number` has it.
    pub(crate) fn hits(&self, name: &str, number: u64) -> bool {
        let hit = |fault: &Fault| fault.name == name && fault.number.unwrap_or(0) == number;
        self.0.iter().any(hit)
    }
}
