//! The whole state as an ordinary optimizer record, and back.

use super::{
    ZeroRedundancyOptimizer,
    exchange::stream,
    partition::Entry,
    state::{Cause, State, States},
};
use crate::{
    error::Error,
    train::{
        OptimizerError,
        params::{FloatVisitor, visit},
    },
};
use burn::module::{Module, Param};
use burn::optim::OptimizerRecord;
use burn::tensor::{Bytes, Tensor};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

impl ZeroRedundancyOptimizer {
    /// The state of all ranks as the record that the plain optimizer would have after the same steps; on rank 0, `None` on the others.
    /// Collective.
    ///
    /// It knows nothing of ranks: the plain optimizer loads it, and so does this one on any number of ranks. Rank 0 needs memory for the
    /// whole state, each other rank for a copy of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Group`]; [`OptimizerError::Record`] on the rank whose state cannot be read, and [`OptimizerError::PeerHasNoRecord`] on the others.
    pub fn to_record(&self) -> Result<Option<OptimizerRecord>, Error> {
        let (group, rank) = (&**self.ddp.group(), self.ddp.rank());
        let own = self.numbered().and_then(States::into_bytes);
        // No record is empty, so this says "none".
        let length = own.as_ref().map_or(0, |bytes| bytes.len() as u64);
        let lengths = self.ddp.all_gather(&length)?;
        let own = own.map_err(|cause| self.record_error(cause))?;
        if let Some(peer) = lengths.iter().position(|&length| length == 0) {
            return Err(OptimizerError::PeerHasNoRecord { rank, peer }.into());
        }
        let mut ranks = Vec::new();
        for (peer, &length) in lengths.iter().enumerate() {
            let mut bytes = Vec::new();
            let from = (peer == rank).then_some(&own[..]);
            stream(group, from, length as usize, peer, |part| {
                if rank == 0 {
                    bytes.extend_from_slice(part);
                }
            })?;
            ranks.push(bytes);
        }
        if rank != 0 {
            return Ok(None);
        }
        let joined = self.join(ranks).and_then(States::into_record);
        joined.map(Some).map_err(|cause| self.record_error(cause))
    }

    /// Takes this rank's share of a whole state: of a record of this optimizer on any number of ranks, or of the plain one. All ranks must load the
    /// same record, which the next step checks; local.
    ///
    /// The state finds its parameter in `model` by the module path, so that the ids of parameters do not matter.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Record`] when the record cannot be read, has state for a parameter that `model` has not, or is
    /// another kind of optimizer's.
    pub fn load_record<M: Module>(
        mut self,
        record: OptimizerRecord,
        model: &M,
    ) -> Result<Self, Error> {
        let states = States::from_record(record).and_then(|states| by_path(states, model));
        let states = states.map_err(|cause| self.record_error(cause))?;
        let specs = self.survey(model, |candidate| states.contains_key(candidate.path))?;
        self.partition.enter(specs);
        let record = self.own(states).and_then(States::into_record);
        let record = record.map_err(|cause| self.record_error(cause))?;
        let saved = record.len();
        self.inner = self.inner.load_record(record);
        // Burn leaves out what it cannot use.
        let taken = self.inner.to_record().len();
        if taken != saved {
            return Err(self.record_error(format!(
                "the optimizer takes {taken} of the {saved} tensors in it: it is of another kind of optimizer, or of one with other settings"
            )));
        }
        Ok(self)
    }

    /// The state on this rank by parameter id.
    pub(super) fn states(&self) -> Result<States, Error> {
        States::from_record(self.inner.to_record()).map_err(|cause| self.record_error(cause))
    }

    fn record_error(&self, cause: Cause) -> Error {
        let rank = self.ddp.rank();
        OptimizerError::Record { rank, cause }.into()
    }

    /// The state on this rank by the partition's numbers, which are the same on all ranks.
    fn numbered(&self) -> Result<States, Cause> {
        let mut states = States::from_record(self.inner.to_record())?.0;
        let mut numbered = States::default();
        for (number, entry) in self.partition.entries().iter().enumerate() {
            // A parameter that was replaced by one with another id leaves a state behind that no step will find.
            if let Some(state) = states.remove(&entry.spec.id.val()) {
                numbered.0.insert(number as u64, state);
            }
        }
        Ok(numbered)
    }

    /// The state of all ranks by parameter id, from what each rank has by number.
    fn join(&self, ranks: Vec<Vec<u8>>) -> Result<States, Cause> {
        let mut parts: BTreeMap<usize, Vec<(usize, State)>> = BTreeMap::new();
        for (rank, bytes) in ranks.into_iter().enumerate() {
            for (number, state) in States::from_bytes(Bytes::from_bytes_vec(bytes))?.0 {
                parts
                    .entry(number as usize)
                    .or_default()
                    .push((rank, state));
            }
        }
        let mut whole = States::default();
        for (number, mut parts) in parts {
            let entry = self.partition.entries().get(number);
            let entry = entry.ok_or("the ranks know different parameters")?;
            let state = if self.split {
                State::join(placed(entry, parts), &entry.spec.dims)?
            } else {
                let only = parts.pop();
                only.ok_or("a parameter has no state on any rank")?.1
            };
            whole.0.insert(entry.spec.id.val(), state);
        }
        Ok(whole)
    }

    /// This rank's part of whole states, by parameter id.
    fn own(&self, mut states: BTreeMap<String, State>) -> Result<States, Cause> {
        let mut own = States::default();
        for entry in self.partition.entries() {
            let piece = entry.piece(self.ddp.rank());
            let (Some(piece), Some(state)) = (piece, states.remove(&entry.spec.path)) else {
                continue;
            };
            let state = if self.split {
                state.cut(&entry.spec.dims, piece.elements.clone())?
            } else {
                state
            };
            own.0.insert(entry.spec.id.val(), state);
        }
        Ok(own)
    }
}

/// Each part with the place of its elements.
fn placed(entry: &Entry, parts: Vec<(usize, State)>) -> Vec<(Range<usize>, State)> {
    parts
        .into_iter()
        .filter_map(|(rank, state)| Some((entry.piece(rank)?.elements.clone(), state)))
        .collect()
}

/// States by the paths of the parameters of `model` that they belong to.
fn by_path<M: Module>(states: States, model: &M) -> Result<BTreeMap<String, State>, Cause> {
    let mut names = Names::default();
    visit(model, &mut names);
    let mut found = BTreeMap::new();
    for (id, mut state) in states.0 {
        // Burn writes the path of every parameter that has made a step.
        let recorded = state.path.take().or_else(|| names.paths.get(&id).cloned());
        let path = recorded.unwrap_or_else(|| format!("parameter {id}"));
        state.path = Some(path.clone());
        found.insert(path, state);
    }
    match found.keys().find(|path| !names.known.contains(*path)) {
        None => Ok(found),
        Some(path) => Err(format!(
            "it has state for `{path}`, which the model has not; is it of another model?"
        )),
    }
}

#[derive(Default)]
struct Names {
    known: HashSet<String>,
    /// By parameter id.
    paths: HashMap<u64, String>,
}

impl FloatVisitor for Names {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        self.known.insert(path.to_string());
        self.paths.insert(param.id.val(), path.to_string());
    }
}
