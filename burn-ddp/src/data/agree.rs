//! Comparing a loader's settings across ranks before the first batch.

use super::{DataError, Tail};
use crate::group::{DType, ProcessGroup};

/// What all ranks must have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) len: usize,
    pub(super) batch_size: usize,
    pub(super) tail: Tail,
    pub(super) seed: Option<u64>,
    pub(super) world_size: usize,
}

const FIELDS: usize = 6;

impl Settings {
    fn encode(&self) -> [u64; FIELDS] {
        let tail = match self.tail {
            Tail::Pad => 0,
            Tail::Drop => 1,
            Tail::Exact => 2,
        };
        [
            self.world_size as u64,
            self.len as u64,
            self.batch_size as u64,
            tail,
            u64::from(self.seed.is_some()),
            self.seed.unwrap_or(0),
        ]
    }
}

fn describe(field: usize, value: u64) -> (&'static str, String) {
    let name = |names: &[&str]| {
        let name = usize::try_from(value)
            .ok()
            .and_then(|index| names.get(index));
        name.map_or_else(|| format!("unknown ({value})"), |name| (*name).to_owned())
    };
    match field {
        0 => ("the world size", value.to_string()),
        1 => ("the number of items in the data set", value.to_string()),
        2 => ("the batch size", value.to_string()),
        3 => ("the tail mode", name(&["Pad", "Drop", "Exact"])),
        4 => ("shuffling", name(&["off", "on"])),
        _ => ("the shuffling seed", value.to_string()),
    }
}

/// Collective. The same verdict on every rank: the lowest rank that differs from rank 0, at its
/// first differing setting.
pub(super) fn agree(group: &dyn ProcessGroup, settings: &Settings) -> Result<(), DataError> {
    let ours = settings.encode();
    let mut all = vec![0u64; FIELDS * group.world_size()];
    group.all_gather(
        bytemuck::cast_slice(&ours),
        bytemuck::cast_slice_mut(&mut all),
        DType::U64,
    )?;
    let (reference, rest) = all.split_at(FIELDS);
    for (peer, theirs) in rest.chunks_exact(FIELDS).enumerate() {
        if let Some(field) = (0..FIELDS).find(|&field| theirs[field] != reference[field]) {
            let (what, theirs) = describe(field, theirs[field]);
            let (_, reference) = describe(field, reference[field]);
            return Err(DataError::Disagreement {
                rank: group.rank(),
                what,
                peer: peer + 1,
                theirs,
                reference,
            });
        }
    }
    Ok(())
}
