//! `cargo xtask ci`: the steps in order, then a table of what ran and what was left out, then the test runner's count.
//!
//! One profile, `ci`, so that no dependency is compiled twice: tests and doctests share its build, clippy and docs its
//! check. The cheap steps come first; a step that fails does not keep the others from running. With `FREETOKEN_CI=1`
//! whatever is left out is a failure. What a step checks is known to the command behind it.

mod report;
mod test_runner;

use std::env;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use crate::{cargo, deny, kernels, tidy};
use report::Report;

/// Folders that some tests read: the variable that names the folder, and what is not checked without it.
const FOLDERS: [(&str, &str); 3] = [
    ("FREETOKEN_TEMPLATES", "chat templates against transformers"),
    ("FREETOKEN_CLIENTS", "the server with the official clients of its protocols"),
    ("FREETOKEN_GOLDEN", "the golden checkpoints that are too large to commit"),
];

/// Runs everything. The last line on standard output is the count of tests.
pub(crate) fn run() -> ExitCode {
    let mut report = Report::default();
    let mut count = "no test ran".to_owned();

    report.step("fmt", || done(&mut cargo("fmt --all --check")));
    report.step("tidy", tidy::run);
    report.step("deny", deny::run);
    report.step("kernels", || kernels::run(&["--check"]));
    report.step("clippy", || {
        done(&mut cargo("clippy --profile ci --workspace --all-targets --locked -- -D warnings"))
    });
    report.step("tests", || {
        let tests = test_runner::tests()?;
        count = tests.count;
        ensure!(tests.passed, "{}", count.trim());
        Ok(())
    });
    report.step("doctests", || {
        let tests = test_runner::doctests()?;
        ensure!(tests.passed, "{}", tests.count);
        Ok(())
    });
    report.step("docs", || {
        let mut docs = cargo("doc --profile ci --workspace --no-deps --document-private-items --locked");
        done(docs.env("RUSTDOCFLAGS", "-D warnings"))
    });

    report.within("fuzz corpus", "tests, as tests/bad_checkpoint.rs");
    report.within("commands in README.md and docs/", "tests, as tests/docs.rs");
    for (variable, what) in FOLDERS {
        match env::var_os(variable) {
            Some(_) => report.within(what, "tests"),
            None => report.left_out(what, &format!("{variable} names no folder")),
        }
    }

    let strict = env::var_os("FREETOKEN_CI").is_some_and(|value| value == "1");
    println!("\n{report}\n");
    let ok = report.passed(strict);
    if !ok && report.passed(false) {
        println!("With FREETOKEN_CI=1 this fails: something was left out.\n");
    }
    println!("{count}");
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a command to its end, with its output on ours.
fn done(command: &mut Command) -> Result<()> {
    let status = command.status().context("cargo cannot be started")?;
    ensure!(status.success(), "{status}");
    Ok(())
}
