//! Pack and unpack of ResNet-50's gradients in 25 MiB buckets, against the device's own copy: `cargo bench -p burn-ddp-cuda --features wgpu`.
//!
//! Prints GB/s, bytes read and bytes written together, and the ratio to the copy of as much memory in the same run. Each figure is the
//! median of several rounds, in which everything takes its turn.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp_cuda::kernels::{Bucket, BucketLayout, DType, Source, supports};
use cubecl::{
    Device, client::Client, future, prelude::TensorBinding, server::Handle, std::tensor::copy_into,
};
use std::time::Instant;

const BUCKET: usize = 25 << 20;
const ROUNDS: usize = 9;

/// The shapes of ResNet-50's 161 parameters, in the order in which their gradients come.
fn shapes() -> Vec<Vec<usize>> {
    let mut shapes = Vec::new();
    let mut conv = |output: usize, input: usize, kernel: usize| {
        shapes.push(vec![output, input, kernel, kernel]);
        shapes.extend([vec![output], vec![output]]); // batch norm
    };
    conv(64, 3, 7);
    let mut input = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            conv(width, input, 1);
            conv(width, width, 3);
            conv(4 * width, width, 1);
            if block == 0 {
                conv(4 * width, input, 1);
            }
            input = 4 * width;
        }
    }
    shapes.extend([vec![1000, 2048], vec![1000]]);
    shapes.reverse();
    shapes
}

/// The same shapes in buckets of at most 25 MiB of f32.
fn buckets(shapes: Vec<Vec<usize>>) -> Vec<Vec<Vec<usize>>> {
    let mut buckets = vec![Vec::new()];
    let mut bytes = 0;
    for shape in shapes {
        let size = 4 * shape.iter().product::<usize>();
        if bytes + size > BUCKET && bytes > 0 {
            buckets.push(Vec::new());
            bytes = 0;
        }
        bytes += size;
        buckets.last_mut().unwrap().push(shape);
    }
    buckets
}

fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

struct Gradient {
    handle: Handle,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Gradient {
    fn source(&self) -> Source<'_> {
        Source {
            handle: &self.handle,
            shape: &self.shape,
            strides: &self.strides,
            dtype: DType::F32,
        }
    }
}

/// Seconds until the device has done it.
fn time(client: &Client, work: impl FnOnce()) -> f64 {
    future::block_on(client.sync()).unwrap();
    let start = Instant::now();
    work();
    future::block_on(client.sync()).unwrap();
    start.elapsed().as_secs_f64()
}

fn bench(client: &Client) {
    println!("{} (25 MiB buckets of ResNet-50)", client.name());
    let gradients: Vec<Vec<Gradient>> = buckets(shapes())
        .into_iter()
        .map(|shapes| {
            let gradient = |shape: Vec<usize>| {
                let len = shape.iter().product();
                Gradient {
                    handle: client.create_from_slice(bytemuck::cast_slice(&vec![0.5_f32; len])),
                    strides: contiguous(&shape),
                    shape,
                }
            };
            shapes.into_iter().map(gradient).collect()
        })
        .collect();
    let lens = |bucket: &[Gradient]| -> Vec<usize> {
        bucket.iter().map(|g| g.shape.iter().product()).collect()
    };
    let count: usize = gradients
        .iter()
        .map(|b| lens(b).iter().sum::<usize>())
        .sum();
    let tensors: usize = gradients.iter().map(Vec::len).sum();
    println!(
        "{count} elements, {tensors} tensors, {} buckets",
        gradients.len()
    );

    let dtypes = [DType::F32, DType::F16, DType::BF16];
    let dtypes = dtypes.into_iter().filter(|&d| supports(client, d));
    let new = |dtype, bucket: &[Gradient]| {
        Bucket::new(client, BucketLayout::new(dtype, &lens(bucket))).unwrap()
    };
    let copies: Vec<(Handle, Handle, usize)> = gradients
        .iter()
        .map(|bucket| {
            let len = lens(bucket).iter().sum::<usize>();
            let from = client.create_from_slice(bytemuck::cast_slice(&vec![0.5_f32; len]));
            (from, client.empty(4 * len), len)
        })
        .collect();
    let copy = || {
        for (from, to, len) in &copies {
            let binding = |handle: &Handle| {
                // SAFETY: both handles were made for so many f32 above.
                unsafe { TensorBinding::from_raw_parts(handle.clone(), [1].into(), [*len].into()) }
            };
            let dtype = cubecl::ir::ElemType::Float(cubecl::ir::FloatKind::F32);
            copy_into(client, binding(from), binding(to), dtype);
        }
    };

    for dtype in dtypes {
        // Copy, pack one by one, pack together, unpack, norm.
        let mut times: [Vec<f64>; 5] = Default::default();
        for _ in 0..=ROUNDS {
            times[0].push(time(client, copy));
            let mut packed: Vec<_> = gradients.iter().map(|b| new(dtype, b)).collect();
            times[1].push(time(client, || {
                for (bucket, gradients) in packed.iter_mut().zip(&gradients) {
                    for (slot, gradient) in gradients.iter().enumerate() {
                        bucket.pack(slot, &gradient.source(), 0.125).unwrap();
                    }
                }
            }));
            let mut packed: Vec<_> = gradients.iter().map(|b| new(dtype, b)).collect();
            times[2].push(time(client, || {
                for (bucket, gradients) in packed.iter_mut().zip(&gradients) {
                    let sources: Vec<_> =
                        gradients.iter().map(Gradient::source).enumerate().collect();
                    bucket.pack_all(&sources, 0.125).unwrap();
                }
            }));
            times[3].push(time(client, || {
                for bucket in &packed {
                    for slot in 0..bucket.layout().slots() {
                        // With a factor it is no view.
                        bucket.unpack(slot, DType::F32, 0.5).unwrap();
                    }
                }
            }));
            times[4].push(time(client, || {
                for bucket in &packed {
                    assert!(bucket.norm().unwrap().finite);
                }
            }));
        }
        let median = |times: &[f64]| {
            let mut times = times[1..].to_vec(); // the first compiles kernels
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let speed = |bytes: usize, times: &[f64]| (count * bytes) as f64 / median(times) / 1e9;
        let copied = speed(8, &times[0]);
        println!("  {dtype}: copy of f32          {copied:8.2} GB/s");
        let (there, back) = (4 + dtype.size(), dtype.size());
        for (name, bytes, times) in [
            ("pack, one launch each", there, &times[1]),
            ("pack_all", there, &times[2]),
            ("unpack to f32", there, &times[3]),
            ("norm", back, &times[4]),
        ] {
            let speed = speed(bytes, times);
            println!(
                "    {name:22} {speed:8.2} GB/s, {:5.2} of the copy",
                speed / copied
            );
        }
    }
}

fn main() {
    let mut devices = Vec::new();
    if cfg!(feature = "wgpu") {
        devices.push(Device::wgpu(Default::default()));
    }
    if cfg!(feature = "cpu") {
        devices.push(Device::cpu());
    }
    if cfg!(feature = "cuda") {
        devices.push(Device::cuda(0));
    }
    if devices.is_empty() {
        println!("skipped: no runtime was built in, choose a feature");
    }
    for device in devices {
        match device {
            Ok(device) => bench(&device.client()),
            Err(why) => println!("skipped: {why}"),
        }
    }
}
