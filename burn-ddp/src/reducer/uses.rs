//! When a parameter's gradient is complete: as many uses have fired as will fire.

use std::cmp::Ordering;

/// One use of a parameter in forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) slot: usize,
    /// Position among the uses of the slot since the last round was closed.
    index: usize,
    /// The round that was next when the use was made.
    round: u64,
}

/// What one use firing means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fired {
    /// More contributions are expected.
    Partial,
    /// This was the last expected contribution: the gradient can be packed.
    Complete,
    /// The gradient had been complete before this contribution came.
    Late,
    /// There are more contributions than a static graph has.
    Unexpected(Broken),
}

/// What is not as in an earlier pass: the first one where a static graph was promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    pub(crate) slot: usize,
    /// Contributions in the earlier pass.
    pub(crate) expected: usize,
    /// And in this one, so far.
    pub(crate) fired: usize,
}

/// How many of its uses a parameter waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expect {
    /// All that were made in forward.
    Every,
    /// Those that fired in the round before, if it had as many uses.
    AsBefore,
    /// As many as fired in the first round, always.
    AsFirst,
}

#[derive(Clone, Debug, Default)]
struct SlotUses {
    created: usize,
    /// Contributions in this round.
    count: usize,
    /// Which uses of this round have fired.
    fired: Vec<usize>,
    /// A use from before the last closing fired: what will still come is unknown.
    stale: bool,
    complete: bool,
    /// (created, fired) of the last round in which this slot was used.
    last: Option<(usize, Vec<usize>)>,
}

impl SlotUses {
    /// All expected uses have fired.
    ///
    /// Not every use reaches the loss (a shape query, a head that is not used): a round with as
    /// many uses as the one before is expected to fire the same ones. Without that history every
    /// use is expected, and one that never fires leaves the slot to the closing of the round.
    fn all_expected_fired(&self, expect: Expect) -> bool {
        if self.stale {
            return false;
        }
        match self.before() {
            Some(fired) if expect == Expect::AsBefore && !fired.is_empty() => {
                fired.iter().all(|use_| self.fired.contains(use_))
            }
            _ => self.fired.len() == self.created,
        }
    }

    /// Which uses fired in the round before, if it had as many.
    fn before(&self) -> Option<&[usize]> {
        let (created, fired) = self.last.as_ref()?;
        (*created == self.created).then_some(fired)
    }
}

/// Counts uses over one round: from the closing of one synchronised or accumulating backward to
/// the closing of the next.
#[derive(Debug)]
pub(crate) struct UseCounter {
    slots: Vec<SlotUses>,
    round: u64,
    /// Slots in the order of their first use, as far as known.
    first_use: Vec<usize>,
    expect: Expect,
    /// With [`Expect::AsFirst`], of each slot, once the first round is over.
    fixed: Option<Vec<usize>>,
}

impl UseCounter {
    pub(crate) fn new(slots: usize, expect: Expect) -> Self {
        Self {
            slots: vec![SlotUses::default(); slots],
            round: 0,
            first_use: Vec::new(),
            expect,
            fixed: None,
        }
    }

    /// A forward pass takes the parameter of `slot`.
    pub(crate) fn used(&mut self, slot: usize) -> Use {
        let state = &mut self.slots[slot];
        if self.fixed.is_some() {
            return Use {
                slot,
                index: 0,
                round: self.round,
            };
        }
        if self.round == 0 && state.created == 0 {
            self.first_use.push(slot);
        }
        let index = state.created;
        state.created += 1;
        Use {
            slot,
            index,
            round: self.round,
        }
    }

    /// The gradient of one use is there.
    pub(crate) fn fired(&mut self, use_: Use) -> Fired {
        let state = &mut self.slots[use_.slot];
        if let Some(fixed) = &self.fixed {
            state.count += 1;
            let (slot, expected, fired) = (use_.slot, fixed[use_.slot], state.count);
            return match fired.cmp(&expected) {
                Ordering::Less => Fired::Partial,
                Ordering::Equal => Fired::Complete,
                Ordering::Greater => Fired::Unexpected(Broken {
                    slot,
                    expected,
                    fired,
                }),
            };
        }
        state.count += 1;
        if use_.round == self.round {
            state.fired.push(use_.index);
        } else {
            state.stale = true;
        }
        if state.complete {
            return Fired::Late;
        }
        state.complete = state.all_expected_fired(self.expect);
        if state.complete {
            Fired::Complete
        } else {
            Fired::Partial
        }
    }

    /// The first slot with another number of contributions than in the first round, of a static graph whose round is over.
    pub(crate) fn broken(&self) -> Option<Broken> {
        let fixed = self.fixed.as_ref()?;
        let slots = self.slots.iter().zip(fixed).enumerate();
        let mut broken = slots.filter(|(_, (state, expected))| state.count != **expected);
        broken.next().map(|(slot, (state, expected))| Broken {
            slot,
            expected: *expected,
            fired: state.count,
        })
    }

    /// The first slot with fewer contributions than in the round before, though it has as many uses, once a round is over.
    pub(crate) fn fewer(&self) -> Option<Broken> {
        let fewer = |(slot, state): (usize, &SlotUses)| {
            let expected = match &self.fixed {
                Some(fixed) => fixed[slot],
                None if state.stale => return None,
                None => state.before()?.len(),
            };
            let fired = state.count;
            (fired < expected).then_some(Broken {
                slot,
                expected,
                fired,
            })
        };
        self.slots.iter().enumerate().find_map(fewer)
    }

    /// A slot none of whose uses has fired, and that has no round before with as many: all of them may have been due.
    pub(crate) fn silent(&self, slot: usize) -> Option<Broken> {
        let state = &self.slots[slot];
        let silent = self.fixed.is_none() && state.created > 0 && state.count == 0;
        (silent && state.before().is_none()).then_some(Broken {
            slot,
            expected: state.created,
            fired: 0,
        })
    }

    /// Which slots a static graph has; empty before its first round is over.
    pub(crate) fn fixed(&self) -> &[usize] {
        self.fixed.as_deref().unwrap_or_default()
    }

    /// Ends the round.
    pub(crate) fn close(&mut self) {
        if self.expect == Expect::AsFirst && self.fixed.is_none() {
            self.fixed = Some(self.slots.iter().map(|state| state.count).collect());
        }
        self.forget();
    }

    fn forget(&mut self) {
        for state in &mut self.slots {
            state.count = 0;
            if self.expect != Expect::AsFirst && state.created > 0 && !state.stale {
                state.fired.sort_unstable();
                state.last = Some((state.created, std::mem::take(&mut state.fired)));
            } else {
                state.last = None;
            }
            state.created = 0;
            state.fired.clear();
            state.stale = false;
            state.complete = false;
        }
        self.round += 1;
    }

    /// Ends a round that broke off: what has fired says nothing about the next one.
    pub(crate) fn abandon(&mut self) {
        self.forget();
        for state in &mut self.slots {
            state.last = None;
        }
    }

    /// Every slot in the order of first use in the first round; those not used follow in registration order.
    pub(crate) fn first_use_order(&self) -> Vec<usize> {
        let mut seen = vec![false; self.slots.len()];
        for &slot in &self.first_use {
            seen[slot] = true;
        }
        let mut order = self.first_use.clone();
        order.extend((0..self.slots.len()).filter(|&slot| !seen[slot]));
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_broke_off_teaches_nothing() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let three = |c: &mut UseCounter| [c.used(0), c.used(0), c.used(0)];
        let [.., last] = three(&mut c);
        assert_eq!(c.fired(last), Fired::Partial);
        c.abandon();
        let [a, b, last] = three(&mut c);
        assert_eq!(
            [last, b, a].map(|u| c.fired(u)),
            [Fired::Partial, Fired::Partial, Fired::Complete]
        );
    }

    #[test]
    fn one_use_is_complete_when_it_fires() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let u = c.used(0);
        assert_eq!(c.fired(u), Fired::Complete);
    }

    #[test]
    fn several_uses_are_complete_with_the_last_one() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let (a, b, d) = (c.used(0), c.used(0), c.used(0));
        assert_eq!(c.fired(d), Fired::Partial);
        assert_eq!(c.fired(b), Fired::Partial);
        assert_eq!(c.fired(a), Fired::Complete);
    }

    #[test]
    fn a_use_that_never_fires_costs_the_overlap_of_one_round_only() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let _shape_query = c.used(0);
        let real = c.used(0);
        assert_eq!(c.fired(real), Fired::Partial);
        c.close();
        let _shape_query = c.used(0);
        let real = c.used(0);
        assert_eq!(c.fired(real), Fired::Complete);
    }

    #[test]
    fn a_contribution_beyond_the_expected_ones_is_late() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let (_a, b) = (c.used(0), c.used(0));
        c.fired(b);
        c.close();
        let (a, b) = (c.used(0), c.used(0));
        assert_eq!(c.fired(b), Fired::Complete);
        assert_eq!(c.fired(a), Fired::Late);
    }

    #[test]
    fn without_learning_every_use_is_waited_for() {
        let mut c = UseCounter::new(1, Expect::Every);
        let (_a, b) = (c.used(0), c.used(0));
        c.fired(b);
        c.close();
        let (_a, b) = (c.used(0), c.used(0));
        assert_eq!(c.fired(b), Fired::Partial);
    }

    #[test]
    fn a_use_from_before_the_last_closing_waits_for_the_next_closing() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let (a, b) = (c.used(0), c.used(0));
        assert_eq!(c.fired(a), Fired::Partial);
        c.close();
        assert_eq!(c.fired(b), Fired::Partial);
        c.close();
        // The pattern of the interrupted rounds is not learned from.
        let u = c.used(0);
        assert_eq!(c.fired(u), Fired::Complete);
    }

    #[test]
    fn the_first_round_fixes_the_order() {
        let mut c = UseCounter::new(4, Expect::AsBefore);
        for slot in [2, 0, 2] {
            c.used(slot);
        }
        c.close();
        c.used(1);
        assert_eq!(c.first_use_order(), [2, 0, 1, 3]);
    }

    #[test]
    fn a_static_graph_is_as_it_was_first() {
        let mut c = UseCounter::new(2, Expect::AsFirst);
        let (_shape_query, a, b) = (c.used(0), c.used(0), c.used(0));
        assert_eq!([b, a].map(|u| c.fired(u)), [Fired::Partial; 2]);
        assert_eq!(c.broken(), None);
        c.close();
        assert_eq!(c.fixed(), [2, 0]);
        // The number of uses does not matter any more.
        let (a, b) = (c.used(0), c.used(0));
        assert_eq!(c.fired(b), Fired::Partial);
        let few = Broken {
            slot: 0,
            expected: 2,
            fired: 1,
        };
        assert_eq!(c.broken(), Some(few));
        assert_eq!(c.fired(a), Fired::Complete);
        assert_eq!(c.broken(), None);
        let other = c.used(1);
        let many = Broken {
            slot: 1,
            expected: 0,
            fired: 1,
        };
        assert_eq!(c.fired(other), Fired::Unexpected(many));
        c.abandon();
        let (a, b) = (c.used(0), c.used(0));
        assert_eq!(
            [a, b].map(|u| c.fired(u)),
            [Fired::Partial, Fired::Complete]
        );
    }

    #[test]
    fn a_first_round_that_broke_off_fixes_nothing() {
        let mut c = UseCounter::new(1, Expect::AsFirst);
        let (a, _b) = (c.used(0), c.used(0));
        c.fired(a);
        c.abandon();
        assert!(c.fixed().is_empty());
        let a = c.used(0);
        assert_eq!(c.fired(a), Fired::Complete);
        c.close();
        assert_eq!(c.fixed(), [1]);
    }

    #[test]
    fn fewer_contributions_than_before_show() {
        for expect in [Expect::AsBefore, Expect::Every, Expect::AsFirst] {
            let mut c = UseCounter::new(2, expect);
            let (_shape_query, a, b) = (c.used(1), c.used(1), c.used(1));
            assert_eq!(c.fewer(), None);
            for use_ in [a, b] {
                c.fired(use_);
            }
            c.close();
            let (_shape_query, a, b) = (c.used(1), c.used(1), c.used(1));
            c.fired(a);
            let one = Broken {
                slot: 1,
                expected: 2,
                fired: 1,
            };
            assert_eq!(c.fewer(), Some(one));
            c.fired(b);
            assert_eq!(c.fewer(), None);
        }
    }

    #[test]
    fn fewer_contributions_of_fewer_uses_are_in_order() {
        let mut c = UseCounter::new(1, Expect::AsBefore);
        let (a, b) = (c.used(0), c.used(0));
        for use_ in [a, b] {
            c.fired(use_);
        }
        c.close();
        let a = c.used(0);
        c.fired(a);
        assert_eq!(c.fewer(), None);
    }

    #[test]
    fn a_slot_is_silent_when_nothing_of_it_has_ever_been_seen() {
        let mut c = UseCounter::new(2, Expect::AsBefore);
        assert_eq!(c.silent(0), None);
        let _never_fires = c.used(0);
        let silent = Broken {
            slot: 0,
            expected: 1,
            fired: 0,
        };
        assert_eq!((c.silent(0), c.silent(1)), (Some(silent), None));
        c.close();
        let _as_before = c.used(0);
        assert_eq!(c.silent(0), None);
    }
}
