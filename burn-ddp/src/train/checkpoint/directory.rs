//! The directory that holds the steps. Global rank 0 alone touches it.

use super::{
    files::{self, failed},
    lock::Lock,
    manifest::Manifest,
};
use crate::notice;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Names the newest step.
const LATEST: &str = "latest";
/// Begins the name of everything that is not, or no longer, a step.
const HIDDEN: &str = ".step-";

/// What to keep when a step has been added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Keep {
    /// The newest, at least 1; `None` for all.
    pub(super) last: Option<usize>,
    /// Multiples of this, besides.
    pub(super) every: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct Directory(PathBuf);

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn step(&self, step: u64) -> PathBuf {
        self.0.join(step_name(step))
    }

    /// A name that nothing has.
    pub(super) fn hidden(&self, step: u64, what: &str) -> Result<PathBuf, String> {
        let random = getrandom::u64().map_err(|e| format!("no random numbers: {e}"))?;
        Ok(self.0.join(format!("{HIDDEN}{step}.{what}-{random:016x}")))
    }

    /// Makes the directory, parents included.
    pub(super) fn create(&self) -> Result<(), String> {
        fs::create_dir_all(&self.0).map_err(failed("creating", &self.0))
    }

    fn names(&self) -> Result<Vec<String>, String> {
        let entries = match fs::read_dir(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed("reading", &self.0))?,
        };
        // A name that is no text is none of ours.
        let name =
            |entry: io::Result<fs::DirEntry>| match entry.map(|e| e.file_name().into_string()) {
                Ok(name) => name.ok().map(Ok),
                Err(error) => Some(Err(error)),
            };
        let names: io::Result<Vec<_>> = entries.filter_map(name).collect();
        names.map_err(failed("reading", &self.0))
    }

    fn steps(&self) -> Result<Vec<u64>, String> {
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(|n| parse(n)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    fn latest(&self) -> Option<u64> {
        let text = files::read(&self.0.join(LATEST), 100).ok()?;
        parse(std::str::from_utf8(&text).ok()?.trim())
    }

    /// The newest step whose files are all as they were saved. What is passed over is named in a warning; an error when there are steps and
    /// none is intact.
    pub(super) fn newest_intact(&self) -> Result<Option<Manifest>, String> {
        let _reading = Lock::shared(&self.0)?;
        let unfinished: Vec<_> = self
            .names()?
            .into_iter()
            .filter(|n| n.starts_with(HIDDEN))
            .collect();
        if !unfinished.is_empty() {
            notice::warn(format_args!(
                "{}: passing over saves that did not end: {}",
                self.0.display(),
                unfinished.join(", ")
            ));
        }
        let steps = newest_first(self.steps()?, self.latest());
        for &step in &steps {
            match Manifest::read_intact(&self.step(step), step) {
                Ok(manifest) => return Ok(Some(manifest)),
                Err(cause) => notice::warn(format_args!(
                    "{}: passing over {}, which is damaged: {cause}",
                    self.0.display(),
                    step_name(step)
                )),
            }
        }
        if steps.is_empty() {
            return Ok(None);
        }
        Err(format!(
            "all steps in {} are damaged, {} to begin with. Bring back a good copy, or begin anew in an empty directory",
            self.0.display(),
            step_name(steps[0])
        ))
    }

    /// One step, which must be intact.
    pub(super) fn intact(&self, step: u64) -> Result<Manifest, String> {
        let _reading = Lock::shared(&self.0)?;
        let manifest = Manifest::read_intact(&self.step(step), step);
        manifest.map_err(|cause| format!("{}: {}: {cause}", self.0.display(), step_name(step)))
    }

    /// Removes what killed saves have left. Only under the lock.
    pub(super) fn sweep(&self) -> Result<(), String> {
        for name in self.names()?.iter().filter(|n| n.starts_with(HIDDEN)) {
            remove(&self.0.join(name));
        }
        Ok(())
    }

    /// Makes the finished directory `draft` step `step`, then the latest, then removes what need not be kept.
    pub(super) fn publish(&self, draft: &Path, step: u64, keep: Keep) -> Result<(), String> {
        files::sync_directory(draft)?;
        let aside = self.hidden(step, "old")?;
        files::replace_directory(draft, &self.step(step), &aside)?;
        files::sync_directory(&self.0)?;
        self.point_latest(step)?;
        // The step is safe. What fails from here on is no failure of the save.
        remove(&aside);
        self.prune(step, keep);
        Ok(())
    }

    fn point_latest(&self, step: u64) -> Result<(), String> {
        let draft = self.hidden(step, "latest")?;
        let mut file = files::Writer::create(draft.clone())?;
        file.write(format!("{}\n", step_name(step)).as_bytes())?;
        file.finish()?;
        let latest = self.0.join(LATEST);
        fs::rename(&draft, &latest).map_err(failed("replacing", &latest))?;
        files::sync_directory(&self.0)
    }

    fn prune(&self, newest: u64, keep: Keep) {
        let steps = self.steps().unwrap_or_default();
        for step in superfluous(&steps, newest, keep) {
            // Under a name that nobody takes for a step while its files go.
            if let Ok(aside) = self.hidden(step, "old")
                && fs::rename(self.step(step), &aside).is_ok()
            {
                remove(&aside);
            }
        }
    }
}

fn step_name(step: u64) -> String {
    format!("step-{step}")
}

fn parse(name: &str) -> Option<u64> {
    let step = name.strip_prefix("step-")?.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Best effort: what stays is hidden, and the next save tries again.
fn remove(path: &Path) {
    let removed = match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => return,
    };
    if let Err(error) = removed {
        notice::warn(format_args!("cannot remove {}: {error}", path.display()));
    }
}

/// The latest, then those before it, then those after it: they are the future of a run that was given up for the one that `latest` belongs to.
fn newest_first(mut steps: Vec<u64>, latest: Option<u64>) -> Vec<u64> {
    let after = |step: u64| latest.is_some_and(|latest| step > latest);
    steps.sort_unstable_by_key(|&step| (after(step), std::cmp::Reverse(step)));
    steps
}

/// Later steps than the newest belong to a run that was given up; they are replaced when this one comes there.
fn superfluous(steps: &[u64], newest: u64, keep: Keep) -> Vec<u64> {
    let Some(last) = keep.last else {
        return Vec::new();
    };
    let mut old: Vec<u64> = steps.iter().copied().filter(|s| *s < newest).collect();
    old.sort_unstable_by_key(|&step| std::cmp::Reverse(step));
    let kept = |step: &u64| keep.every.is_some_and(|n| step.is_multiple_of(n));
    old.into_iter()
        .skip(last.max(1) - 1)
        .filter(|step| !kept(step))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_comes_first_and_a_given_up_future_last() {
        let steps = || vec![5, 40, 10, 20];
        assert_eq!(newest_first(steps(), None), [40, 20, 10, 5]);
        assert_eq!(newest_first(steps(), Some(10)), [10, 5, 40, 20]);
        assert_eq!(newest_first(steps(), Some(15)), [10, 5, 40, 20]);
    }

    #[test]
    fn the_last_and_every_nth_are_kept() {
        let keep = |last, every| Keep { last, every };
        let steps = [10, 20, 30, 40, 50, 60];
        assert_eq!(superfluous(&steps, 50, keep(None, None)), [0; 0]);
        assert_eq!(superfluous(&steps, 50, keep(Some(2), None)), [30, 20, 10]);
        assert_eq!(superfluous(&steps, 50, keep(Some(1), Some(20))), [30, 10]);
        assert_eq!(superfluous(&steps, 10, keep(Some(1), None)), [0; 0]);
    }

    #[test]
    fn only_canonical_names_are_steps() {
        assert_eq!(parse("step-0"), Some(0));
        assert_eq!(parse("step-120"), Some(120));
        for name in [
            "step-",
            "step-012",
            "step-+1",
            "step-1x",
            "step--1",
            ".step-1",
            "step-99999999999999999999",
        ] {
            assert_eq!(parse(name), None, "{name}");
        }
    }
}
