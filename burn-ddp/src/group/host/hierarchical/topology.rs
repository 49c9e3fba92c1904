//! Which ranks run together.

use std::ops::Range;

/// The job's ranks by machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Topology {
    /// The ranks of each machine, ascending; machines in the order of their lowest ranks.
    machines: Vec<Vec<usize>>,
    /// This rank's machine.
    pub(super) machine: usize,
    /// This rank's place on it.
    pub(super) local: usize,
}

impl Topology {
    /// `machine_of[rank]` is equal for ranks of one machine.
    pub(super) fn new<T: PartialEq>(machine_of: &[T], rank: usize) -> Self {
        let mut names: Vec<&T> = Vec::new();
        let mut machines: Vec<Vec<usize>> = Vec::new();
        for (rank, name) in machine_of.iter().enumerate() {
            match names.iter().position(|n| *n == name) {
                Some(machine) => machines[machine].push(rank),
                None => {
                    names.push(name);
                    machines.push(vec![rank]);
                }
            }
        }
        let mut topology = Self {
            machines,
            machine: 0,
            local: 0,
        };
        (topology.machine, topology.local) = topology.place(rank);
        topology
    }

    /// A rank's machine and its place there.
    pub(super) fn place(&self, rank: usize) -> (usize, usize) {
        let place = |ranks: &Vec<usize>| ranks.iter().position(|r| *r == rank);
        let mut places = self.machines.iter().map(place).enumerate();
        places
            .find_map(|(machine, local)| Some((machine, local?)))
            .unwrap_or_default()
    }

    /// All ranks of the job.
    pub(super) fn ranks(&self) -> usize {
        self.machines.iter().map(Vec::len).sum()
    }

    pub(super) fn machines(&self) -> usize {
        self.machines.len()
    }

    /// The ranks of a machine, ascending.
    pub(super) fn ranks_of(&self, machine: usize) -> &[usize] {
        &self.machines[machine]
    }

    /// The ranks of this rank's machine.
    pub(super) fn here(&self) -> &[usize] {
        self.ranks_of(self.machine)
    }

    /// Number of parallel rings: ring `k` runs through the `k`-th rank of every machine.
    pub(super) fn rings(&self) -> usize {
        self.machines.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// The ranks of this rank's ring, by machine; it must be on one.
    pub(super) fn ring(&self) -> Vec<usize> {
        let at = |ranks: &Vec<usize>| ranks.get(self.local).copied();
        self.machines.iter().filter_map(at).collect()
    }

    /// The neighbours of this rank on its ring: whom it sends to and whom it receives from. `None` if it is on none.
    pub(super) fn neighbours(&self) -> Option<(usize, usize)> {
        if self.local >= self.rings() {
            return None;
        }
        let at = |machine: usize| self.machines[machine % self.machines()][self.local];
        Some((at(self.machine + 1), at(self.machine + self.machines() - 1)))
    }

    /// `count` machines going back along the ring, from the one `distance` before this one.
    pub(super) fn backwards(&self, distance: usize, count: usize) -> impl Iterator<Item = usize> {
        let (machine, machines) = (self.machine, self.machines());
        let steps = distance..distance + count;
        steps.map(move |step| (machine + machines - step % machines) % machines)
    }

    /// Bounds of the blocks of `bytes` bytes that the ranks of a machine have in rank order.
    pub(super) fn blocks(
        &self,
        machine: usize,
        bytes: usize,
    ) -> impl Iterator<Item = Range<usize>> {
        let ranks = self.machines[machine].iter();
        ranks.map(move |rank| rank * bytes..(rank + 1) * bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_machines_have_as_many_rings_as_the_smallest_has_ranks() {
        // Three machines with 1, 2 and 3 ranks, dealt out in no order.
        let names = ["b", "c", "a", "b", "c", "c"];
        let of = |rank| Topology::new(&names, rank);
        assert_eq!(of(0).rings(), 1);
        assert_eq!(
            [of(0).here(), of(1).here(), of(2).here()],
            [&[0, 3][..], &[1, 4, 5], &[2]]
        );
        assert_eq!(of(0).neighbours(), Some((1, 2)));
        assert_eq!(of(2).neighbours(), Some((0, 1)));
        assert_eq!(of(3).neighbours(), None);
        assert_eq!(of(5).place(5), (1, 2));
        assert_eq!(of(1).backwards(0, 3).collect::<Vec<_>>(), [1, 0, 2]);
        assert_eq!(of(1).backwards(2, 2).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(of(1).blocks(0, 4).collect::<Vec<_>>(), [0..4, 12..16]);
    }

    #[test]
    fn two_machines_are_each_others_neighbours() {
        let names = ["a", "a", "b", "b"];
        assert_eq!(Topology::new(&names, 1).neighbours(), Some((3, 3)));
        assert_eq!(Topology::new(&names, 2).neighbours(), Some((0, 0)));
        assert_eq!(Topology::new(&names, 2).rings(), 2);
    }
}
