//! The tests, by cargo-nextest where it is installed and by `cargo test` elsewhere, and the line that counts them.

use std::io::{self, BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cargo;

/// What the test runner said at its end.
pub(super) struct Tests {
    /// Whether everything compiled and passed.
    pub(super) passed: bool,
    /// The runner's own count, on one line.
    pub(super) count: String,
}

/// Every test but the doctests.
pub(super) fn tests() -> Result<Tests> {
    if nextest_is_installed() {
        let words = "nextest run --cargo-profile ci --workspace --locked --no-fail-fast";
        let (passed, lines) = shown(&mut cargo(words))?;
        let count = lines.into_iter().rfind(|line| line.trim_start().starts_with("Summary ["));
        return Ok(Tests { passed, count: count.unwrap_or_else(|| "no test ran".to_owned()) });
    }
    println!("cargo-nextest is not installed: `cargo test` runs the tests");
    let words = "test --profile ci --workspace --lib --bins --tests --locked --no-fail-fast";
    let (passed, lines) = shown(&mut cargo(words))?;
    Ok(Tests { passed, count: total(&lines) })
}

/// The examples in the documentation, which cargo-nextest does not run.
pub(super) fn doctests() -> Result<Tests> {
    let (passed, lines) = shown(&mut cargo("test --doc --profile ci --workspace --locked"))?;
    Ok(Tests { passed, count: total(&lines) })
}

fn nextest_is_installed() -> bool {
    let mut version = cargo("nextest --version");
    version.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs a command and prints its lines, standard output and standard error in one order, as they come.
fn shown(command: &mut Command) -> Result<(bool, Vec<String>)> {
    let (reader, writer) = io::pipe()?;
    command.env("CARGO_TERM_COLOR", "never").stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("cargo cannot be started")?;
    // The reader ends when the last writer is closed, and `command` holds two.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let mut lines = Vec::new();
    for line in BufReader::new(reader).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        lines.push(line);
    }
    Ok((child.wait()?.success(), lines))
}

/// One count of the many that `cargo test` prints: one for each test program.
fn total(lines: &[String]) -> String {
    let [mut passed, mut failed, mut ignored] = [0_u64; 3];
    for results in lines.iter().filter_map(|line| line.strip_prefix("test result: ")) {
        for (number, word) in results.split(['.', ';']).filter_map(|result| result.trim().split_once(' ')) {
            let number = number.parse().unwrap_or(0);
            match word {
                "passed" => passed += number,
                "failed" => failed += number,
                "ignored" => ignored += number,
                _ => {}
            }
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    format!("test result: {verdict}. {passed} passed; {failed} failed; {ignored} ignored")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up() {
        let lines = [
            "running 12 tests",
            "test result: ok. 11 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 1.02s",
            "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.20s",
        ];
        let total = total(&lines.map(str::to_owned));
        assert_eq!(total, "test result: FAILED. 14 passed; 2 failed; 1 ignored");
    }
}
