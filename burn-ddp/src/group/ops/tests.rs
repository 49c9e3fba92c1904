#![allow(clippy::unwrap_used)]

use super::*;

fn id() -> Identity {
    Identity {
        rank: 1,
        world_size: 3,
        job: u64::MAX,
        generation: 7,
        group: 9,
    }
}

#[test]
fn descriptor_survives_its_header() {
    let calls = [
        Call::all_reduce(&id(), u32::MAX, 40, DType::F32, ReduceOp::Product).unwrap(),
        Call::broadcast(&id(), 2, DType::BF16, 2).unwrap(),
        Call::all_gather(&id(), 8, 24, DType::I64).unwrap(),
        Call::reduce_scatter(&id(), 24, 8, DType::F64, ReduceOp::Mean).unwrap(),
        Call::barrier(),
        Call::buffer(3, 100),
        Call::new_group(),
    ];
    for (sequence, call) in calls.into_iter().enumerate() {
        let d = id().describe(call, sequence as u64);
        assert_eq!(decode(&encode(&d)), Some(d));
    }
}

#[test]
fn ddp_37_counts_beyond_32_bits() {
    let count = (1u64 << 32) + 1;
    let d = OpDescriptor {
        count,
        ..id().describe(Call::barrier(), u64::MAX)
    };
    assert_eq!(decode(&encode(&d)).unwrap().count, 4_294_967_297);
}

#[test]
fn words_that_no_rank_writes_are_refused() {
    let good = encode(&id().describe(Call::barrier(), 0));
    for codes in [0, 0xff, 5, 5 | 0xff << 16, 1 | 1 << 16] {
        let mut words = good;
        words[3] = codes;
        assert_eq!(decode(&words), None, "{codes:x}");
    }
}

#[test]
fn arguments() {
    let cause = |e: Result<Call>| match e {
        Err(GroupError::InvalidArgument { rank: 1, cause, .. }) => cause,
        other => unreachable!("{other:?}"),
    };
    assert_eq!(
        cause(Call::all_reduce(&id(), 0, 7, DType::F32, ReduceOp::Sum)),
        "7 bytes are not a whole number of f32 elements of 4 bytes"
    );
    assert_eq!(
        cause(Call::all_reduce(&id(), 0, 8, DType::I64, ReduceOp::Mean)),
        "a mean of i64 is not defined: reduce the sum and divide it"
    );
    assert_eq!(
        cause(Call::broadcast(&id(), 8, DType::U8, 3)),
        "the group has the ranks 0 to 2"
    );
    assert_eq!(
        cause(Call::all_gather(&id(), 8, 16, DType::U8)),
        "`recv` has 16 bytes, which is not 3 ranks times the 8 bytes of `send`"
    );
    assert_eq!(
        cause(Call::reduce_scatter(&id(), 6, 2, DType::F32, ReduceOp::Sum)),
        "2 bytes are not a whole number of f32 elements of 4 bytes"
    );
    let call = Call::all_reduce(&id(), 1, 8, DType::F32, ReduceOp::Sum).unwrap();
    assert_eq!(
        cause(call.within(&id(), 8, 4)),
        "8 bytes of a buffer that has 4"
    );
    assert_eq!(call.within(&id(), 8, 8).unwrap().count, 2);
}

#[test]
fn every_rank_sees_a_difference() {
    let at = |rank, sequence| {
        let id = Identity { rank, ..id() };
        let all = [0, 0, 1].map(|s| id.describe(Call::barrier(), s));
        id.compare(
            &id.describe(Call::barrier(), sequence),
            all.into_iter(),
            |rank| rank,
        )
    };
    for (rank, sequence, expected) in [(0, 0, 2), (1, 0, 2), (2, 1, 0)] {
        assert!(
            matches!(at(rank, sequence), Err(GroupError::Mismatch { peer, .. }) if peer == expected)
        );
    }
}
