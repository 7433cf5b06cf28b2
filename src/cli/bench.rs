//! `freetoken bench`: how fast a model runs here, beside what the machine's memory would allow.

mod elastic;
mod experts;
mod ops;
mod route_points;
mod steps;
mod subject;
mod table;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{ArgGroup, Args};
use freetoken_backend::Caps;
use serde_json::{Value, json};

use self::{subject::Subject, table::Table};
use super::{
    memory::MemoryArgs,
    model::DeviceArgs,
    synth::{ExpertUse, N_TOKENS, ShapeArgs},
    terminal::print_line,
};
use crate::devices::ReadProbe;

/// How often memory is read to learn how fast it is.
const READ_PASSES: usize = 8;

/// Measure speed: prompts, decode steps, single ops, experts alone, or route points.
///
/// Tokens are random and never those that the model draws, since random weights fall into cycles. A decode step must read
/// each weight once, of the experts those that its tokens choose, and the cache of its sequences; "% of read" is the rate at
/// which it does, as a share of the rate at which the device reads its own memory in order, measured in the same run. The
/// ms of a prompt are the time to its first token.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").args(["model", "like", "config"]),
    after_help = "Examples:\n  freetoken bench --like qwen3-30b-a3b --layers 8 --prompt 512,2048 --depth 0,4096 --batch 1,4\n  \
                  freetoken bench --model DIR --ops\n  freetoken bench --expert-mlp --csv experts.csv\n  freetoken bench --route-points"
)]
pub(super) struct BenchArgs {
    /// A directory with config.json and *.safetensors, or the name of one under $FREETOKEN_HOME/models
    /// [default: the demo model].
    #[arg(long, short, value_name = "DIR")]
    model: Option<PathBuf>,
    #[command(flatten)]
    shape: ShapeArgs,
    /// Tokens of prompts.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512",
        value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prompt: Vec<u32>,
    /// Tokens that are in the cache before decoding.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0",
        value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    depth: Vec<u32>,
    /// Decode steps that are timed.
    #[arg(long, value_name = "N", default_value = "64", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    decode: u32,
    /// Sequences that decode together.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=16))]
    batch: Vec<u32>,
    /// Measure each op of a decode step by itself instead.
    #[arg(long)]
    ops: bool,
    /// Measure the experts of a layer alone instead, on experts that are made up (2048x768, top 8, unless a model is given).
    #[arg(long, conflicts_with = "ops")]
    expert_mlp: bool,
    /// Measure route points alone instead: layers whose experts are all in slots, or fetched, read in place, or left to a
    /// host that answers zeros. Its experts are made up (2048x768, top 8).
    #[arg(long, conflicts_with_all = ["ops", "expert_mlp", "what"])]
    route_points: bool,
    /// Measure experts behind a cache instead: every way of treating misses, beside the bound.
    #[arg(long, conflicts_with_all = ["ops", "expert_mlp", "route_points"])]
    elastic: bool,
    /// With --elastic: shares of the experts that have a slot, in per cent.
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        default_value = "50,25",
        requires = "elastic"
    )]
    cache: Vec<f64>,
    /// Also write the table as CSV, in seconds and bytes.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
}

pub(super) fn run(args: BenchArgs) -> Result<()> {
    if args.expert_mlp || args.route_points {
        let backend = args.device.open()?;
        let probe = ReadProbe::new(&*backend)?;
        let read_bandwidth = probe.best_of(READ_PASSES)?;
        let (subject, table) = match args.route_points {
            true => route_points::run(&*backend)?,
            false => experts::run(&args, &*backend, &probe)?,
        };
        return Report { subject, caps: backend.caps(), read_bandwidth, expert_use: &[], table }.print(&args);
    }
    if args.elastic {
        let backend = args.device.open()?;
        let read_bandwidth = ReadProbe::new(&*backend)?.best_of(READ_PASSES)?;
        let (subject, table) = elastic::run(&args, &backend)?;
        return Report { subject, caps: backend.caps(), read_bandwidth, expert_use: &[], table }.print(&args);
    }
    let mut subject = Subject::open(&args)?;
    let read_bandwidth = ReadProbe::new(subject.engine.backend())?.best_of(READ_PASSES)?;
    let table = match args.ops {
        true => ops::run(&mut subject, &args, read_bandwidth)?,
        false => steps::run(&mut subject, &args, read_bandwidth)?,
    };
    let n_experts = subject.engine.model().sizes().moe.map_or(0, |moe| moe.n_experts);
    let expert_use: Vec<ExpertUse> =
        subject.routes.iter().map(|ids| ExpertUse::new(ids, n_experts)).collect();
    let caps = subject.engine.backend().caps();
    Report { subject: subject.name.clone(), caps, read_bandwidth, expert_use: &expert_use, table }
        .print(&args)
}

/// What was measured, and beside what it must be read.
struct Report<'a> {
    subject: String,
    caps: &'a Caps,
    /// Bytes a second.
    read_bandwidth: f64,
    /// Of each layer, for random tokens.
    expert_use: &'a [ExpertUse],
    table: Table,
}

impl Report<'_> {
    fn print(&self, args: &BenchArgs) -> Result<()> {
        if let Some(path) = &args.csv {
            fs::write(path, self.table.csv()).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if args.json { print_line(&self.json().to_string()) } else { print_line(&self.text()) }
    }

    fn json(&self) -> Value {
        let layer = |u: &ExpertUse| json!({ "experts_in_use": u.n_in_use, "top_quarter": u.top_quarter, "entropy_bits": u.entropy });
        json!({
            "model": self.subject,
            "backend": self.caps.backend,
            "device": self.caps.device,
            "detail": self.caps.detail,
            "precision": self.caps.precision.to_string(),
            "read_bytes_per_second": self.read_bandwidth,
            "expert_use": self.expert_use.iter().map(layer).collect::<Vec<_>>(),
            "rows": self.table.json(),
        })
    }

    fn text(&self) -> String {
        let Caps { backend, device, detail, precision, .. } = self.caps;
        let mut text = format!(
            "{}\n{backend}: {device}, {detail}, precision {precision}\nmemory is read at {:.1} GB/s\n",
            self.subject,
            self.read_bandwidth / 1e9
        );
        if !self.expert_use.is_empty() {
            let mean = |of: fn(&ExpertUse) -> f64| {
                self.expert_use.iter().map(of).sum::<f64>() / self.expert_use.len() as f64
            };
            text += &format!(
                "{N_TOKENS} random tokens use {:.1} experts of a layer, the top quarter takes {:.1}% of the routes, \
                 entropy {:.2} bits\n",
                mean(|u| u.n_in_use as f64),
                100.0 * mean(|u| u.top_quarter),
                mean(|u| u.entropy)
            );
        }
        text + "\n" + &self.table.text()
    }
}
