//! Group buffers.

use super::{
    super::{DType, GroupBuffer, ReduceOp},
    LONG, Make, bytes, ranks,
};

fn fill(buffer: &mut dyn GroupBuffer, len: usize, value: impl Fn(usize) -> f32) {
    let input = &mut buffer.input()[..len * 4];
    for (k, x) in input.as_chunks_mut().0.iter_mut().enumerate() {
        *x = value(k).to_ne_bytes();
    }
}

fn check(buffer: &dyn GroupBuffer, len: usize, value: impl Fn(usize) -> f32) {
    let output = &buffer.output()[..len * 4];
    for (k, x) in output.as_chunks().0.iter().enumerate() {
        assert_eq!(
            f32::from_ne_bytes(*x),
            value(k),
            "{len} elements, element {k}"
        );
    }
}

pub(crate) fn group_buffer(make: Make<'_>) {
    for world_size in 1..=4 {
        ranks(&make(world_size, LONG), |g| {
            let ramp = (world_size * (world_size + 1) / 2) as f32;
            for capacity in [0, 4, 4000, 160_004] {
                let mut buffer = g.buffer(capacity).unwrap();
                assert_eq!(buffer.bytes(), capacity);
                assert_eq!(buffer.input().len(), capacity);
                assert_eq!(buffer.input().as_ptr().align_offset(64), 0);
                assert_eq!(buffer.output().as_ptr().align_offset(64), 0);
                for step in 0..20 {
                    let len = capacity / 4 / (1 + step % 3);
                    let rank = (g.rank() + 1) as f32;
                    fill(&mut *buffer, len, |k| rank * (k % 7) as f32 + step as f32);
                    buffer
                        .all_reduce(len * 4, DType::F32, ReduceOp::Sum)
                        .unwrap();
                    check(&*buffer, len, |k| {
                        ramp * (k % 7) as f32 + (world_size * step) as f32
                    });
                }
                // The result stays while the group goes on.
                let before = buffer.output().to_vec();
                let mut other = vec![1.0f32; 10_000];
                g.all_reduce(bytes(&mut other), DType::F32, ReduceOp::Sum)
                    .unwrap();
                g.barrier().unwrap();
                assert!(before == buffer.output());
            }
        });
    }
}

pub(crate) fn group_buffers_of_one_group(make: Make<'_>) {
    ranks(&make(2, LONG), |g| {
        let mut a = g.buffer(400).unwrap();
        let mut b = g.buffer(80_000).unwrap();
        for step in 0..50 {
            let step = step as f32;
            fill(&mut *a, 100, |_| step);
            fill(&mut *b, 20_000, |_| 1000.0 + step);
            a.all_reduce(400, DType::F32, ReduceOp::Sum).unwrap();
            let mut c = [-step];
            g.all_reduce(bytes(&mut c), DType::F32, ReduceOp::Sum)
                .unwrap();
            b.all_reduce(80_000, DType::F32, ReduceOp::Sum).unwrap();
            check(&*a, 100, |_| 2.0 * step);
            check(&*b, 20_000, |_| 2000.0 + 2.0 * step);
            assert_eq!(c, [-2.0 * step]);
        }
    });
}
