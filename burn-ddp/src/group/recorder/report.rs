//! The ranks' last operations side by side.

use super::{Operation, Record, State, Tail};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

/// Orders named in a report; a job has a few in which something is wrong.
const ORDERS: usize = 16;

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

/// How far each rank is in one order: the last operation it began.
type Progress<'a> = BTreeMap<usize, &'a Record>;

/// What has its operations in the same order on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Group(u32),
    /// The exchanges under one tag.
    Exchange(u64),
}

impl Report<'_> {
    fn known(&self) -> impl Iterator<Item = (usize, &Tail)> {
        let tails = self.tails.iter().enumerate();
        tails.filter_map(|(rank, tail)| Some((rank, tail.as_ref()?)))
    }

    fn orders(&self) -> BTreeSet<Order> {
        let records = self.known().flat_map(|(_, tail)| &tail.records);
        records.map(|record| record.operation.order()).collect()
    }

    fn progress(&self, order: Order) -> Progress<'_> {
        let last = |tail: &'_ Tail| {
            let records = tail.records.iter().enumerate();
            let records = records.filter(|(_, record)| record.operation.order() == order);
            Some(
                records
                    .max_by_key(|(_, record)| record.operation.sequence())?
                    .0,
            )
        };
        self.known()
            .filter_map(|(rank, tail)| Some((rank, &tail.records[last(tail)?])))
            .collect()
    }

    /// The ranks that are not as far as the first one in `order`, if somebody waits there.
    fn behind(&self, order: Order) -> Option<Behind<'_>> {
        let progress = self.progress(order);
        let furthest = *progress
            .values()
            .max_by_key(|record| record.operation.sequence())?;
        if matches!(furthest.state, State::Completed(_)) {
            return None;
        }
        let ranks: Vec<_> = self
            .known()
            .map(|(rank, _)| (rank, progress.get(&rank).copied()))
            .filter(|(_, last)| {
                last.is_none_or(|last| last.operation.sequence() < furthest.operation.sequence())
            })
            .collect();
        (!ranks.is_empty()).then_some(Behind { furthest, ranks })
    }

    /// The oldest operation of `order` that is not the same on all ranks that have recorded it.
    fn first_difference(&self, order: Order) -> Option<Variants> {
        let mut by_sequence: BTreeMap<u64, Variants> = BTreeMap::new();
        for (rank, tail) in self.known() {
            let operations = tail.records.iter().map(|record| record.operation);
            for operation in operations.filter(|operation| operation.order() == order) {
                let variants = by_sequence.entry(operation.sequence()).or_default();
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
    /// With the last operation each has begun in the order.
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
        let findings = self.orders().into_iter().filter_map(|order| {
            let (behind, difference) = (self.behind(order), self.first_difference(order));
            (behind.is_some() || difference.is_some()).then_some((order, behind, difference))
        });
        for (order, behind, difference) in findings.take(ORDERS) {
            if let Some(Behind { furthest, ranks }) = behind {
                writeln!(f, "behind in {order}, where {} is due:", furthest.operation)?;
                for (rank, last) in ranks {
                    match last {
                        Some(last) => writeln!(f, "  rank {rank} is at {last}")?,
                        None => writeln!(f, "  rank {rank} has no operation there")?,
                    }
                }
            }
            if let Some(variants) = difference {
                writeln!(f, "first difference in {order}:")?;
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

impl Operation {
    fn order(&self) -> Order {
        match self {
            Operation::Collective { group, .. } => Order::Group(*group),
            Operation::Exchange { tag, .. } => Order::Exchange(*tag),
        }
    }

    fn sequence(&self) -> u64 {
        match self {
            Operation::Collective { sequence, .. } | Operation::Exchange { sequence, .. } => {
                *sequence
            }
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Group(group) => write!(f, "group {group}"),
            Order::Exchange(tag) => write!(f, "control exchanges {tag:#x}"),
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Collective {
                group,
                buffer,
                sequence,
                kind,
                dtype,
                count,
            } => {
                write!(f, "{group}.{sequence} {kind}")?;
                if *count > 0 {
                    write!(f, " of {count} x {dtype}")?;
                }
                if *buffer > 0 {
                    write!(f, " in buffer {buffer}")?;
                }
                Ok(())
            }
            Operation::Exchange { tag, sequence } => {
                write!(f, "control exchange {tag:#x}.{sequence}")
            }
        }
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
