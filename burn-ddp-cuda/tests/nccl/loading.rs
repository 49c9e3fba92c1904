//! Libraries that are missing, or not NCCL, or too old.

use crate::common::{Rank, kind, mock, ranks, settings};
use burn_ddp_cuda::nccl::{LIBRARY, Library, NcclError, Version};
use std::{path::Path, time::Duration};

const ADVICE: &str = "Install it: the pip wheel nvidia-nccl-cu12 or nvidia-nccl-cu13 (CUDA 12 or 13), or Debian's libnccl2; or set \
                      BURN_DDP_NCCL_LIB to the path of libnccl.so.2";

#[test]
fn a_missing_library() {
    let error = Library::open("/no/such/libnccl.so.2").unwrap_err();
    let NcclError::LibraryNotFound { tried } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(tried.len(), 1);
    assert!(tried[0].starts_with("/no/such/libnccl.so.2: "), "{tried:?}");
    assert!(error.to_string().ends_with(ADVICE), "{error}");
}

/// The variable wins, and nothing else is tried.
#[test]
fn the_variable_names_the_library() {
    let test = "loading::the_variable_names_the_library";
    let load = |_: Rank| match Library::load() {
        Ok(library) => library.to_string(),
        Err(error) => error.to_string(),
    };
    if let Ok(path) = std::env::var(LIBRARY) {
        // A rank of one of the two runs below.
        ranks(1).env(LIBRARY, path).run(test, load);
    }
    let path = mock::path();
    let path = path.to_str().unwrap();
    let found = ranks(1).env(LIBRARY, path).run(test, load);
    assert_eq!(found, [format!("NCCL 2.27.3 ({path})")]);
    let missing = ranks(1).env(LIBRARY, "/no/such/lib.so").run(test, load);
    assert!(
        missing[0].starts_with("NCCL's library was not found: /no/such/lib.so: ")
            && missing[0].ends_with(ADVICE)
            && !missing[0].contains("libnccl.so:"),
        "{missing:?}"
    );
}

#[test]
#[cfg(target_os = "linux")]
fn a_library_that_is_not_nccl() {
    let error = Library::open("libm.so.6").unwrap_err();
    let expected = NcclError::SymbolMissing {
        library: Path::new("libm.so.6").to_owned(),
        symbol: "ncclGetVersion",
    };
    assert_eq!(error, expected);
    assert_eq!(
        error.to_string(),
        "libm.so.6 has no function ncclGetVersion: it is not NCCL 2.19.0, or later. Set BURN_DDP_NCCL_LIB to the path of libnccl.so.2"
    );
}

#[test]
fn a_library_that_is_too_old() {
    let test = "loading::a_library_that_is_too_old";
    let path = mock::path();
    let open = || match Library::open(&path) {
        Err(NcclError::TooOld { found, .. }) => found.to_string(),
        other => format!("{other:?}"),
    };
    // The rank opens it before the harness does, which is why this is not `ranks().run`.
    if std::env::var_os("MOCK_NCCL_FAULT").is_some() {
        println!("found {}", open());
        return;
    }
    for (number, version) in [
        ("21899", Version::new(2, 18, 99)),
        ("2804", Version::new(2, 8, 4)),
    ] {
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env("MOCK_NCCL_FAULT", format!("version:{number}"))
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&output.stdout);
        assert!(output.contains(&format!("found {version}")), "{output}");
    }
    let error = NcclError::TooOld {
        library: "libnccl.so.2".into(),
        found: Version::new(2, 18, 5),
    };
    assert_eq!(
        error.to_string(),
        "libnccl.so.2 is NCCL 2.18.5; 2.19.0 or later is needed. Install a newer one (the pip wheel nvidia-nccl-cu12 or nvidia-nccl-cu13, \
         or Debian's libnccl2) and set BURN_DDP_NCCL_LIB to its libnccl.so.2"
    );
}

/// With blocking calls no deadline would hold.
#[test]
fn an_environment_that_makes_nccl_block() {
    let test = "loading::an_environment_that_makes_nccl_block";
    let results = ranks(1).env("NCCL_COMM_BLOCKING", "1").run(test, |rank| {
        kind(rank.init("id", settings(Duration::ZERO)).unwrap_err())
    });
    assert!(
        results[0].starts_with("NCCL_COMM_BLOCKING=1 makes every call of NCCL block"),
        "{results:?}"
    );
}
