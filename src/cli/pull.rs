//! `freetoken pull`: brings a model from the Hugging Face hub. Standard output carries its folder alone.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;

use super::terminal::{Progress, note, print_line};
use crate::hub::{self, Hub, ModelName, Pull};

/// Download a model from the Hugging Face hub.
///
/// What was stopped goes on where it stopped. A gated model needs a token in HF_TOKEN; HF_ENDPOINT names another hub.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken pull Qwen/Qwen3-30B-A3B\n  freetoken pull gpt-oss-20b --revision main"
)]
pub(super) struct PullArgs {
    /// The model: ORG/NAME, or the name alone of a well-known one.
    #[arg(value_name = "ORG/NAME")]
    name: ModelName,
    /// A branch, a tag or a commit [default: the newest state].
    #[arg(long, value_name = "NAME")]
    revision: Option<String>,
}

pub(super) fn run(args: PullArgs) -> Result<()> {
    let name = match &args.revision {
        Some(revision) => args.name.at(revision)?,
        None => args.name,
    };
    let dir = match hub::find(name.to_string().as_ref()) {
        Some(dir) => {
            note(&format!("{name} is here already"));
            dir
        }
        None => pull(&name)?,
    };
    print_line(&dir.display().to_string())
}

/// Says what will come, and brings it.
pub(super) fn pull(name: &ModelName) -> Result<PathBuf> {
    let hub = Hub::from_env();
    let plan = Pull::plan(&hub, name)?;
    note(&plan.summary());
    plan.check_fits()?;
    let bar = Progress::bytes("pulling", plan.total_bytes());
    let dir = plan.run(&mut |bytes| bar.set(bytes));
    bar.finish();
    Ok(dir?)
}
