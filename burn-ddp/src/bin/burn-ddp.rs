//! The `burn-ddp` command: starts and supervises the ranks of data-parallel training.

fn main() {
    burn_ddp::launch::cli::main();
}
