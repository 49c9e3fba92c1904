//! What a command line means.
#![allow(clippy::unwrap_used)]

use super::*;

fn job(line: &str, environment: &[(&str, &str)]) -> Result<Job, UsageError> {
    let arguments = Arguments::try_parse_from(line.split(' ')).unwrap();
    let Command::Run(run) = arguments.command;
    run.job(&|name| {
        let found = environment.iter().find(|(key, _)| *key == name);
        found.map(|(_, value)| (*value).to_owned())
    })
}

#[test]
fn one_machine_needs_nothing() {
    let job = job("burn-ddp run prog --nproc 3 -x", &[]).unwrap();
    assert_eq!(job.program, "prog");
    assert_eq!(job.arguments, ["--nproc", "3", "-x"]);
    assert_eq!((job.nproc, job.node), (1, Node { rank: 0, count: 1 }));
    assert_eq!((job.master, job.secret), (None, None));
    assert_eq!((job.generation, job.max_restarts), (0, 0));
}

#[test]
fn options_beat_the_environment() {
    let environment = [
        (NPROC, "5"),
        (MASTER_ADDR, "a"),
        (MASTER_PORT, "1"),
        (SECRET, "s3cret"),
        (GENERATION, "4"),
    ];
    let line = "burn-ddp run --nnodes 3 --node-rank 2 --max-restarts 6";
    let found = job(&format!("{line} -- prog --help"), &environment).unwrap();
    assert_eq!(found.arguments, ["--help"]);
    assert_eq!((found.nproc, found.generation), (5, 4));
    assert_eq!(found.master, Some(("a".to_owned(), 1)));
    assert_eq!(found.node, Node { rank: 2, count: 3 });
    let line = format!("{line} --nproc 2 --master-addr b --master-port 7 prog");
    let found = job(&line, &environment).unwrap();
    assert_eq!(found.nproc, 2);
    assert_eq!(found.master, Some(("b".to_owned(), 7)));
}

#[test]
fn several_machines_need_to_know_each_other() {
    let secret = [(SECRET, "s3cret")];
    let cases = [
        ("--nnodes 2", &secret[..], "needs --node-rank"),
        ("--nnodes 2 --node-rank 1", &secret, "needs --master-addr"),
        ("--nnodes 2 --node-rank 2", &secret, "from 0 to 1"),
        ("--node-rank 1", &[], "too large for --nnodes 1"),
        (
            "--nnodes 2 --node-rank 0 --master-addr a",
            &[],
            "`openssl rand -hex 32`, and set BURN_DDP_SECRET to it on all machines",
        ),
        (
            "--nproc 1",
            &[(GENERATION, "x")],
            "BURN_DDP_GENERATION is \"x\"",
        ),
    ];
    for (options, environment, expected) in cases {
        let error = job(&format!("burn-ddp run {options} prog"), environment);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(expected), "{options}: {error}");
    }
}

#[test]
fn the_port_of_several_machines_is_the_usual_one() {
    let line = "burn-ddp run --nnodes 2 --node-rank 0 --master-addr a prog";
    let job = job(line, &[(SECRET, "s3cret")]).unwrap();
    assert_eq!(job.master, Some(("a".to_owned(), 29500)));
}
