//! The time of one all-reduce, measured as the peers' scripts measure theirs.

use burn_ddp::group::{DType, ProcessGroup, ReduceOp, Result};
use std::time::{Duration, Instant};

/// Whose memory is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Buffer {
    /// Memory of the caller, in place.
    Any,
    /// A buffer in the group's own memory, where gradient buckets live.
    Group,
}

/// The median time of an f32 sum over `bytes` bytes, on this rank.
///
/// All ranks call it. Each sample starts at a barrier; the first three are not counted.
///
/// # Errors
///
/// The group's.
pub fn measure(group: &dyn ProcessGroup, bytes: usize, buffer: Buffer) -> Result<Duration> {
    let ones = |data: &mut [u8]| {
        data.as_chunks_mut()
            .0
            .iter_mut()
            .for_each(|x| *x = 1f32.to_ne_bytes());
    };
    match buffer {
        Buffer::Any => {
            let mut data = vec![0; bytes];
            ones(&mut data);
            samples(group, bytes, || {
                group.all_reduce(&mut data, DType::F32, ReduceOp::Sum)
            })
        }
        Buffer::Group => {
            let mut data = group.buffer(bytes)?;
            ones(data.input());
            samples(group, bytes, || {
                data.all_reduce(bytes, DType::F32, ReduceOp::Sum)
            })
        }
    }
}

/// How often the peers' scripts repeat an operation.
fn repetitions(bytes: usize) -> usize {
    (200_000_000 / bytes.max(1 << 16)).clamp(5, 300)
}

fn samples(
    group: &dyn ProcessGroup,
    bytes: usize,
    mut operation: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    for _ in 0..3 {
        operation()?;
    }
    let mut times = Vec::new();
    for _ in 0..repetitions(bytes) {
        group.barrier()?;
        let start = Instant::now();
        operation()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}
