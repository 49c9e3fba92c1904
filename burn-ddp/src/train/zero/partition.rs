//! Which rank owns which part of the optimizer state.

use crate::group::DType;
use burn::module::ParamId;
use std::{collections::HashMap, ops::Range};

/// A parameter as the partition sees it.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) path: String,
    pub(super) id: ParamId,
    pub(super) dims: Vec<usize>,
    pub(super) dtype: DType,
}

impl Spec {
    pub(super) fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// Elements of a flattened parameter, and the rank that steps them.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) owner: usize,
    pub(super) elements: Range<usize>,
}

/// A parameter whose owners are known.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) spec: Spec,
    /// In the order of their elements; those of a parameter without elements are none.
    pub(super) pieces: Vec<Piece>,
}

impl Entry {
    pub(super) fn bytes(&self, piece: &Piece) -> usize {
        piece.elements.len() * self.spec.dtype.size()
    }

    /// What `rank` owns of it.
    pub(super) fn piece(&self, rank: usize) -> Option<&Piece> {
        self.pieces.iter().find(|piece| piece.owner == rank)
    }
}

/// The owners of all parameters met so far.
///
/// A parameter gets its owners when it first has a gradient or a loaded state, and keeps them: freezing moves no state. The result
/// depends on paths, sizes and the order in which the parameters came only, which are the same on all ranks.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    /// Owned bytes, by rank.
    load: Vec<usize>,
    /// Whether a parameter may have several owners.
    split: bool,
    entries: Vec<Entry>,
    index: HashMap<String, usize>,
}

impl Partition {
    pub(super) fn new(world: usize, split: bool) -> Self {
        Self {
            load: vec![0; world],
            split,
            entries: Vec::new(),
            index: HashMap::new(),
        }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(super) fn find(&self, path: &str) -> Option<usize> {
        self.index.get(path).copied()
    }

    /// Numbers of the parameters `specs`, given in module order. New ones get their owners; known ones their present id.
    pub(super) fn enter(&mut self, specs: Vec<Spec>) -> Vec<usize> {
        let known = self.entries.len();
        let mut numbers = Vec::with_capacity(specs.len());
        for spec in specs {
            let number = self.find(&spec.path).unwrap_or_else(|| {
                let number = self.entries.len();
                self.index.insert(spec.path.clone(), number);
                self.entries.push(Entry {
                    spec: spec.clone(),
                    pieces: Vec::new(),
                });
                number
            });
            self.entries[number].spec.id = spec.id;
            numbers.push(number);
        }
        if self.split {
            self.cut(known);
        } else {
            self.deal(known);
        }
        numbers
    }

    /// Gives each of the parameters from number `from` on to one rank: the largest first, each to the rank that has least
    /// (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17, 1969).
    fn deal(&mut self, from: usize) {
        let mut order: Vec<usize> = (from..self.entries.len()).collect();
        order.sort_by_key(|&number| std::cmp::Reverse(self.entries[number].spec.bytes()));
        for number in order {
            let entry = &mut self.entries[number];
            let least = (0..self.load.len()).min_by_key(|&rank| self.load[rank]);
            let owner = least.unwrap_or(0);
            self.load[owner] += entry.spec.bytes();
            entry.pieces.push(Piece {
                owner,
                elements: 0..entry.spec.elements(),
            });
        }
    }

    /// Lays the parameters from number `from` on end to end and cuts the whole into as many equal parts as there are ranks.
    fn cut(&mut self, from: usize) {
        let world = self.load.len();
        let total: usize = self.entries[from..].iter().map(|e| e.spec.bytes()).sum();
        let cut = |rank: usize| (total as u128 * rank as u128 / world as u128) as usize;
        let mut start = 0;
        for entry in &mut self.entries[from..] {
            let (size, elements) = (entry.spec.dtype.size(), entry.spec.elements());
            // An element belongs to the part in which it begins.
            let first = |rank| cut(rank).saturating_sub(start).div_ceil(size).min(elements);
            for owner in 0..world {
                let elements = first(owner)..first(owner + 1);
                if !elements.is_empty() {
                    self.load[owner] += elements.len() * size;
                    entry.pieces.push(Piece { owner, elements });
                }
            }
            start += entry.spec.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(path: &str, elements: usize) -> Spec {
        Spec {
            path: path.into(),
            id: ParamId::from(1),
            dims: vec![elements],
            dtype: DType::F32,
        }
    }

    /// Path, owner and elements of each piece.
    fn pieces(partition: &Partition) -> Vec<(&str, usize, Range<usize>)> {
        let entries = partition.entries().iter();
        entries
            .flat_map(|entry| {
                let pieces = entry.pieces.iter();
                pieces.map(|p| (entry.spec.path.as_str(), p.owner, p.elements.clone()))
            })
            .collect()
    }

    #[test]
    fn the_largest_goes_first_to_the_rank_with_least() {
        let mut partition = Partition::new(2, false);
        let specs = vec![spec("a", 3), spec("b", 5), spec("c", 4), spec("d", 2)];
        assert_eq!(partition.enter(specs), [0, 1, 2, 3]);
        // 5 | 4, then 3 to the second and 2 to the first.
        let expected = [
            ("a", 1, 0..3),
            ("b", 0, 0..5),
            ("c", 1, 0..4),
            ("d", 0, 0..2),
        ];
        assert_eq!(pieces(&partition), expected);
    }

    #[test]
    fn what_comes_later_changes_no_owner() {
        let mut partition = Partition::new(2, false);
        partition.enter(vec![spec("b", 5)]);
        let mut later = spec("b", 5);
        later.id = ParamId::from(2);
        // `a` was frozen until now.
        assert_eq!(partition.enter(vec![spec("a", 1), later]), [1, 0]);
        assert_eq!(pieces(&partition), [("b", 0, 0..5), ("a", 1, 0..1)]);
        assert_eq!(partition.entries()[0].spec.id, ParamId::from(2));
    }

    #[test]
    fn parameters_are_cut_into_equal_parts() {
        let mut partition = Partition::new(3, true);
        partition.enter(vec![spec("a", 5), spec("b", 1), spec("c", 3)]);
        let expected = [
            ("a", 0, 0..3),
            ("a", 1, 3..5),
            ("b", 1, 0..1),
            ("c", 2, 0..3),
        ];
        assert_eq!(pieces(&partition), expected);
        assert_eq!(partition.load, [12, 12, 12]);
    }

    #[test]
    fn a_rank_may_own_nothing() {
        let mut partition = Partition::new(4, true);
        partition.enter(vec![spec("empty", 0), spec("a", 3)]);
        let expected = [("a", 0, 0..1), ("a", 1, 1..2), ("a", 2, 2..3)];
        assert_eq!(pieces(&partition), expected);
    }
}
