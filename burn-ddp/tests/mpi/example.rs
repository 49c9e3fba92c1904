//! The example as `mpirun -n 4` runs it.

use crate::mpirun::Mpirun;
use std::env;

#[test]
fn resnet_ddp_trains_one_model_on_four_ranks() {
    let test = env::current_exe().unwrap();
    let program = test.ancestors().nth(2).unwrap().join("examples/resnet_ddp");
    if !program.exists() {
        return eprintln!(
            "skipped: first `cargo build --workspace --features burn-ddp/mpi --example resnet_ddp`"
        );
    }
    let out = tempfile::tempdir().unwrap();
    let folder = out.path().to_str().unwrap();
    // 1,433 images in batches of 4 x 128 are three steps an epoch.
    let arguments = [
        "--epochs",
        "1",
        "--batch-size",
        "128",
        "--json",
        "--out",
        folder,
    ];
    let job = Mpirun::of(4, &program, &arguments).env("BURN_DDP_TRANSPORT", "mpi");
    let Some(run) = job.run() else { return };
    if run.text.contains("MASTER_ADDR and MASTER_PORT are not set") {
        return eprintln!("skipped: the example was built without MPI: {}", run.text);
    }
    assert!(run.success, "{}", run.text);
    let report = run.text.lines().find(|line| line.starts_with('{'));
    let report: serde_json::Value = serde_json::from_str(report.expect(&run.text)).unwrap();
    assert_eq!(report["world_size"], 4);
    assert_eq!(report["steps"], 3);
    let hashes = report["param_hashes"].as_array().unwrap();
    assert_eq!(hashes.len(), 4);
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{hashes:?}");
}
