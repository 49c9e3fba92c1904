//! Saving, as all ranks do it together.

use super::{
    directory::{Directory, Keep},
    draft::Draft,
    error::CheckpointError,
    manifest::Kind,
    snapshot::{Payload, Snapshot},
    transfer,
};
use crate::{ddp::Ddp, error::Error};
use serde::{Deserialize, Serialize};

/// What a rank has for the others.
#[derive(Serialize, Deserialize)]
struct Offer {
    step: u64,
    entries: String,
    /// Sizes of its own entries, in their order; or why there is nothing.
    sizes: Result<Vec<u64>, String>,
}

/// An entry of one rank, encoded.
struct Own {
    name: String,
    kind: Kind,
    bytes: Payload,
}

/// Collective.
pub(super) fn save(
    ddp: &Ddp,
    directory: &Directory,
    keep: Keep,
    step: u64,
    snapshot: Snapshot<'_>,
) -> Result<(), Error> {
    let entries = snapshot.describe();
    let (own, draft, sizes) = match prepare(ddp, directory, step, snapshot) {
        Ok((own, draft)) => {
            let sizes = own.iter().map(|own| own.bytes.len() as u64).collect();
            (own, draft, Ok(sizes))
        }
        Err(cause) => (Vec::new(), None, Err(cause)),
    };
    // Rank 0 may have written for minutes.
    ddp.monitored_barrier()?;
    let offers = ddp.all_gather(&Offer {
        step,
        entries,
        sizes,
    })?;
    let sizes = agree(ddp.rank(), step, &offers)?;
    let draft = collect(ddp, draft, &own, &sizes)?;
    let outcome = match draft {
        Some(draft) => draft.and_then(|draft| draft.publish(keep)),
        None => Ok(()),
    };
    ddp.monitored_barrier()?;
    let outcome = ddp.broadcast(outcome)?;
    Ok(outcome.map_err(|cause| CheckpointError::Save {
        rank: ddp.rank(),
        step,
        peer: 0,
        cause,
    })?)
}

/// Encodes this rank's own entries; on rank 0 writes those of the whole job.
fn prepare(
    ddp: &Ddp,
    directory: &Directory,
    step: u64,
    snapshot: Snapshot<'_>,
) -> Result<(Vec<Own>, Option<Draft>), String> {
    snapshot.check()?;
    let mut draft = match ddp.is_main() {
        true => Some(Draft::create(directory, step, ddp.world_size())?),
        false => None,
    };
    let mut own = Vec::new();
    for part in snapshot.parts {
        let (name, kind) = (part.name, part.kind);
        let encode = || (part.encode)().map_err(|cause| format!("encoding `{name}`: {cause}"));
        if part.per_rank {
            let bytes = encode()?;
            own.push(Own { name, kind, bytes });
        } else if let Some(draft) = &mut draft {
            let bytes = encode()?;
            let entry = (name.as_str(), kind, None);
            let mut file = draft.file(entry)?;
            file.write(&bytes)?;
            draft.finish(entry, file)?;
        }
    }
    Ok((own, draft))
}

/// The sizes of all ranks' entries, if all offer the same.
fn agree(rank: usize, step: u64, offers: &[Offer]) -> Result<Vec<Vec<u64>>, CheckpointError> {
    let call = |offer: &Offer| format!("step {} with {}", offer.step, offer.entries);
    let ours = call(&offers[rank]);
    for (peer, offer) in offers.iter().enumerate() {
        let theirs = call(offer);
        if theirs != ours {
            return Err(CheckpointError::Disagreement {
                rank,
                peer,
                ours,
                theirs,
            });
        }
    }
    let sizes = offers.iter().enumerate().map(|(peer, offer)| {
        let cause = |cause: &String| CheckpointError::Save {
            rank,
            step,
            peer,
            cause: cause.clone(),
        };
        offer.sizes.clone().map_err(|c| cause(&c))
    });
    sizes.collect()
}

/// Brings every rank's own entries into rank 0's draft. When writing fails there, the rest is still received: the other ranks are sending.
fn collect(
    ddp: &Ddp,
    draft: Option<Draft>,
    own: &[Own],
    sizes: &[Vec<u64>],
) -> Result<Option<Result<Draft, String>>, Error> {
    let mut draft = draft.map(Ok);
    for (rank, sizes) in sizes.iter().enumerate() {
        for (own, &size) in own.iter().zip(sizes) {
            let entry = (own.name.as_str(), own.kind, Some(rank));
            let mut file = match &draft {
                Some(Ok(draft)) => Some(draft.file(entry)),
                _ => None,
            };
            let mut write = |piece: &[u8]| {
                if let Some(Ok(writer)) = &mut file
                    && let Err(cause) = writer.write(piece)
                {
                    file = Some(Err(cause));
                }
            };
            if rank == 0 {
                write(&own.bytes);
            } else {
                let bytes: &[u8] = if rank == ddp.rank() { &own.bytes } else { &[] };
                transfer::stream(ddp, rank, bytes, size, write)?;
            }
            if let Some(file) = file {
                draft = draft.map(|draft| {
                    let (mut draft, file) = (draft?, file?);
                    draft.finish(entry, file)?;
                    Ok(draft)
                });
            }
        }
    }
    Ok(draft)
}
