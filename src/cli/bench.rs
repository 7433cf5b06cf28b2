//! `freetoken bench`: how fast a model runs here, beside what the machine's memory would allow.

mod cache;
mod elastic;
mod experts;
mod load;
mod ops;
mod plot;
mod route_points;
mod serve;
mod steps;
mod subject;
mod table;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::{ArgGroup, Args, builder::ArgPredicate};
use freetoken_backend::{Caps, Format};
use serde_json::{Value, json};

use self::{cache::TraceSource, subject::Subject, table::Table};
use super::{
    memory::MemoryArgs,
    model::DeviceArgs,
    synth::{ExpertUse, N_TOKENS, ShapeArgs},
    terminal::print_line,
};
use crate::devices::ReadProbe;

/// How often memory is read to learn how fast it is.
const READ_PASSES: usize = 8;

/// Measure speed: prompts, decode steps, single ops, experts alone, route points, loading, a server under
/// load, or an expert cache by a trace.
///
/// Tokens are random and never those that the model draws, since random weights fall into cycles. A decode step must read
/// each weight once, of the experts those that its tokens choose, and the cache of its sequences; "% of read" is the rate at
/// which it does, as a share of the rate at which the device reads its own memory in order, measured in the same run. The
/// ms of a prompt are the time to its first token.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("what").args(["model", "like", "config"]),
    group = ArgGroup::new("behind a cache").args(["elastic", "cache_trace"]),
    after_help = "Examples:\n  freetoken bench --like qwen3-30b-a3b --layers 8 --prompt 512,2048 --depth 0,4096 --batch 1,4\n  \
                  freetoken bench --model DIR --ops\n  freetoken bench --expert-mlp --csv experts.csv\n  freetoken bench --route-points\n  \
                  freetoken bench --load DIR,DIR.ftw\n  freetoken bench --serve 60\n  \
                  freetoken bench --cache-trace zipf:1.0 --cache 10,25,50 --plot hits.svg"
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
    #[arg(long, conflicts_with_all = ["ops", "vram", "expert_cache"])]
    expert_mlp: bool,
    /// Measure loading instead: experts of each directory from the disk into host memory, beside the rate at which the disk is read.
    /// FTW directories by records; safetensors by reads, and from their mapping.
    #[arg(long, value_name = "DIR,...", value_delimiter = ',',
        conflicts_with_all = ["ops", "expert_mlp", "route_points", "elastic", "cache_trace", "what", "vram", "expert_cache"])]
    load: Vec<PathBuf>,
    /// Serve the model on loopback for so many seconds instead, to 64 clients that ask, listen and often leave: their times, and
    /// whether anything stays behind.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(2..=86_400),
        conflicts_with_all = ["ops", "expert_mlp", "load", "route_points", "elastic", "cache_trace", "like", "config"])]
    serve: Option<u32>,
    /// With --expert-mlp: how the experts are stored.
    #[arg(long, value_name = "bf16|fp8|nvfp4|mxfp4", default_value = "bf16", value_parser = format, requires = "expert_mlp")]
    format: Format,
    /// Measure route points alone instead: layers whose experts are all in slots, or fetched, read in place, or left to a
    /// host that answers zeros. Its experts are made up (2048x768, top 8).
    #[arg(long, conflicts_with_all = ["ops", "expert_mlp", "what", "vram", "expert_cache"])]
    route_points: bool,
    /// Measure experts behind a cache instead: every way of treating misses, beside the bound.
    #[arg(long, conflicts_with_all = ["ops", "expert_mlp", "route_points", "expert_cache"])]
    elastic: bool,
    /// Measure nothing and replay routes instead: hit rates of each policy beside the bound, and steps a second of each way of
    /// treating misses in virtual time. Routes from a file of `freetoken trace`, or drawn: uniform, zipf:S, or drift:S, where
    /// what is popular changes.
    #[arg(long, value_name = "FILE|LAW", conflicts_with_all = ["ops", "expert_mlp", "route_points", "elastic", "what", "vram", "expert_cache"])]
    cache_trace: Option<TraceSource>,
    /// With --elastic or --cache-trace: shares of the experts that have a slot, in per cent
    /// [default: 50,25, and for a trace 5,10,15,25,35,50,75,90].
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        hide_default_value = true,
        default_value = "50,25",
        default_value_if("cache_trace", ArgPredicate::IsPresent, "5,10,15,25,35,50,75,90"),
        value_parser = per_cent,
        requires = "behind a cache"
    )]
    cache: Vec<f64>,
    /// With --cache-trace: rates of the machine, as $FREETOKEN_HOME/probes keeps them [default: an H200 with 16 CPU cores]. What
    /// is not experts takes as long as on that H200.
    #[arg(long, value_name = "FILE", requires = "cache_trace")]
    rates: Option<PathBuf>,
    /// With --cache-trace: also draw the hit rates.
    #[arg(long, value_name = "FILE.svg", requires = "cache_trace")]
    plot: Option<PathBuf>,
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

/// A share in per cent.
fn per_cent(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=100.0).contains(share));
    share.ok_or_else(|| "a share is from 0 to 100".into())
}

/// A format that experts are made in.
fn format(text: &str) -> Result<Format, String> {
    let known = [Format::Bf16, Format::Fp8, Format::Nvfp4, Format::Mxfp4];
    let found = known.into_iter().find(|format| format.to_string() == text);
    found.ok_or_else(|| "experts are made in bf16, fp8, nvfp4 or mxfp4".into())
}

pub(super) fn run(args: BenchArgs) -> Result<()> {
    if let Some(source) = &args.cache_trace {
        return cache::run(&args, source);
    }
    if !args.load.is_empty() {
        return load::run(&args, &args.load);
    }
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
    if let Some(seconds) = args.serve {
        let backend = args.device.open()?;
        let read_bandwidth = ReadProbe::new(&*backend)?.best_of(READ_PASSES)?;
        let caps = backend.caps().clone();
        let (subject, table) = serve::run(&args, seconds, backend)?;
        return Report { subject, caps: &caps, read_bandwidth, expert_use: &[], table }.print(&args);
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

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The middle one, or the upper of the two. Asserts that there is one.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
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
            write(path, &self.table.csv())?;
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
