//! What a step's directory says of itself.

use super::files;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::Path};

/// The manifest's file.
pub(super) const FILE: &str = "manifest.json";
/// Grows with every change that older versions cannot read.
const FORMAT: u32 = 1;
/// Larger than any that was written, so that a damaged one cannot exhaust the memory.
const MAX_BYTES: u64 = 64 << 20;
const MAX_NAME: usize = 100;

/// What an entry holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    Model,
    Optimizer,
    Scheduler,
    Value,
    Bytes,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
            Self::Scheduler => "scheduler",
            Self::Value => "value",
            Self::Bytes => "bytes",
        }
    }

    fn extension(self) -> &'static str {
        match self {
            Self::Model | Self::Optimizer | Self::Scheduler => "bpk",
            Self::Value => "postcard",
            Self::Bytes => "bin",
        }
    }
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// The rank it belongs to; `None` when it is the whole job's.
    pub(super) rank: Option<usize>,
    pub(super) bytes: u64,
    /// Hexadecimal.
    pub(super) sha256: String,
}

impl Entry {
    /// A function of checked parts, so that no manifest can point out of its directory.
    pub(super) fn file(name: &str, kind: Kind, rank: Option<usize>) -> String {
        let extension = kind.extension();
        match rank {
            Some(rank) => format!("{name}.rank-{rank}.{extension}"),
            None => format!("{name}.{extension}"),
        }
    }

    pub(super) fn file_name(&self) -> String {
        Self::file(&self.name, self.kind, self.rank)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u32,
    /// The version of this crate that wrote it, for people.
    burn_ddp: String,
    pub(super) step: u64,
    pub(super) world_size: usize,
    pub(super) entries: Vec<Entry>,
}

impl Manifest {
    pub(super) fn new(step: u64, world_size: usize) -> Self {
        Self {
            format: FORMAT,
            burn_ddp: env!("CARGO_PKG_VERSION").into(),
            step,
            world_size,
            entries: Vec::new(),
        }
    }

    pub(super) fn to_text(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self).map_err(|e| e.to_string())
    }

    /// Checks all that can be checked without the other files.
    pub(super) fn from_text(text: &[u8]) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            format: u32,
            burn_ddp: String,
        }
        let json = |e: serde_json::Error| format!("{FILE}: {e}");
        let Version { format, burn_ddp } = serde_json::from_slice(text).map_err(json)?;
        if format != FORMAT {
            return Err(format!(
                "{FILE} has format {format} and was written by burn-ddp {burn_ddp}; this version reads format {FORMAT}"
            ));
        }
        let manifest: Self = serde_json::from_slice(text).map_err(json)?;
        manifest
            .check()
            .map_err(|cause| format!("{FILE}: {cause}"))?;
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        let mut ranks: BTreeMap<&str, Vec<Option<usize>>> = BTreeMap::new();
        for entry in &self.entries {
            check_name(&entry.name)?;
            ranks.entry(&entry.name).or_default().push(entry.rank);
        }
        for (name, mut found) in ranks {
            found.sort_unstable();
            let every_rank = || found.iter().copied().eq((0..self.world_size).map(Some));
            if found != [None] && !every_rank() {
                let size = self.world_size;
                return Err(format!(
                    "`{name}` is neither one entry nor one for each of {size} ranks"
                ));
            }
        }
        Ok(())
    }

    /// The manifest of the step in `folder`, after comparing every file with it.
    pub(super) fn read_intact(folder: &Path, step: u64) -> Result<Self, String> {
        let text = files::read(&folder.join(FILE), MAX_BYTES)?;
        let manifest = Self::from_text(&text)?;
        if manifest.step != step {
            return Err(format!("{FILE} is of step {}", manifest.step));
        }
        for entry in &manifest.entries {
            let file = entry.file_name();
            let (bytes, sha256) = files::digest(&folder.join(&file))?;
            if bytes != entry.bytes {
                let expected = entry.bytes;
                return Err(format!("{file} has {bytes} bytes instead of {expected}"));
            }
            if sha256 != entry.sha256 {
                return Err(format!(
                    "{file} is not what was saved (its SHA-256 differs)"
                ));
            }
        }
        Ok(manifest)
    }

    /// Names and kinds, in the order in which they were saved.
    pub(super) fn describe(&self) -> String {
        let firsts = self
            .entries
            .iter()
            .filter(|e| e.rank.is_none_or(|r| r == 0));
        let words: Vec<_> = firsts
            .map(|e| format!("{} `{}`", e.kind.name(), e.name))
            .collect();
        match words.is_empty() {
            true => "nothing".into(),
            false => words.join(", "),
        }
    }
}

/// A name becomes part of a file's name, on any system.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let good = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(good) {
        return Err(format!(
            "{name:?} cannot name an entry: use 1 to {MAX_NAME} of the characters a-z, A-Z, 0-9, - and _"
        ));
    }
    Ok(())
}
