//! The numbers that training under mpirun gives.

use crate::{ranks, succeed};
use burn_ddp::{Ddp, Error, ReduceOp, group::DType};
use burn_ddp_tests::{
    models::Mlp,
    oracle::{
        assert_close, assert_same_bits, batch, device, fingerprint, load, parameters, square, train,
    },
};
use std::{
    hash::{DefaultHasher, Hash, Hasher},
    process::{Command, Stdio},
};

const TEST: &str = "values::ranks_train_as_one_process_and_as_the_host_group_bit_for_bit";

/// Every reduction of numbers whose sums round.
fn reductions(ddp: &Ddp) -> Result<Vec<u8>, Error> {
    let mut all = Vec::new();
    let mut noise = 0x9e37_79b9_u32.wrapping_mul(ddp.rank() as u32 + 1);
    for (dtype, ops) in [
        (
            DType::F32,
            &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Product][..],
        ),
        (DType::F64, &[ReduceOp::Sum, ReduceOp::Mean]),
        (DType::F16, &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max]),
        (DType::BF16, &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min]),
    ] {
        for &op in ops {
            for len in [5, 40_001] {
                let mut numbers = (0..len).map(|_| {
                    noise ^= noise << 13;
                    noise ^= noise >> 17;
                    noise ^= noise << 5;
                    0.5 + noise as f32 / u32::MAX as f32
                });
                let mut data: Vec<u8> = match dtype {
                    DType::F32 => numbers.flat_map(f32::to_ne_bytes).collect(),
                    DType::F64 => numbers.flat_map(|x| f64::from(x).to_ne_bytes()).collect(),
                    DType::F16 => numbers
                        .flat_map(|x| half::f16::from_f32(x).to_ne_bytes())
                        .collect(),
                    _ => numbers
                        .by_ref()
                        .flat_map(|x| half::bf16::from_f32(x).to_ne_bytes())
                        .collect(),
                };
                ddp.group().all_reduce(&mut data, dtype, op)?;
                all.extend(data);
            }
        }
    }
    Ok(all)
}

/// Trains as one process does on the whole batch, and prints a hash of all bits.
fn values(ddp: &Ddp) -> Result<(), Error> {
    let all = reductions(ddp)?;
    // Steps, rows of the global batch, learning rate.
    const RUN: (u64, usize, f64) = (20, 8, 0.05);
    let loss =
        |model: &Mlp, step, rows| square(model.forward(batch(step, rows, [0, 8], &device())) - 0.5);
    device().seed(7);
    let model = ddp.wrap(Mlp::new(&device()))?;
    let start = parameters(&model);
    let model = train(model, RUN, (ddp.rank(), ddp.world_size()), loss);
    assert_same_bits(ddp, &model);
    let one = train(load(Mlp::new(&device()), &start), RUN, (0, 1), loss);
    assert_close(&parameters(&model), &parameters(&one), 1e-6);

    let mut hasher = DefaultHasher::new();
    (&all, fingerprint(&model)).hash(&mut hasher);
    let hash = hasher.finish();
    let hashes = ddp.all_gather(&hash)?;
    assert!(hashes.iter().all(|other| *other == hash));
    if ddp.is_main() {
        println!("values of {}: {hash:016x}", ddp.world_size());
    }
    Ok(())
}

/// The line that rank 0 printed.
fn line(text: &str) -> String {
    let start = text.find("values of").expect(text);
    text[start..].lines().next().unwrap().to_owned()
}

#[test]
fn ranks_train_as_one_process_and_as_the_host_group_bit_for_bit() {
    for count in [2, 4] {
        let under_mpirun = || {
            let run = ranks(count, TEST, "values", &[], |ddp, _| values(ddp))?;
            assert!(run.success, "{}", run.text);
            Some(line(&run.text))
        };
        let Some(first) = under_mpirun() else { return };
        let host = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", TEST, "--nocapture", "--test-threads=1"])
            .env("BURN_DDP_TEST_MPI", "values")
            .env("BURN_DDP_NPROC", count.to_string())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(first, line(&String::from_utf8_lossy(&host.stdout)));
        assert_eq!(Some(first), under_mpirun(), "a rerun gives the same bits");
    }
}

#[test]
fn ddp_20_what_rank_0_chooses_is_the_same_on_all() {
    succeed(
        3,
        "values::ddp_20_what_rank_0_chooses_is_the_same_on_all",
        |ddp| {
            let name = ddp.broadcast(format!("run-of-{}", std::process::id()))?;
            let names = ddp.all_gather(&name)?;
            assert!(names[0].starts_with("run-of-") && names.iter().all(|n| *n == names[0]));
            Ok(())
        },
    );
}
