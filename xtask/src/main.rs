//! The project's chores, `cargo xtask <chore>`: finds the project's root and the chore, knows no chore's work.

#![allow(clippy::print_stdout, reason = "a chore's answer is what it prints")]

mod ci;
mod deny;
mod kernels;
mod tidy;

use std::env;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage: cargo xtask <chore>
  ci     everything that CI runs: fmt, tidy, deny, clippy, tests, docs
  deny   licences, banned crates and sources of the dependencies, by deny.toml
  kernels [--check]
         the CUDA kernels, compiled for every generation of cards, or compared with what is committed
  tidy   what each op has, and the rules that no other tool knows";

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    match run(&args.iter().map(String::as_str).collect::<Vec<_>>()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[&str]) -> Result<ExitCode> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    env::set_current_dir(&root).with_context(|| format!("{}: cannot be entered", root.display()))?;
    match args {
        ["ci"] => return Ok(ci::run()),
        ["deny"] => deny::run()?,
        ["kernels", rest @ ..] => kernels::run(rest)?,
        ["tidy"] => tidy::run()?,
        _ => bail!("{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// A cargo command, from words without quotes.
fn cargo(words: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words.split_whitespace());
    command
}
