//! See [`fuzzing`](crate::group::fuzzing).

#![allow(clippy::unwrap_used)]

use super::{super::settings::Rendezvous, super::wire, Answer, HELLO_LIMIT, Hello, answer_limit};

fn ours() -> Hello {
    Hello::new(&Rendezvous::new(0, 4, "127.0.0.1", 1).unwrap())
}

/// What a rank says of itself, and what rank 0 answers: no number in it leads anywhere but to a verdict.
pub(in crate::group) fn hello(input: &[u8]) {
    if let Ok(hello) = wire::decode_frame::<Hello>(input) {
        if let Ok(again) = wire::encode(&hello, HELLO_LIMIT) {
            assert_eq!(wire::decode_frame::<Hello>(&again).unwrap(), hello);
        }
        if ours().contradiction_with(&hello).is_none() {
            let fits = hello.peer.rank > 0 && hello.peer.rank < 4 && hello.world_size == 4;
            assert!(fits || hello.generation != 0, "{hello:?}");
        }
    }
    if let Ok(answer) = wire::decode_frame::<Answer>(input)
        && let Ok(again) = wire::encode(&answer, answer_limit(4))
    {
        assert_eq!(wire::decode_frame::<Answer>(&again).unwrap(), answer);
    }
}

pub(in crate::group) fn hello_seeds() -> Vec<Vec<u8>> {
    let mut hello = ours();
    hello.peer.rank = 2;
    let welcome = Answer::Welcome {
        job: 7,
        peers: vec![hello.peer.clone(); 4],
    };
    let refused = Answer::Refused {
        reason: "late".into(),
    };
    let hello = wire::encode(&hello, HELLO_LIMIT).unwrap();
    let answers = [welcome, refused].map(|answer| wire::encode(&answer, answer_limit(4)).unwrap());
    [hello].into_iter().chain(answers).collect()
}
