//! The ranks' last operations side by side.

use super::{Operation, Record, State, Tail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

/// Groups named in a report; a job has a few.
const GROUPS: usize = 16;

/// What each rank did last, as one table, and what follows from it.
#[derive(Debug)]
pub(crate) struct Report<'a> {
    /// Why the job failed.
    pub(crate) cause: &'a str,
    /// By rank.
    pub(crate) hosts: &'a [String],
    /// By rank; `None` for a rank that did not answer.
    pub(crate) tails: &'a [Option<Tail>],
}

/// What the ranks did under one sequence number, and which ranks.
type Variants = Vec<(Operation, Vec<usize>)>;

/// How far each rank is in one group: the last operation it began.
type Progress<'a> = BTreeMap<usize, &'a Record>;

impl Report<'_> {
    fn known(&self) -> impl Iterator<Item = (usize, &Tail)> {
        let tails = self.tails.iter().enumerate();
        tails.filter_map(|(rank, tail)| Some((rank, tail.as_ref()?)))
    }

    fn groups(&self) -> BTreeSet<u32> {
        let records = self.known().flat_map(|(_, tail)| &tail.records);
        records.map(|record| record.operation.group).collect()
    }

    fn progress(&self, group: u32) -> Progress<'_> {
        let last = |tail: &'_ Tail| {
            let records = tail.records.iter().enumerate();
            let records = records.filter(|(_, record)| record.operation.group == group);
            Some(
                records
                    .max_by_key(|(_, record)| record.operation.sequence)?
                    .0,
            )
        };
        self.known()
            .filter_map(|(rank, tail)| Some((rank, &tail.records[last(tail)?])))
            .collect()
    }

    /// The ranks that are not as far as the first one in `group`, if somebody waits there.
    fn behind(&self, group: u32) -> Option<Behind<'_>> {
        let progress = self.progress(group);
        let furthest = *progress
            .values()
            .max_by_key(|record| record.operation.sequence)?;
        if matches!(furthest.state, State::Completed(_)) {
            return None;
        }
        let ranks: Vec<_> = self
            .known()
            .map(|(rank, _)| (rank, progress.get(&rank).copied()))
            .filter(|(_, last)| {
                last.is_none_or(|last| last.operation.sequence < furthest.operation.sequence)
            })
            .collect();
        (!ranks.is_empty()).then_some(Behind { furthest, ranks })
    }

    /// The oldest operation of `group` that is not the same on all ranks that have recorded it.
    fn first_difference(&self, group: u32) -> Option<Variants> {
        let mut by_sequence: BTreeMap<u64, Variants> = BTreeMap::new();
        for (rank, tail) in self.known() {
            let operations = tail.records.iter().map(|record| record.operation);
            for operation in operations.filter(|operation| operation.group == group) {
                let variants = by_sequence.entry(operation.sequence).or_default();
                match variants.iter_mut().find(|(known, _)| *known == operation) {
                    Some((_, ranks)) => ranks.push(rank),
                    None => variants.push((operation, vec![rank])),
                }
            }
        }
        by_sequence
            .into_values()
            .find(|variants| variants.len() > 1)
    }
}

struct Behind<'a> {
    furthest: &'a Record,
    /// With the last operation each has begun in the group.
    ranks: Vec<(usize, Option<&'a Record>)>,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the job failed: {}", self.cause)?;
        let mut rows = vec![["rank", "host", "last completed", "pending"].map(str::to_owned)];
        for (rank, tail) in self.tails.iter().enumerate() {
            let host = self.hosts.get(rank).cloned().unwrap_or_default();
            let [completed, pending] = match tail {
                Some(tail) => [last_completed(tail), unfinished(tail)],
                None => ["did not answer", ""].map(str::to_owned),
            };
            rows.push([rank.to_string(), host, completed, pending]);
        }
        write_table(f, &rows)?;
        for group in self.groups().into_iter().take(GROUPS) {
            if let Some(Behind { furthest, ranks }) = self.behind(group) {
                writeln!(
                    f,
                    "behind in group {group}, where {} is due:",
                    furthest.operation
                )?;
                for (rank, last) in ranks {
                    match last {
                        Some(last) => writeln!(f, "  rank {rank} is at {last}")?,
                        None => writeln!(f, "  rank {rank} has no operation there")?,
                    }
                }
            }
            if let Some(variants) = self.first_difference(group) {
                writeln!(f, "first difference in group {group}:")?;
                for (operation, ranks) in variants {
                    writeln!(f, "  {operation} on rank(s) {ranks:?}")?;
                }
            }
        }
        Ok(())
    }
}

fn last_completed(tail: &Tail) -> String {
    let ended = |record: &&Record| match record.state {
        // How long ago it ended.
        State::Completed(took) => Some(record.age.saturating_sub(took)),
        State::Pending | State::Failed(_) => None,
    };
    let completed = tail.records.iter().filter(|record| ended(record).is_some());
    completed
        .min_by_key(ended)
        .map_or("none".into(), Record::to_string)
}

fn unfinished(tail: &Tail) -> String {
    let unfinished = |record: &&Record| !matches!(record.state, State::Completed(_));
    let texts: Vec<_> = tail
        .records
        .iter()
        .filter(unfinished)
        .map(Record::to_string)
        .collect();
    match texts.is_empty() {
        true => "none".into(),
        false => texts.join("; "),
    }
}

fn write_table<const N: usize>(f: &mut fmt::Formatter<'_>, rows: &[[String; N]]) -> fmt::Result {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.max().unwrap_or_default()
    };
    for row in rows {
        let cells = row.iter().enumerate();
        let line: Vec<_> = cells
            .map(|(column, cell)| format!("{cell:<0$}", width(column)))
            .collect();
        writeln!(f, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} {}", self.group, self.sequence, self.kind)?;
        if self.count > 0 {
            write!(f, " of {} x {}", self.count, self.dtype)?;
        }
        if self.buffer > 0 {
            write!(f, " in buffer {}", self.buffer)?;
        }
        Ok(())
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = Duration::from_micros;
        write!(f, "{}", self.operation)?;
        match self.state {
            State::Pending => write!(f, ", for {:.1?}", time(self.age)),
            State::Failed(took) => write!(f, ", failed after {:.1?}", time(took)),
            State::Completed(took) => {
                let ago = self.age.saturating_sub(took);
                write!(f, ", {:.1?} ago", time(ago))
            }
        }
    }
}
