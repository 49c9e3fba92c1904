//! Which ranks share a machine, as a reduction in rank order can use it.

use std::ops::Range;

/// This rank's place among the stages of a job: the longest runs of consecutive ranks that are on one machine, in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// This rank's stage.
    pub(super) stage: Range<usize>,
    pub(super) previous: Option<Range<usize>>,
    pub(super) next: Option<Range<usize>>,
    /// Number of stages after this one.
    pub(super) behind: usize,
    /// Parts of the data that are reduced side by side: the ranks of the longest stage have one each.
    pub(super) lanes: usize,
}

impl Place {
    /// `machines` names each rank's machine.
    pub(super) fn new(machines: &[usize], rank: usize) -> Self {
        let mut stages: Vec<Range<usize>> = Vec::new();
        for run in machines.chunk_by(|a, b| a == b) {
            let start = stages.last().map_or(0, |stage| stage.end);
            stages.push(start..start + run.len());
        }
        let at = stages.iter().take_while(|stage| stage.end <= rank).count();
        let of = |k: Option<usize>| k.and_then(|k| stages.get(k)).cloned();
        Self {
            stage: of(Some(at)).unwrap_or(rank..rank + 1),
            previous: of(at.checked_sub(1)),
            next: of(Some(at + 1)),
            behind: stages.len().saturating_sub(at + 1),
            lanes: stages.iter().map(ExactSizeIterator::len).max().unwrap_or(1),
        }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.previous.is_none() && self.next.is_none()
    }
}

/// The rank of `stage` that reduces `lane`.
pub(super) fn owner(stage: &Range<usize>, lane: usize) -> usize {
    stage.start + lane % stage.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_runs_of_one_machine() {
        // Machine 4 twice: its second run is a stage of its own.
        let machines = [4, 4, 4, 7, 7, 4];
        let place = |rank| Place::new(&machines, rank);
        assert_eq!(
            place(1),
            Place {
                stage: 0..3,
                previous: None,
                next: Some(3..5),
                behind: 2,
                lanes: 3
            }
        );
        assert_eq!(
            place(5),
            Place {
                stage: 5..6,
                previous: Some(3..5),
                next: None,
                behind: 0,
                lanes: 3
            }
        );
        assert_eq!(
            [0, 1, 2].map(|lane| owner(&place(3).stage, lane)),
            [3, 4, 3]
        );
        assert!(Place::new(&[0, 0], 1).is_alone() && !place(3).is_alone());
    }
}
