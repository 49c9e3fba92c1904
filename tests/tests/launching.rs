//! Ranks that the program launches itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn::tensor::Device;
use burn_ddp::{Ddp, Error, Launcher};
use burn_ddp_tests::{
    Launched, assert_says,
    dying::{self, Moment},
    launched,
    models::Scalar,
};
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

/// `main` of a program that launches `nproc` ranks.
fn launch(nproc: usize, train: impl FnOnce(Ddp) -> Result<(), Error>) -> ! {
    let launcher = Launcher::new().nproc(nproc).grace(Duration::from_secs(1));
    match launcher.run(train) {
        Ok(()) => std::process::exit(0),
        // As Rust does for a `main` that returns it.
        Err(error) => {
            eprintln!("Error: {error:?}");
            std::process::exit(1)
        }
    }
}

/// The launcher's report.
fn summary(launched: &Launched) -> &str {
    let start = launched
        .stderr
        .rfind(" failed first ")
        .unwrap_or_else(|| panic!("no report: {launched:#?}"));
    let line = launched.stderr[..start]
        .rfind('\n')
        .map_or(0, |end| end + 1);
    &launched.stderr[line..]
}

#[test]
fn ddp_03_the_launcher_ends_the_survivors() {
    let ways = ["abort", "panic", "exit", "kill"];
    let ended = launched("ddp_03_the_launcher_ends_the_survivors", &ways, |way| {
        launch(4, |ddp| dying::train(&ddp, Moment::During, dying::way(way)));
    });
    for (way, ended) in ways.iter().zip(&ended) {
        assert!(ended.left.is_empty(), "{way}: {ended:#?}");
        let code = ended.code.unwrap_or_else(|| panic!("{way}: {ended:#?}"));
        match *way {
            "abort" => assert_eq!(code, 128 + 6),
            "panic" => assert_eq!(code, 101),
            "kill" => assert_eq!(code, 128 + 9),
            // The victim itself says 0.
            _ => assert_ne!(code, 0),
        }
        assert!(summary(ended).contains("lost rank 2"), "{way}: {ended:#?}");
    }
}

#[test]
fn ddp_17_four_launches_at_once() {
    let ended = launched(
        "ddp_17_four_launches_at_once",
        &["a", "b", "c", "d"],
        |_| {
            launch(2, |ddp| {
                assert_eq!(ddp.sum(ddp.rank() as f64 + 1.0)?, 3.0);
                Ok(())
            });
        },
    );
    for ended in ended {
        assert_eq!(
            (ended.code, &ended.left[..]),
            (Some(0), &[][..]),
            "{ended:#?}"
        );
    }
}

#[test]
fn ddp_20_the_first_cause_is_reported() {
    let ended = launched(
        "ddp_20_the_first_cause_is_reported",
        &["panic", "kill"],
        |variant| {
            launch(3, |ddp| {
                for step in 0..10 {
                    match (step, ddp.rank(), variant) {
                        (3, 1, "panic") => panic!("boom-{}", 42),
                        (3, 2, "kill") => kill_process(getpid(), Signal::KILL).unwrap(),
                        _ => {}
                    }
                    ddp.sum(1.0)?;
                }
                Ok(())
            });
        },
    );
    let report = summary(&ended[0]);
    let at = |text: &str| {
        report
            .find(text)
            .unwrap_or_else(|| panic!("no {text:?}: {:#?}", ended[0]))
    };
    assert!(at("rank 1 of 3 failed first") < at("boom-42"), "{report}");
    assert!(at("boom-42") < at("lost rank 1"), "{report}");
    let report = summary(&ended[1]);
    assert!(
        report.starts_with("rank 2 of 3 failed first") && report.contains("signal 9 (SIGKILL)"),
        "{report}"
    );
}

/// An error that leaves `backward` as a panic is told like one that is returned: in the report alone.
#[test]
fn a_rank_that_is_lost_in_backward_is_told_once() {
    let name = "a_rank_that_is_lost_in_backward_is_told_once";
    let ended = launched(name, &["kill"], |_| {
        launch(2, |ddp| {
            let model = ddp.wrap(Scalar::new(0.0, &Device::flex().autodiff()))?;
            if ddp.rank() == 1 {
                kill_process(getpid(), Signal::KILL).unwrap();
            }
            (model.w.val() * 2.0).backward();
            Ok(())
        });
    });
    let (stderr, report) = (&ended[0].stderr, summary(&ended[0]));
    assert!(report.starts_with("rank 1 of 2 failed first"), "{report}");
    let then = "\n  then rank 0 (exit code 101): rank 0: lost rank 1 (";
    assert!(report.contains(then), "{report}");
    assert_eq!(stderr.matches("lost rank 1").count(), 1, "{stderr}");
}

/// Reduces until something happens to rank 1.
fn until(ddp: &Ddp, fate: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
    for _ in 0..3 {
        ddp.sum(1.0)?;
    }
    if ddp.rank() == 1 {
        fate()?;
    }
    loop {
        ddp.sum(1.0)?;
    }
}

fn send(signal: Signal) -> Result<(), Error> {
    kill_process(getpid(), signal).unwrap();
    Ok(())
}

fn own(ddp: &Ddp, text: &str) -> Error {
    Error::Device {
        rank: ddp.rank(),
        local_rank: ddp.local_rank(),
        cause: text.to_owned(),
    }
}

#[test]
fn ddp_20_a_hung_rank_is_the_cause_and_not_the_rank_that_misses_it() {
    let ended = launched(
        "ddp_20_a_hung_rank_is_the_cause_and_not_the_rank_that_misses_it",
        &["stopped", "stuck"],
        |variant| {
            launch(3, |ddp| {
                until(&ddp, || match variant {
                    "stopped" => send(Signal::STOP),
                    _ => loop {
                        std::thread::sleep(Duration::from_secs(1));
                    },
                })
            })
        },
    );
    let words = [
        "it stopped answering: a signal (SIGSTOP, SIGTSTP) or a debugger had stopped it",
        "it stopped answering: it may be stuck",
    ];
    for (ended, words) in ended.iter().zip(words) {
        let report = summary(ended);
        assert!(report.starts_with("rank 1 of 3 failed first"), "{ended:#?}");
        assert_says(report, &["still running", words, "then rank"]);
        assert_eq!(ended.code, Some(1), "{ended:#?}");
        assert!(ended.left.is_empty(), "{ended:#?}");
    }
}

#[test]
fn ddp_20_an_error_is_told_to_the_peers_and_printed_once() {
    let ended = launched(
        "ddp_20_an_error_is_told_to_the_peers_and_printed_once",
        &[""],
        |_| launch(4, |ddp| until(&ddp, || Err(own(&ddp, "the disk is full")))),
    );
    let report = summary(&ended[0]);
    assert!(report.starts_with("rank 1 of 4 failed first"), "{report}");
    assert_says(
        report,
        &[
            "then ranks 0, 2, 3 (exit code 1): ",
            " because rank 1 ",
            "failed: rank 1 (local rank 1): the disk is full",
        ],
    );
    // By rank 1, and in the words of one of its peers.
    assert_eq!(
        ended[0].stderr.matches("the disk is full").count(),
        2,
        "{:#?}",
        ended[0]
    );
    assert_eq!(ended[0].code, Some(1));
}

#[test]
fn the_launching_process_ends_like_the_rank_that_failed_first() {
    let ended = launched(
        "the_launching_process_ends_like_the_rank_that_failed_first",
        &["exit", "kill", "well"],
        |variant| {
            launch(2, |ddp| match variant {
                "exit" => until(&ddp, || std::process::exit(3)),
                "kill" => until(&ddp, || send(Signal::KILL)),
                _ => Ok(()),
            })
        },
    );
    let codes: Vec<_> = ended.iter().map(|ended| ended.code).collect();
    assert_eq!(codes, [Some(3), Some(128 + 9), Some(0)], "{ended:#?}");
}

#[test]
fn a_wrong_variable_is_reported_once() {
    let ended = launched("a_wrong_variable_is_reported_once", &[""], |_| {
        // SAFETY: no other thread of this process reads or writes the environment now.
        unsafe { std::env::set_var("BURN_DDP_TRANSPORT", "foo") };
        launch(3, |_| Ok(()))
    });
    let lines: Vec<_> = ended[0]
        .stderr
        .lines()
        .filter(|line| line.contains("foo"))
        .collect();
    assert_eq!(lines.len(), 1, "{:#?}", ended[0]);
    assert_says(lines[0], &["BURN_DDP_TRANSPORT", "auto, shm or tcp"]);
    assert_says(&ended[0].stderr, &["book/src/troubleshooting.md"]);
    assert_eq!(ended[0].code, Some(1));
}

#[test]
fn the_report_points_to_the_book_once() {
    let ended = launched("the_report_points_to_the_book_once", &[""], |_| {
        launch(2, |ddp| {
            if ddp.rank() == 0 {
                ddp.abort("the disk is full");
                ddp.barrier().unwrap();
            }
            ddp.barrier()
        })
    });
    let summary = summary(&ended[0]);
    assert_says(summary, &["the disk is full", "tests/launching.rs:"]);
    let pointers = summary.matches("book/src/troubleshooting.md");
    assert_eq!(pointers.count(), 1, "{summary}");
}

#[test]
fn a_rank_of_another_launcher_says_that_it_starts_none() {
    let ended = launched(
        "a_rank_of_another_launcher_says_that_it_starts_none",
        &[""],
        |_| {
            // SAFETY: no other thread of this process reads or writes the environment now.
            unsafe {
                std::env::set_var("RANK", "0");
                std::env::set_var("WORLD_SIZE", "1");
            }
            launch(2, |ddp| {
                assert_eq!(ddp.world_size(), 1);
                Ok(())
            })
        },
    );
    assert_says(
        &ended[0].stderr,
        &["rank 0 of 1", "no 2 ranks are started here; unset"],
    );
    assert_eq!(ended[0].code, Some(0));
}
