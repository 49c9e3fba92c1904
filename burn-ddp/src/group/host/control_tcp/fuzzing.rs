//! See [`fuzzing`](crate::group::fuzzing).

#![allow(clippy::unwrap_used)]

use super::{
    super::wire::{self, FrameReader},
    frame::{self, Failure, Frame},
};
use crate::group::GroupError;

const RANKS: usize = 3;

/// A stream of frames in pieces: each that is understood is written the same way again, and failures have a text.
pub(in crate::group) fn control_frames(input: &[u8]) {
    let limit = frame::limit(RANKS);
    let mut reader = FrameReader::new(limit);
    let size = 1 + usize::from(input.first().copied().unwrap_or_default());
    for piece in input.chunks(size) {
        reader.feed(piece);
        loop {
            match reader.next::<Frame>() {
                Ok(Some(frame)) => check(&frame, limit),
                Ok(None) => break,
                // The connection would be closed.
                Err(_) => return,
            }
        }
    }
}

fn check(frame: &Frame, limit: usize) {
    let again = wire::encode(frame, limit).unwrap();
    assert_eq!(wire::decode_frame::<Frame>(&again).unwrap(), *frame);
    if let Frame::Failed(failure) = frame {
        for rank in 0..RANKS {
            let error = failure.seen_by(rank, &[], &|| "barrier".into());
            assert!(!error.to_string().is_empty());
        }
    }
}

pub(in crate::group) fn control_frame_seeds() -> Vec<Vec<u8>> {
    let lost = Failure::Lost {
        peer: 2,
        cause: "gone".into(),
    };
    let frames = [
        Frame::Heartbeat,
        Frame::Bye,
        Frame::Left { peer: 1 },
        Frame::Failed(lost),
        Frame::Failed(Failure::from_error(1, GroupError::aborted(1, 1, "enough"))),
        Frame::Tail(crate::group::recorder::Recorder::new().tail()),
        Frame::Give {
            tag: 1,
            sequence: 2,
            data: vec![3; 4],
        },
        Frame::All {
            tag: 1,
            sequence: 2,
            parts: vec![vec![3; 4]; RANKS],
        },
    ];
    let each: Vec<_> = frames
        .iter()
        .map(|frame| wire::encode(frame, 1000).unwrap())
        .collect();
    let all = each.concat();
    each.into_iter().chain([all]).collect()
}
