//! The `freetoken` binary: parse, run, print what went wrong once.

use std::process::ExitCode;

use clap::Parser;
use freetoken::cli::{Cli, note, sentence};

fn main() -> ExitCode {
    match Cli::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            note(&format!("error: {}", sentence(&error)));
            ExitCode::FAILURE
        }
    }
}
