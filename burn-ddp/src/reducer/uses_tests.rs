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
