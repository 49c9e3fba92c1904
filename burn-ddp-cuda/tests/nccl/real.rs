//! The real library, where the machine has one.

use burn_ddp_cuda::nccl::{Communicator, Library, MINIMUM, NcclError, Settings};

/// Needs `BURN_DDP_NCCL_LIB` or an installed NCCL, and no GPU: without one the start is an error, and no panic or hang.
#[test]
#[ignore = "needs NCCL's library: cargo test -p burn-ddp-cuda -- --ignored real"]
fn real_nccl_has_every_function_and_starts_or_says_why_not() {
    let library = Library::load().unwrap();
    assert!(library.version() >= MINIMUM);
    let started = library
        .unique_id()
        .and_then(|id| Communicator::init(&library, &id, 0, 1, Settings::default()));
    match started {
        Ok(communicator) => {
            println!("{}", communicator.describe());
            communicator.close().unwrap();
        }
        Err(error @ (NcclError::Failed { .. } | NcclError::Call { .. })) => {
            println!("{library}: {error}");
        }
        Err(error) => panic!("{error:?}"),
    }
}
