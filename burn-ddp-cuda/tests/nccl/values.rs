//! Every operation, in every type, by value.

use crate::common::{LONG, Rank, STREAM, ranks, settings};
use burn_ddp_cuda::nccl::{Communicator, DType, DevicePtr, Operation, ReduceOp};
use half::{bf16, f16};

const DTYPES: [DType; 10] = [
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
    DType::F16,
    DType::F32,
    DType::F64,
    DType::BF16,
];
/// Elements; the last needs several of the mock's rounds in most types.
const SIZES: [usize; 4] = [0, 1, 7, 9_001];

/// Element `i` of `rank`: exact in every type, and so is the sum over four ranks.
fn value(dtype: DType, rank: usize, i: usize) -> f64 {
    let value = ((i * 7 + rank * 11) % 25) as f64;
    match dtype {
        DType::U8 | DType::U32 | DType::U64 => value,
        DType::I8 | DType::I32 | DType::I64 => value - 12.0,
        _ => (value - 12.0) / 2.0,
    }
}

fn reduced(dtype: DType, op: ReduceOp, world: usize, i: usize) -> f64 {
    let values = (0..world).map(|rank| value(dtype, rank, i));
    match op {
        ReduceOp::Sum => values.sum(),
        ReduceOp::Min => values.reduce(f64::min).unwrap(),
        _ => values.reduce(f64::max).unwrap(),
    }
}

fn bytes(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    let one = |x: f64| match dtype {
        DType::I8 => (x as i8).to_ne_bytes().to_vec(),
        DType::U8 => (x as u8).to_ne_bytes().to_vec(),
        DType::I32 => (x as i32).to_ne_bytes().to_vec(),
        DType::U32 => (x as u32).to_ne_bytes().to_vec(),
        DType::I64 => (x as i64).to_ne_bytes().to_vec(),
        DType::U64 => (x as u64).to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(x).to_ne_bytes().to_vec(),
        DType::F32 => (x as f32).to_ne_bytes().to_vec(),
        DType::F64 => x.to_ne_bytes().to_vec(),
        _ => bf16::from_f64(x).to_ne_bytes().to_vec(),
    };
    values.flat_map(one).collect()
}

/// One type, one size.
struct Case<'a> {
    rank: &'a Rank,
    communicator: &'a Communicator,
    dtype: DType,
    count: usize,
}

fn at(bytes: &mut [u8]) -> DevicePtr {
    DevicePtr(bytes.as_mut_ptr().expose_provenance() as u64)
}

impl Case<'_> {
    /// This rank's elements.
    fn input(&self, count: usize) -> Vec<u8> {
        bytes(
            self.dtype,
            (0..count).map(|i| value(self.dtype, self.rank.rank, i)),
        )
    }

    fn nothing(&self, count: usize) -> Vec<u8> {
        vec![0x55; count * self.dtype.size()]
    }

    fn expected(&self, count: usize, element: impl Fn(usize) -> f64) -> Vec<u8> {
        bytes(self.dtype, (0..count).map(element))
    }

    /// Waits for the stream, so that the buffers may go.
    fn done(&self, result: burn_ddp_cuda::nccl::Result<()>) {
        result.unwrap();
        self.communicator
            .wait("the stream", || self.rank.mock.is_done(STREAM))
            .unwrap();
    }

    fn check(&self, what: &str, got: &[u8], expected: &[u8]) {
        let (dtype, count) = (self.dtype, self.count);
        assert!(
            got == expected,
            "{what} of {count} {dtype}: {got:?} is not {expected:?}"
        );
    }

    fn all_reduce(&self, op: ReduceOp) {
        let (communicator, count, dtype) = (self.communicator, self.count, self.dtype);
        let expected = self.expected(count, |i| reduced(dtype, op, self.rank.world, i));
        let (mut send, mut recv) = (self.input(count), self.nothing(count));
        // SAFETY: the buffers live until the stream is done, here and below.
        self.done(unsafe {
            communicator.all_reduce(at(&mut send), at(&mut recv), count, dtype, op, STREAM)
        });
        self.check("all_reduce", &recv, &expected);
        self.check("all_reduce's input", &send, &self.input(count));
        // SAFETY: as above.
        self.done(unsafe {
            communicator.all_reduce_in_place(at(&mut send), count, dtype, op, STREAM)
        });
        self.check("all_reduce in place", &send, &expected);
    }

    fn rooted(&self, root: usize) {
        let (communicator, count, dtype) = (self.communicator, self.count, self.dtype);
        let (mut send, mut recv) = (self.input(count), self.nothing(count));
        let op = ReduceOp::Sum;
        // SAFETY: as above.
        self.done(unsafe {
            communicator.reduce(at(&mut send), at(&mut recv), count, dtype, op, root, STREAM)
        });
        let expected = match root == self.rank.rank {
            true => self.expected(count, |i| reduced(dtype, op, self.rank.world, i)),
            false => self.nothing(count),
        };
        self.check("reduce", &recv, &expected);
        let mut data = self.input(count);
        // SAFETY: as above.
        self.done(unsafe { communicator.broadcast(at(&mut data), count, dtype, root, STREAM) });
        let expected = self.expected(count, |i| value(dtype, root, i));
        self.check("broadcast", &data, &expected);
    }

    fn blocks(&self) {
        let (communicator, count, dtype) = (self.communicator, self.count, self.dtype);
        let (rank, world) = (self.rank.rank, self.rank.world);
        let (mut send, mut recv) = (self.input(count), self.nothing(world * count));
        // SAFETY: as above.
        self.done(unsafe {
            communicator.all_gather(at(&mut send), at(&mut recv), count, dtype, STREAM)
        });
        let expected = self.expected(world * count, |i| value(dtype, i / count, i % count));
        self.check("all_gather", &recv, &expected);
        let (mut send, mut recv) = (self.input(world * count), self.nothing(count));
        let op = ReduceOp::Sum;
        // SAFETY: as above.
        self.done(unsafe {
            communicator.reduce_scatter(at(&mut send), at(&mut recv), count, dtype, op, STREAM)
        });
        let expected = self.expected(count, |i| reduced(dtype, op, world, rank * count + i));
        self.check("reduce_scatter", &recv, &expected);
    }

    /// Everybody sends to the next, at the same time; then 0 alone sends to 1.
    fn transfers(&self) {
        let (communicator, count, dtype) = (self.communicator, self.count, self.dtype);
        let (rank, world) = (self.rank.rank, self.rank.world);
        let (mut send, mut recv) = (self.input(count), self.nothing(count));
        let before = (rank + world - 1) % world;
        let ring = [
            Operation::Send {
                send: at(&mut send),
                count,
                dtype,
                peer: (rank + 1) % world,
            },
            Operation::Recv {
                recv: at(&mut recv),
                count,
                dtype,
                peer: before,
            },
        ];
        // SAFETY: as above.
        self.done(unsafe { communicator.group(&ring, STREAM) });
        let expected = self.expected(count, |i| value(dtype, before, i));
        self.check("the ring", &recv, &expected);
        // SAFETY: as above.
        self.done(unsafe {
            match rank {
                0 => communicator.send(at(&mut send), count, dtype, 1, STREAM),
                1 => communicator.recv(at(&mut send), count, dtype, 0, STREAM),
                _ => Ok(()),
            }
        });
        let from = if rank == 1 { 0 } else { rank };
        let expected = self.expected(count, |i| value(dtype, from, i));
        self.check("send and receive", &send, &expected);
    }
}

fn every_operation(test: &str, world: usize) {
    let results = ranks(world).run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        for dtype in DTYPES {
            for count in SIZES {
                let case = Case {
                    rank: &rank,
                    communicator: &communicator,
                    dtype,
                    count,
                };
                for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
                    case.all_reduce(op);
                }
                case.rooted(0);
                case.rooted(world - 1);
                case.blocks();
                case.transfers();
            }
        }
        communicator.close().unwrap();
        rank.mock.assert_clean();
        "done".into()
    });
    assert_eq!(results, vec!["done"; world]);
}

#[test]
fn every_operation_in_every_type_between_two() {
    every_operation("values::every_operation_in_every_type_between_two", 2);
}

#[test]
fn every_operation_in_every_type_between_four() {
    every_operation("values::every_operation_in_every_type_between_four", 4);
}

/// A group is one operation; results are there in the order of the calls.
#[test]
fn several_in_a_group_and_several_in_flight() {
    let test = "values::several_in_a_group_and_several_in_flight";
    let ranks = ranks(2).env("NCCL_SOCKET_IFNAME", "eth7");
    let results = ranks.run(test, |rank| {
        let communicator = rank.init("id", settings(LONG)).unwrap();
        let own = rank.rank as f32;
        let mut data: Vec<Vec<f32>> = (0..20).map(|i| vec![own + i as f32; i]).collect();
        let sum = |data: &mut Vec<f32>| {
            let buffer = DevicePtr(data.as_mut_ptr().expose_provenance() as u64);
            Operation::AllReduce {
                send: buffer,
                recv: buffer,
                count: data.len(),
                dtype: DType::F32,
                op: ReduceOp::Sum,
            }
        };
        let operations: Vec<_> = data.iter_mut().map(sum).collect();
        // SAFETY: the data live until the stream is done.
        unsafe {
            communicator.group(&operations[..10], STREAM).unwrap();
            for operation in &operations[10..] {
                communicator.enqueue(*operation, STREAM).unwrap();
            }
            // Once more: the ranks' sums are the same, so this doubles them.
            communicator.group(&operations, STREAM).unwrap();
            communicator.group(&[], STREAM).unwrap();
        }
        communicator
            .wait("the stream", || rank.mock.is_done(STREAM))
            .unwrap();
        for (i, data) in data.iter().enumerate() {
            assert_eq!(*data, vec![2.0 * (2.0 * i as f32 + 1.0); i]);
        }
        communicator.close().unwrap();
        rank.mock.assert_clean();
        communicator.describe()
    });
    for (rank, line) in results.iter().enumerate() {
        assert!(line.starts_with("NCCL 2.27.3 ("), "{line}");
        let own = format!(", rank {rank} of 2, ");
        assert!(line.contains(&own), "{line}");
        assert!(line.contains("NCCL_SOCKET_IFNAME=eth7"), "{line}");
    }
}
