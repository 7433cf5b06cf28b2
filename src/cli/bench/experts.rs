//! The expert MLP by itself, as decode runs it: calls in one program, other experts in each, so that no cache holds them.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use freetoken_backend::{
    Backend, ExpertMlp, ExpertMlpParams, Experts, Format, NoRoutePoints, Op, Stage, View, os, record,
};
use indicatif::BinaryBytes;

use super::{
    super::terminal::Progress,
    median,
    report::{Report, ReportArgs, read_bandwidth},
    subject::SubjectArgs,
    table::{Column, Table, column},
};
use crate::{
    devices::ReadProbe,
    formats::{quantised, write::TensorSpec},
    model_files::ModelFiles,
    models::{
        self, ConfigFile, Inventory, LoadedExperts, MoeSizes, Sizes, Synthetic, SyntheticCheckpoint, Weights,
    },
};

/// The shape that is measured unless a model is given.
const DEFAULT_SHAPE: &str = "qwen3-30b-a3b";
/// Experts take at least so much memory, unless it would take more of them than [`MAX_EXPERTS`].
const EXPERT_BYTES: usize = 1 << 30;
/// Most experts that are made.
const MAX_EXPERTS: usize = 1 << 16;
/// Experts and plain reads are timed in so many turns, whose medians count: a machine's memory slows down and recovers.
const TURNS: usize = 15;
/// The calls of a turn read at least so many bytes.
const TURN_BYTES: usize = 1 << 31;
/// And take at least about so many seconds: what a replay costs once is lost among them.
const TURN_SECONDS: f64 = 5e-3;

/// The experts of a layer alone, made up: 2048x768, top 8, unless a model is given.
#[derive(Debug, Args)]
pub(super) struct ExpertsArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Rows of the batches: up to 16 are decode, more are prefill.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,16",
        value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    rows: Vec<u32>,
    /// How many there are, to compare formats with as many rows an expert [default: a GiB of them].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    count: Option<u32>,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 8] = [
    column("rows", "rows", 1.0, 0),
    column("experts", "experts", 1.0, 0),
    column("seconds", "us", 1e6, 1),
    column("bytes", "MB", 1e-6, 2),
    column("bytes_per_second", "GB/s", 1e-9, 2),
    column("read_bytes_per_second", "read GB/s", 1e-9, 2),
    column("share_of_read", "% of read", 100.0, 1),
    column("flops_per_second", "TFLOP/s", 1e-12, 1),
];

/// Measures batches, each row with experts of its own as far as there are enough.
pub(super) fn run(args: &ExpertsArgs) -> Result<()> {
    let backend = &*args.subject.device.open()?;
    let read_bandwidth = read_bandwidth(backend)?;
    let probe = &ReadProbe::new(backend)?;
    let Sizes { hidden, moe, .. } = sizes(&args.subject)?;
    let MoeSizes { top_k, intermediate, .. } =
        moe.context("this model has no routed experts: give another one")?;
    let format = args.subject.shape.format.unwrap_or(Format::Bf16);
    for cols in [hidden, intermediate] {
        ensure!(format.takes_cols(cols), "{format} takes rows of whole groups, and {cols} columns are none");
    }
    let expert_bytes = record(format, hidden, intermediate).weight_bytes();
    let n_experts = args.count.map_or(EXPERT_BYTES.div_ceil(expert_bytes), |count| count as usize);
    let n_experts = n_experts.clamp(top_k, MAX_EXPERTS);
    let bytes = (n_experts * expert_bytes) as u64;
    let fits = os::available_memory().is_none_or(|free| bytes < free);
    ensure!(fits, "the experts take {}, more than the memory that is free", BinaryBytes(bytes));
    let experts = make(args, format, n_experts, hidden, intermediate, backend)?;
    let mut table = Table::new(&COLUMNS);
    for n_rows in args.rows.iter().map(|&n| n as usize) {
        let shape = ExpertMlpParams {
            n_rows: n_rows as u32,
            top_k: top_k as u32,
            hidden: hidden as u32,
            intermediate: intermediate as u32,
            n_experts: n_experts as u32,
            in_place: 0,
        };
        let n_distinct = (n_rows * top_k).min(n_experts);
        let bytes = (n_distinct * expert_bytes) as f64;
        let turns = measure(backend, &experts, shape, probe)?;
        let seconds = median(turns.iter().map(|turn| turn.seconds));
        table.push([
            n_rows.into(),
            n_distinct.into(),
            seconds.into(),
            bytes.into(),
            (bytes / seconds).into(),
            median(turns.iter().map(|turn| turn.read_bandwidth)).into(),
            median(turns.iter().map(|turn| bytes / turn.seconds / turn.read_bandwidth)).into(),
            (6.0 * (n_rows * top_k * hidden * intermediate) as f64 / seconds).into(),
        ]);
    }
    let subject = format!("experts of {hidden}x{intermediate} in {format}, top {top_k} of {n_experts}");
    Report { subject, caps: backend.caps(), read_bandwidth, expert_use: &[], table }.print(&args.report)
}

fn sizes(args: &SubjectArgs) -> Result<Sizes> {
    if let Some(shape) = args.shape.read()? {
        return Ok(shape.inventory()?.sizes);
    }
    let host = &*crate::devices::reference();
    if let Some(model) = &args.model {
        let files = ModelFiles::open(Some(model))?;
        return Ok(Inventory::of_checkpoint(&files.config(), files.checkpoint(), host)?.sizes);
    }
    let fields = models::published_config(DEFAULT_SHAPE).expect("a published shape");
    Ok(Inventory::new(&ConfigFile::new(DEFAULT_SHAPE, &fields), host)?.sizes)
}

/// One layer of experts on the device.
fn make(
    args: &ExpertsArgs,
    format: Format,
    n_experts: usize,
    hidden: usize,
    intermediate: usize,
    backend: &dyn Backend,
) -> Result<Experts> {
    let module = |expert: usize, what: &str| format!("model.layers.0.mlp.experts.{expert}.{what}");
    let name = |expert: usize, what: &str| format!("{}.weight", module(expert, what));
    let (up, down) = ([intermediate, hidden], [hidden, intermediate]);
    let matrices = |expert: usize| {
        let of = move |(what, shape)| quantised::tensors(format, &module(expert, what), shape);
        [("gate_proj", up), ("up_proj", up), ("down_proj", down)].into_iter().flat_map(of)
    };
    let tensors: Vec<TensorSpec> = (0..n_experts).flat_map(matrices).collect();
    let bytes = n_experts * record(format, hidden, intermediate).weight_bytes();
    let progress = Progress::bytes("making", bytes as u64);
    let synthetic = Synthetic::new(args.subject.shape.seed);
    let checkpoint = SyntheticCheckpoint::generate(&synthetic, &tensors, &mut |bytes| progress.add(bytes))?;
    progress.finish();
    let mut progress = |_| ();
    let mut weights = Weights::new(backend, &checkpoint, &mut progress);
    let layer = weights.experts(n_experts, hidden, intermediate, name)?;
    let LoadedExperts::Placed(mut layers) = weights.into_experts() else {
        unreachable!("loaded onto the device")
    };
    Ok(layers.swap_remove(layer))
}

/// What one turn measured.
struct Turn {
    /// Of a call, in the mean.
    seconds: f64,
    /// Bytes a second, just before and just after.
    read_bandwidth: f64,
}

/// Programs of calls with other experts each, between plain reads.
fn measure(
    backend: &dyn Backend,
    experts: &Experts,
    p: ExpertMlpParams,
    probe: &ReadProbe,
) -> Result<Vec<Turn>> {
    let (n_rows, top_k, hidden) = (p.n_rows as usize, p.top_k as usize, p.hidden as usize);
    let (n_routes, n_experts) = (n_rows * top_k, p.n_experts as usize);
    let turn_bytes = TURN_BYTES.max((probe.pass()? * TURN_SECONDS) as usize);
    let n_calls = turn_bytes.div_ceil(n_routes.min(n_experts) * experts.expert_bytes());
    let words = |n: usize| -> Result<View> { Ok(backend.alloc(n * 4)?.whole()) };
    let (x, weights, parts) = (words(n_rows * hidden)?, words(n_routes)?, words(n_routes * hidden)?);
    backend.write(&x, bytemuck::cast_slice(&vec![1.0_f32; n_rows * hidden]))?;
    backend.write(&weights, bytemuck::cast_slice(&vec![1.0 / top_k as f32; n_routes]))?;
    let call = |call: usize| -> Result<Op> {
        let routed: Vec<i32> =
            (call * n_routes..(call + 1) * n_routes).map(|route| (route % n_experts) as i32).collect();
        let ids = words(n_routes)?;
        backend.write(&ids, bytemuck::cast_slice(&routed))?;
        let (parts, x, weights, experts) = (parts.clone(), x.clone(), weights.clone(), experts.clone());
        Ok(Op::from(ExpertMlp { parts, x, ids, weights, experts, p }))
    };
    let calls = (0..n_calls).map(call).collect::<Result<Vec<_>>>()?;
    let mut program = backend.record(&[Stage::Ops(calls)], &[])?;
    program.replay(&mut NoRoutePoints)?;
    let mut before = probe.pass()?;
    let mut turns = Vec::new();
    for _ in 0..TURNS {
        let start = Instant::now();
        program.replay(&mut NoRoutePoints)?;
        let seconds = start.elapsed().as_secs_f64() / n_calls as f64;
        let after = probe.pass()?;
        turns.push(Turn { seconds, read_bandwidth: (before + after) / 2.0 });
        before = after;
    }
    Ok(turns)
}
