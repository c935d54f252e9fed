//! `evenhand`. What it does is in `lib.rs`.

use std::process::ExitCode;

// Tasks come and go in small pieces, made by one thread and freed by another: see docs/decisions/0007.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    evenhand_cli::main()
}
