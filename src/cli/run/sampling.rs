//! How tokens are drawn, as the command line says it: a flag a parameter, above what the checkpoint says.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow};
use clap::Args;

use crate::engine::sampling::{ParamOutOfRange, SamplingParams};

/// Where a flag is not given, the checkpoint's generation_config.json decides.
#[derive(Debug, Args)]
pub(super) struct SamplingArgs {
    /// Divides the logits; 0 takes the best token.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    temperature: Option<f32>,
    /// Draws from the best N tokens; 0 is off.
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    top_k: Option<u32>,
    /// Draws from the best tokens that together have this probability; 1 is off.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Draws from tokens at least this many times as likely as the best; 0 is off.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Makes every token of prompt and answer less likely; 1 is off.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,
    /// Subtracted from the logit of every token in the answer; 0 is off.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,
    /// Subtracted once for each time a token is in the answer; 0 is off.
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,
    /// Repeats the draws of an earlier run [default: from the clock].
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// The flags above a checkpoint's defaults. Without `--seed`, each call has another seed.
    pub(super) fn params(&self, defaults: SamplingParams) -> Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: self.top_k.unwrap_or(defaults.top_k),
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: self.repeat_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(defaults.frequency_penalty),
            seed: self.seed.unwrap_or_else(clock_seed),
        };
        params.validated().map_err(|ParamOutOfRange { field, value, range }| {
            let flag =
                if field == "repetition_penalty" { "repeat-penalty".into() } else { field.replace('_', "-") };
            anyhow!("--{flag} is {value}, but must be {range}")
        })
    }
}

/// A seed short enough to type again.
fn clock_seed() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as u64 % 1_000_000_000)
}
