//! Values and tensors on the host, and what the device should make of them.

use burn_ddp_cuda::kernels::{Bucket, BucketLayout, DType, Source};
use cubecl::{client::Client, server::Handle};
use half::{bf16, f16};

/// The bytes of values in a type: each is rounded once, to the nearest and from the middle to even.
pub(crate) fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each = |x: &f64| match dtype {
        DType::F32 => (*x as f32).to_ne_bytes().to_vec(),
        DType::F64 => x.to_ne_bytes().to_vec(),
        DType::F16 => f16::from_f64(*x).to_ne_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(*x).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(each).collect()
}

/// Exact.
pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let each = |x: &[u8]| match dtype {
        DType::F32 => f64::from(f32::from_ne_bytes(x.try_into().unwrap())),
        DType::F64 => f64::from_ne_bytes(x.try_into().unwrap()),
        DType::F16 => f16::from_ne_bytes(x.try_into().unwrap()).to_f64(),
        DType::BF16 => bf16::from_ne_bytes(x.try_into().unwrap()).to_f64(),
    };
    bytes.chunks(dtype.size()).map(each).collect()
}

/// What a value is in a type.
pub(crate) fn rounded(dtype: DType, value: f64) -> f64 {
    decode(dtype, &encode(dtype, &[value]))[0]
}

/// What packing makes of a value: a product in f32, or in f64 for f64, cast.
pub(crate) fn scaled(from: DType, to: DType, value: f64, scale: f64) -> f64 {
    match from {
        DType::F64 => value * scale,
        _ => rounded(to, f64::from(value as f32 * scale as f32)),
    }
}

/// Numbers from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// In [-1, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// A value that `dtype` has: mostly ordinary, now and then special.
    pub(crate) fn value(&mut self, dtype: DType) -> f64 {
        let x = match self.below(16) {
            0 => f64::INFINITY,
            1 => f64::NEG_INFINITY,
            2 => f64::NAN,
            3 => 0.0,
            4 => -0.0,
            5 => 65_520.0 + 600.0 * self.unit(), // around the largest f16
            6 => 1e-3 * self.unit(),
            _ => 4.0 * self.unit(),
        };
        rounded(dtype, x)
    }

    pub(crate) fn values(&mut self, dtype: DType, len: usize) -> Vec<f64> {
        (0..len).map(|_| self.value(dtype)).collect()
    }

    /// Finite and of ordinary size.
    pub(crate) fn ordinary(&mut self, dtype: DType, len: usize) -> Vec<f64> {
        (0..len)
            .map(|_| rounded(dtype, 4.0 * self.unit()))
            .collect()
    }
}

/// A tensor on the host: memory and how to walk through it.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) memory: Vec<f64>,
    /// Where the tensor begins.
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dtype: DType,
}

impl Tensor {
    pub(crate) fn contiguous(dtype: DType, memory: Vec<f64>) -> Self {
        Self {
            shape: vec![memory.len()],
            memory,
            offset: 0,
            strides: vec![1],
            dtype,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The values in logical order.
    pub(crate) fn values(&self) -> Vec<f64> {
        let value = |k: usize| {
            let (mut rest, mut at) = (k, self.offset);
            for (n, stride) in self.shape.iter().zip(&self.strides).rev() {
                at += rest % n * stride;
                rest /= n;
            }
            self.memory[at]
        };
        (0..self.len()).map(value).collect()
    }

    /// On the device.
    pub(crate) fn upload(&self, client: &Client) -> Uploaded {
        let all = client.create_from_slice(&encode(self.dtype, &self.memory));
        Uploaded {
            handle: all.offset_start((self.offset * self.dtype.size()) as u64),
            tensor: self.clone(),
        }
    }
}

pub(crate) struct Uploaded {
    pub(crate) handle: Handle,
    tensor: Tensor,
}

impl Uploaded {
    pub(crate) fn source(&self) -> Source<'_> {
        Source {
            handle: &self.handle,
            shape: &self.tensor.shape,
            strides: &self.tensor.strides,
            dtype: self.tensor.dtype,
        }
    }
}

/// A bucket with one slot for each tensor, all packed.
pub(crate) fn packed(client: &Client, dtype: DType, tensors: &[Tensor], scale: f64) -> Bucket {
    let mut bucket = empty(client, dtype, tensors);
    for (slot, tensor) in tensors.iter().enumerate() {
        let tensor = tensor.upload(client);
        bucket.pack(slot, &tensor.source(), scale).unwrap();
    }
    bucket
}

/// A bucket with one slot for each tensor. Its memory is full of NaN, so that what is not written shows.
pub(crate) fn empty(client: &Client, dtype: DType, tensors: &[Tensor]) -> Bucket {
    let lens: Vec<_> = tensors.iter().map(Tensor::len).collect();
    let mut bucket = Bucket::new(client, BucketLayout::new(dtype, &lens)).unwrap();
    if !bucket.layout().is_empty() {
        bucket.assume_written();
        let nan = encode(dtype, &vec![f64::NAN; bucket.layout().len()]);
        client.write(&memory(&bucket), cubecl::bytes::Bytes::from_bytes_vec(nan));
    }
    bucket
}

/// All of the bucket's memory. Views of slots share it.
fn memory(bucket: &Bucket) -> Handle {
    let mut view = bucket.unpack(0, bucket.dtype(), 1.0).unwrap();
    view.offset_start = None;
    view.offset_end = Some(view.size() - bucket.layout().bytes());
    view
}

/// The values of the whole bucket, with the padding.
pub(crate) fn contents(client: &Client, bucket: &Bucket) -> Vec<f64> {
    decode(bucket.dtype(), &client.read_one(memory(bucket)).unwrap())
}

/// The values of a slot, read through the view that `unpack` gives.
pub(crate) fn slot(client: &Client, bucket: &Bucket, slot: usize) -> Vec<f64> {
    let view = bucket.unpack(slot, bucket.dtype(), 1.0).unwrap();
    decode(bucket.dtype(), &client.read_one(view).unwrap())
}

/// Equal bits, where any NaN equals any other.
pub(crate) fn assert_same(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (k, (x, y)) in found.iter().zip(expected).enumerate() {
        let same = x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan());
        assert!(same, "{what}: element {k} is {x:e}, expected {y:e}");
    }
}
