//! What the hooks alone add to forward and backward: the same model plain and wrapped, in a world of one, where nothing is
//! reduced. Throughput counts parameter uses, so the cost per use is the difference of the two times per element.

#![allow(missing_docs)]

use burn::module::Param;
use burn::prelude::*;
use burn_ddp::{Ddp, Error, group::host::Rendezvous};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const PARAMETERS: usize = 500;

#[derive(Module, Debug)]
struct Sum {
    weights: Vec<Param<Tensor<1>>>,
}

impl Sum {
    fn step(&self) -> burn::tensor::Gradients {
        let values: Vec<Tensor<1>> = self.weights.iter().map(Param::val).collect();
        Tensor::cat(values, 0).sum().backward()
    }
}

fn hooks(criterion: &mut Criterion) {
    let device = Device::flex().autodiff();
    let weight = |_| Param::from_tensor(Tensor::<1>::ones([64], &device));
    let plain = Sum {
        weights: (0..PARAMETERS).map(weight).collect(),
    };
    let wrapped = wrap(plain.clone());
    let mut group = criterion.benchmark_group("forward and backward of 500 parameters");
    group.throughput(Throughput::Elements(PARAMETERS as u64));
    group.bench_function("plain", |b| b.iter(|| plain.step()));
    match wrapped {
        Ok((_ddp, wrapped)) => {
            group.bench_function("wrapped", |b| b.iter(|| wrapped.step()));
        }
        Err(error) => eprintln!("{error}"),
    }
    group.finish();
}

fn wrap(model: Sum) -> Result<(Ddp, Sum), Error> {
    let ddp = Ddp::connect(Rendezvous::new(0, 1, "127.0.0.1", 0)?)?;
    let model = ddp.wrap(model)?;
    Ok((ddp, model))
}

criterion_group!(benches, hooks);
criterion_main!(benches);
