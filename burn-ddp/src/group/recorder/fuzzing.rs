//! See [`fuzzing`](crate::group::fuzzing).

#![allow(clippy::unwrap_used)]

use super::{CAPACITY, Recorder, Report, Tail};
use crate::group::{DType, OpDescriptor, OpKind};

/// Tails from peers, whatever is in them, make a report.
pub(in crate::group) fn report(input: &[u8]) {
    let Ok(tails) = postcard::from_bytes::<Vec<Option<Tail>>>(input) else {
        return;
    };
    let tails: Vec<_> = tails
        .into_iter()
        .map(|tail| tail.filter(Tail::is_bounded))
        .take(8)
        .collect();
    let hosts = ["node".to_owned()];
    let text = Report {
        cause: "x",
        hosts: &hosts,
        tails: &tails,
    }
    .to_string();
    // A line for each rank, and for each group who is behind and the variants of one operation.
    let lines = text.lines().count();
    assert!(
        lines >= 2 + tails.len() && lines < 3 + tails.len() * 40,
        "{text}"
    );
    assert!(text.len() < (tails.len() + 1) * CAPACITY * 400);
}

pub(in crate::group) fn report_seeds() -> Vec<Vec<u8>> {
    let recorder = Recorder::new();
    for sequence in 0..3 {
        let descriptor = OpDescriptor {
            job: 0,
            generation: 0,
            group: 1,
            sequence,
            kind: OpKind::Broadcast { root: 1 },
            dtype: DType::F32,
            count: 7,
            buffer: 0,
        };
        let running = recorder.begin(&descriptor);
        if sequence != 1 {
            let _ = running.end(Ok(()));
        }
    }
    let tail = Some(recorder.tail());
    vec![postcard::to_stdvec(&[tail.clone(), None, tail]).unwrap()]
}
