//! Ranks that the program launches itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use burn_ddp::{Ddp, Error, Launcher};
use burn_ddp_tests::{
    Launched,
    dying::{self, Moment},
    launched,
};
use rustix::process::{Signal, getpid, kill_process};

/// `main` of a program that launches `nproc` ranks.
fn launch(nproc: usize, train: impl FnOnce(Ddp) -> Result<(), Error>) {
    match Launcher::new().nproc(nproc).run(train) {
        Ok(()) => std::process::exit(0),
        Err(Error::Launch(error)) => error.exit(),
        Err(_) => std::process::exit(1),
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
