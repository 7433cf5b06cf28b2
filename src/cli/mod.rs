//! The command line: a file a command. Raw arguments become checked values before a model is touched. Answers go to standard
//! output, everything else to standard error.

mod bench;
mod convert;
mod devices;
mod eval;
mod inspect;
mod memory;
mod model;
mod plan;
mod pull;
mod run;
mod selftest;
mod serve;
mod synth;
mod terminal;
mod trace;

use std::sync::LazyLock;

use anyhow::Result;
use clap::{Parser, Subcommand};
pub use terminal::note;

use crate::devices::BUILT_IN;

/// The version, and the backends built in.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} (backends: {})", env!("CARGO_PKG_VERSION"), BUILT_IN.join(", ")));

/// Runs Mixture-of-Experts language models far larger than the GPU's memory on one personal machine.
#[derive(Debug, Parser)]
#[command(name = "freetoken", version = VERSION.as_str(), max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::RunArgs),
    Serve(serve::ServeArgs),
    Pull(pull::PullArgs),
    Eval(eval::EvalArgs),
    Inspect(inspect::InspectArgs),
    Convert(convert::ConvertArgs),
    Devices(devices::DevicesArgs),
    Synth(synth::SynthArgs),
    Bench(bench::BenchArgs),
    Trace(trace::TraceArgs),
    Selftest(selftest::SelftestArgs),
}

impl Cli {
    /// Runs the command.
    ///
    /// # Errors
    /// What went wrong, for [`sentence`]. A reader of the output that left is no error.
    pub fn run(self) -> Result<()> {
        match self.command() {
            Err(error) if terminal::reader_left(&error) => Ok(()),
            done => done,
        }
    }

    fn command(self) -> Result<()> {
        match self.command {
            Command::Run(args) => run::run(args),
            Command::Serve(args) => serve::run(args),
            Command::Pull(args) => pull::run(args),
            Command::Eval(args) => eval::run(args),
            Command::Inspect(args) => inspect::run(args),
            Command::Convert(args) => convert::run(args),
            Command::Devices(args) => devices::run(args),
            Command::Synth(args) => synth::run(args),
            Command::Bench(args) => bench::run(args),
            Command::Trace(args) => trace::run(args),
            Command::Selftest(args) => selftest::run(args),
        }
    }
}

/// An error and its causes as one sentence, each said once.
pub fn sentence(error: &anyhow::Error) -> String {
    let mut sentence = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !sentence.contains(&cause) {
            let colon = if sentence.is_empty() { "" } else { ": " };
            sentence = format!("{sentence}{colon}{cause}");
        }
    }
    sentence
}
