//! Whole models across ranks: make them equal, compare them.

use crate::{
    autodiff::ParamHook,
    dtype,
    error::Error,
    group::{DType, ProcessGroup, ReduceOp, objects},
};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, Reparameterization};
use burn::tensor::{Bool, Bytes, Device, Int, Tensor, TensorData};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;

/// Bytes sent in one broadcast at the most, plus one tensor.
const CHUNK: usize = 32 << 20;

/// A tensor of a model.
struct Entry {
    path: String,
    data: TensorData,
    trainable: bool,
}

/// Every parameter and buffer of `model`, in registration order. Running statistics must have been
/// synchronised over threads (`Module::valid` does) to be current.
fn entries<M: Module>(model: &M, rank: usize) -> Result<Vec<Entry>, Error> {
    let mut reader = Reader {
        rank,
        path: Vec::new(),
        in_hook: false,
        entries: Ok(Vec::new()),
    };
    model.visit(&mut reader);
    reader.entries
}

struct Reader {
    rank: usize,
    path: Vec<String>,
    /// Inside a hook, which shows at most a stand-in that is no part of the model.
    in_hook: bool,
    entries: Result<Vec<Entry>, Error>,
}

impl Reader {
    fn read(&mut self, trainable: bool, data: impl FnOnce() -> Result<TensorData, String>) {
        if self.in_hook {
            return;
        }
        let Ok(entries) = &mut self.entries else {
            return;
        };
        let path = self.path.join(".");
        match data() {
            Ok(data) => entries.push(Entry {
                path,
                data,
                trainable,
            }),
            Err(cause) => {
                let rank = self.rank;
                self.entries = Err(Error::Read { rank, path, cause });
            }
        }
    }
}

impl ModuleVisitor for Reader {
    fn enter_module(&mut self, name: &str, container: &str) {
        // A field of the user's may have the hook's name, but not its container.
        self.in_hook = name == ParamHook::NAME && container == "Reparameterization";
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.in_hook = false;
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let trainable = param.is_require_grad();
        self.read(trainable, || {
            param.base().try_into_data().map_err(|e| e.to_string())
        });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.read(false, || {
            param.base().try_into_data().map_err(|e| e.to_string())
        });
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.read(false, || {
            param.base().try_into_data().map_err(|e| e.to_string())
        });
    }
}

/// Replaces the values of a model, in traversal order; `None` keeps a value.
struct Writer {
    values: VecDeque<Option<TensorData>>,
}

impl Writer {
    fn next(&mut self) -> Option<TensorData> {
        self.values.pop_front().flatten()
    }
}

impl ModuleMapper for Writer {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(data) = self.next() else {
            return param;
        };
        param.map(|old| {
            let (device, dtype): (Device, _) = (old.device(), data.dtype());
            let new = Tensor::<D>::from_data(data, (&device, dtype));
            // On a device without autodiff there is nothing to set.
            if old.is_require_grad() {
                new.require_grad()
            } else {
                new
            }
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        let Some(data) = self.next() else {
            return param;
        };
        param.map(|old| {
            let dtype = data.dtype();
            Tensor::from_data(data, (&old.device(), dtype))
        })
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        let Some(data) = self.next() else {
            return param;
        };
        param.map(|old| Tensor::from_data(data, &old.device()))
    }
}

fn write<M: Module>(model: M, values: Vec<Option<TensorData>>) -> M {
    model.map(&mut Writer {
        values: values.into(),
    })
}

/// Rank 0's parameters and buffers on every rank; collective. The shapes are checked first.
pub(crate) fn broadcast<M: Module>(model: M, group: &dyn ProcessGroup) -> Result<M, Error> {
    if group.world_size() == 1 {
        return Ok(model);
    }
    let rank = group.rank();
    // Brings running statistics that another thread updated into the model itself.
    let _ = model.valid();
    let mut entries = entries(&model, rank)?;
    agree_on_entries(&entries, group)?;
    let mut start = 0;
    while start < entries.len() {
        let mut end = start;
        let mut chunk = Vec::new();
        while end < entries.len() && chunk.len() < CHUNK {
            chunk.extend_from_slice(entries[end].data.as_bytes());
            end += 1;
        }
        group.broadcast(&mut chunk, DType::U8, 0)?;
        let mut rest = &chunk[..];
        for entry in &mut entries[start..end] {
            let (head, tail) = rest.split_at(entry.data.as_bytes().len());
            overwrite(&mut entry.data, head);
            rest = tail;
        }
        start = end;
    }
    if rank == 0 {
        return Ok(model);
    }
    Ok(write(
        model,
        entries.into_iter().map(|e| Some(e.data)).collect(),
    ))
}

fn overwrite(data: &mut TensorData, bytes: &[u8]) {
    TensorData::with_bytes_mut([data], |storage: Vec<&mut Bytes>| {
        for target in storage {
            target.copy_from_slice(bytes);
        }
    });
}

/// Compares path, shape and element type of all entries over the ranks.
fn agree_on_entries(entries: &[Entry], group: &dyn ProcessGroup) -> Result<(), Error> {
    let rank = group.rank();
    let describe = |e: &Entry| {
        format!(
            "`{}` {:?} {:?}",
            e.path,
            e.data.shape().as_slice(),
            e.data.dtype()
        )
    };
    let ours: Vec<String> = entries.iter().map(describe).collect();
    let text = ours.join("\n");
    for (peer, theirs) in objects::gather(group, text.as_bytes())?
        .into_iter()
        .enumerate()
    {
        if theirs == text.as_bytes() {
            continue;
        }
        let theirs = String::from_utf8_lossy(&theirs).into_owned();
        let theirs: Vec<&str> = theirs.lines().collect();
        let absent = "nothing (the model ends here)";
        let index = (0..ours.len().max(theirs.len()))
            .find(|&i| ours.get(i).map(String::as_str) != theirs.get(i).copied());
        let index = index.unwrap_or(0);
        return Err(Error::ModelMismatch {
            rank,
            peer,
            what: "a parameter or buffer".into(),
            ours: ours.get(index).map_or(absent, |s| s).into(),
            theirs: theirs.get(index).copied().unwrap_or(absent).into(),
        });
    }
    Ok(())
}

/// SHA-256 of every parameter and buffer, with its path.
fn hashes<M: Module>(model: &M, rank: usize) -> Result<Vec<(String, [u8; 32])>, Error> {
    let _ = model.valid();
    let hash = |e: Entry| {
        let mut hasher = Sha256::new();
        hasher.update(format!(
            "{} {:?} {:?}",
            e.path,
            e.data.shape().as_slice(),
            e.data.dtype()
        ));
        hasher.update(e.data.as_bytes());
        (e.path, hasher.finalize().into())
    };
    Ok(entries(model, rank)?.into_iter().map(hash).collect())
}

/// One hexadecimal SHA-256 over all parameters and buffers.
pub(crate) fn hash<M: Module>(model: &M, rank: usize) -> Result<String, Error> {
    let mut all = Sha256::new();
    for (_, hash) in hashes(model, rank)? {
        all.update(hash);
    }
    Ok(all
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// `Ok` when all ranks hold the same bits, else the first parameter that differs from rank 0's; collective.
pub(crate) fn check<M: Module>(model: &M, group: &dyn ProcessGroup) -> Result<(), Error> {
    let rank = group.rank();
    let ours = hashes(model, rank)?;
    let flat: Vec<u8> = ours.iter().flat_map(|(_, hash)| *hash).collect();
    let all = objects::gather(group, &flat)?;
    let first = (0..ours.len()).find_map(|i| {
        let at = |peer: usize| all[peer].get(i * 32..(i + 1) * 32);
        (1..all.len())
            .find(|&peer| at(peer) != at(0))
            .map(|peer| (i, peer))
    });
    match first {
        None => Ok(()),
        Some((i, peer)) => Err(Error::ReplicasDiffer {
            rank,
            peer,
            path: ours[i].0.clone(),
        }),
    }
}

/// The mean over ranks of every float buffer (what is neither trainable nor equal on all ranks); collective.
pub(crate) fn average_buffers<M: Module>(model: M, group: &dyn ProcessGroup) -> Result<M, Error> {
    let _ = model.valid();
    let entries = entries(&model, group.rank())?;
    let mut values = Vec::with_capacity(entries.len());
    for mut entry in entries {
        let dtype = dtype::float(entry.data.dtype()).filter(|_| !entry.trainable);
        let Some(dtype) = dtype else {
            values.push(None);
            continue;
        };
        let bytes = entry.data.as_bytes().to_vec();
        let (mut low, mut high, mut mean) = (bytes.clone(), bytes.clone(), bytes);
        group.all_reduce(&mut low, dtype, ReduceOp::Min)?;
        group.all_reduce(&mut high, dtype, ReduceOp::Max)?;
        // A frozen parameter is equal everywhere, and a mean of equal numbers can round.
        if low == high {
            values.push(None);
            continue;
        }
        group.all_reduce(&mut mean, dtype, ReduceOp::Mean)?;
        overwrite(&mut entry.data, &mean);
        values.push(Some(entry.data));
    }
    Ok(write(model, values))
}
