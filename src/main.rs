//! The `freetoken` binary: parse, run, print what went wrong once.

use std::process::ExitCode;

use clap::Parser;
use freetoken::cli::Cli;

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", freetoken::cli::sentence(&error));
            ExitCode::FAILURE
        }
    }
}
