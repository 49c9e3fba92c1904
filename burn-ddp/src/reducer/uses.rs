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
        state.count += 1;
        if let Some(fixed) = &self.fixed {
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
        let mut slots = self.slots.iter().zip(fixed).enumerate();
        slots.find_map(|(slot, (state, &expected))| {
            let fired = state.count;
            (fired != expected).then_some(Broken {
                slot,
                expected,
                fired,
            })
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
#[path = "uses_tests.rs"]
mod tests;
