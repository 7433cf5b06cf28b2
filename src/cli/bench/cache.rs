//! An expert cache without a model: a trace, recorded or drawn, replayed over sizes of the cache. For each size the hit rates
//! of the policies beside the bound, and the steps a second of a machine in virtual time that treats misses in one way or
//! another. It opens no device.

use std::{
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde_json::json;

use super::{
    elastic::per_cent,
    plot::{Curve, Plot, Stroke},
    report::{ReportArgs, write},
    table::{Column, Table, column},
};
use crate::moe::{
    Choices, ExpertCost, Mode, Planner, PlannerOptions, Policy, Preference, Rates, Routing, Trace,
    simulate::{Machine, Outcome, best_hit_rate, hit_rate, replay},
};

const COLUMNS: [Column; 12] = [
    column("cache", "cache %", 100.0, 0),
    column("slots", "slots", 1.0, 0),
    column("lru", "LRU %", 100.0, 1),
    column("lfu_8", "LFU 8 %", 100.0, 1),
    column("lfu_32", "LFU 32 %", 100.0, 1),
    column("belady", "bound %", 100.0, 1),
    column("fetch_per_second", "all fetch /s", 1.0, 1),
    column("cpu_per_second", "all CPU /s", 1.0, 1),
    column("fixed_per_second", "fixed /s", 1.0, 1),
    column("q_star_per_second", "q* /s", 1.0, 1),
    column("q_star_hits", "q* hits %", 100.0, 1),
    column("q_star_ratio", "q* / best other", 1.0, 2),
];

/// The policies in the order of the columns; the last is the engine's.
const POLICIES: [Policy; 3] = [Policy::Lru, Policy::Lfu { half_life: 8.0 }, Policy::DEFAULT];
/// Names and strokes of the policies and the bound; the colours are told apart by every eye (Okabe and Ito).
const CURVES: [(&str, Stroke); 4] = [
    ("LRU", Stroke { colour: "#0072b2", dashed: false }),
    ("LFU, half-life 8", Stroke { colour: "#e69f00", dashed: false }),
    ("LFU, half-life 32", Stroke { colour: "#009e73", dashed: false }),
    ("bound (Belady)", Stroke { colour: "#4a4f5a", dashed: true }),
];

/// Sizes and steps of a trace that is drawn: a Qwen3-30B-A3B of 24 layers.
const N_LAYERS: usize = 24;
const N_EXPERTS: usize = 128;
const TOP_K: usize = 8;
const N_STEPS: usize = 2000;
/// Pairs of a layer that swap their ranks after each step of a drifting trace.
const SWAPS: usize = 1;
/// Of a trace, one step in so many only fills the cache.
const WARM_UP: usize = 4;

/// An expert of a Qwen3-30B-A3B in BF16, 2048x768.
const EXPERT: ExpertCost =
    ExpertCost { record_bytes: 3 * 2048 * 768 * 2, flops_per_row: (6 * 2048 * 768) as f64 };

/// A machine with an H200 on PCIe 5.0 x16 and 16 cores with AVX-512: large pinned copies alone, the CPU's experts alone, both
/// at once, the card's own memory, and a doorbell in a graph. The CPU's operations never decide while an expert has few rows,
/// and what nobody measured takes no time.
const RATES: Rates = Rates {
    link_alone: 54.3e9,
    link_shared: 49.1e9,
    host_alone: 100.9e9,
    host_shared: 77.6e9,
    device_read: 4.3e12,
    host_flops: 1e12,
    reply_seconds: 3.5e-6,
    wake_seconds: 0.0,
    combine_seconds: 0.0,
    fetch_seconds: 0.0,
    copy_lane: false,
};
/// A step of 24 such layers with all experts on that card; with other rates too, what is not experts takes as long as there.
/// Measured in `benches/results/h200-cuda-q30-steps.csv`.
const RESIDENT_STEP_SECONDS: f64 = 1.587e-3;

/// Bytes a second in place of a CPU's where a probe had none beside the device.
const NO_HOST: f64 = 1.0;

/// An expert cache in virtual time: hit rates of each policy beside the bound, and steps a second of each way of treating
/// misses, over sizes. It measures nothing.
#[derive(Debug, Args)]
pub(super) struct CacheArgs {
    /// Routes from a file of `freetoken trace`, or drawn: uniform, zipf:S, or drift:S, where what is popular changes.
    #[arg(value_name = "FILE|LAW")]
    routes: TraceSource,
    /// Shares of the experts that have a slot, in per cent.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "5,10,15,25,35,50,75,90", value_parser = per_cent)]
    cache: Vec<f64>,
    /// Rates of the machine, as $FREETOKEN_HOME/probes keeps them [default: an H200 with 16 CPU cores]. What is not experts
    /// takes as long as on that H200.
    #[arg(long, value_name = "FILE")]
    rates: Option<PathBuf>,
    /// Also draw the hit rates.
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// What drawn routes depend on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    report: ReportArgs,
}

/// Where routes come from.
#[derive(Debug, Clone)]
pub(super) enum TraceSource {
    /// Experts are drawn.
    Drawn(Preference),
    /// A file that `freetoken trace` wrote.
    File(PathBuf),
}

impl FromStr for TraceSource {
    type Err = String;

    /// What is no law is a file.
    fn from_str(text: &str) -> Result<Self, String> {
        let law = text.split_once(':').filter(|(law, _)| ["zipf", "drift"].contains(law));
        let Some((law, exponent)) = law else {
            return Ok(match text {
                "uniform" => TraceSource::Drawn(Preference::Uniform),
                file => TraceSource::File(file.into()),
            });
        };
        let exponent = exponent.parse().ok().filter(|s| (0.0..=4.0).contains(s)).ok_or_else(|| {
            format!("S is from 0 to 4, as in {law}:1.0; in front of a file of this name put ./")
        })?;
        Ok(TraceSource::Drawn(match law {
            "zipf" => Preference::Zipf { exponent },
            _ => Preference::Drifting { exponent, swaps: SWAPS },
        }))
    }
}

impl TraceSource {
    /// Reads the file, or draws the steps. Gives the name too.
    fn trace(&self, seed: u64) -> Result<(String, Trace)> {
        let preference = match self {
            TraceSource::Drawn(preference) => *preference,
            TraceSource::File(path) => {
                let trace = Trace::read(path)?;
                let name = path.display().to_string();
                ensure!(trace.n_steps() > 0, "{name} has no steps: record it again");
                return Ok((format!("{} ({name})", trace.routing().model), trace));
            }
        };
        let name = match preference {
            Preference::Uniform => "uniform routing".into(),
            Preference::Zipf { exponent } => format!("Zipf routing, exponent {exponent:?}"),
            Preference::Drifting { exponent, .. } => format!("drifting Zipf routing, exponent {exponent:?}"),
        };
        let routing = Routing { model: name.clone(), n_layers: N_LAYERS, n_experts: N_EXPERTS, top_k: TOP_K };
        Ok((name, Trace::synthetic(routing, N_STEPS, 1, preference, seed)))
    }
}

/// Replays the trace over every share and prints, writes and draws what came of it.
pub(super) fn run(args: &CacheArgs) -> Result<()> {
    let rates = args.rates.as_deref().map_or(Ok(RATES), read_rates)?;
    let (name, trace) = args.routes.trace(args.seed)?;
    let replayed = Replayed::new(&trace, rates, &args.cache)?;
    let Routing { n_layers, n_experts, top_k, .. } = *trace.routing();
    let steps = format!(
        "{} steps of {n_layers} layers, {n_experts} experts, top {top_k}; the first {} only fill the cache",
        trace.n_steps(),
        replayed.n_warm_up
    );
    if let Some(path) = &args.plot {
        let curve = |((name, stroke), points)| Curve { name, stroke, points };
        let plot = Plot {
            title: &format!("Expert cache: {name}"),
            subtitle: &steps,
            across: "experts that have a slot",
            up: "hits",
            curves: CURVES.into_iter().zip(replayed.curves.clone()).map(curve).collect(),
        };
        write(path, &plot.svg())?;
    }
    let text = || {
        format!(
            "{name}\n{steps}\nsteps a second in virtual time: link {:.1} GB/s ({:.1} while the CPU computes), CPU {:.1} GB/s \
             ({:.1} while the link is busy); fixed: {:.0}% of the misses over the link\n\n{}",
            rates.link_alone / 1e9,
            rates.link_shared / 1e9,
            rates.host_alone / 1e9,
            rates.host_shared / 1e9,
            100.0 * replayed.fixed_share,
            replayed.table.text()
        )
    };
    let json = || {
        json!({
            "trace": name, "layers": n_layers, "experts": n_experts, "experts_per_token": top_k,
            "steps": trace.n_steps(), "warm_up_steps": replayed.n_warm_up, "rates": rates,
            "fixed_link_share": replayed.fixed_share, "rows": replayed.table.json(),
        })
    };
    args.report.print(&replayed.table, text, json)
}

/// Rates as the probe of an engine keeps them.
fn read_rates(path: &Path) -> Result<Rates> {
    let name = path.display();
    let bytes = fs::read(path).with_context(|| format!("cannot read {name}"))?;
    let rates: Rates = serde_json::from_slice(&bytes)
        .with_context(|| format!("{name} does not hold rates: give a file of $FREETOKEN_HOME/probes"))?;
    ensure!(
        rates.is_valid(),
        "{name} has a rate that is not above zero or a latency below it: delete it, and the next start measures again"
    );
    ensure!(
        rates.host_alone > NO_HOST,
        "{name} was measured without the CPU's experts, and so there is nothing to split: give the file of a GPU's run"
    );
    Ok(rates)
}

/// What came of a trace.
struct Replayed {
    table: Table,
    /// Of each policy and the bound: (share of the experts that have a slot, share of hits).
    curves: [Vec<(f64, f64)>; 4],
    n_warm_up: usize,
    /// Share of the misses that the fixed split sends over the link: that of the link in the rates of both.
    fixed_share: f64,
}

impl Replayed {
    /// Replays the trace for each per cent of the experts.
    fn new(trace: &Trace, rates: Rates, per_cent: &[f64]) -> Result<Self> {
        let Routing { n_layers, n_experts, .. } = *trace.routing();
        let fixed_share = rates.link_shared / (rates.link_shared + rates.host_shared);
        let n_warm_up = trace.n_steps() / WARM_UP;
        let mut replayed =
            Replayed { table: Table::new(&COLUMNS), curves: Default::default(), n_warm_up, fixed_share };
        let mut per_cent = per_cent.to_vec();
        per_cent.sort_by(f64::total_cmp);
        for share in per_cent.into_iter().map(|per_cent| per_cent / 100.0) {
            let n_slots = (share * (n_layers * n_experts) as f64).round() as usize;
            let [lru, lfu_8, lfu_32] = POLICIES.map(|policy| hit_rate(trace, n_slots, policy, n_warm_up));
            let best = best_hit_rate(trace, n_slots, n_warm_up);
            for (curve, hits) in replayed.curves.iter_mut().zip([lru, lfu_8, lfu_32, best]) {
                curve.push((share, hits));
            }
            let outcome = |mode| outcome(trace, rates, mode, n_slots, n_warm_up);
            let [fetch, cpu, fixed] = [Mode::Gpu, Mode::Cpu, Mode::Share(fixed_share)].map(outcome);
            let others = [fetch?, cpu?, fixed?].map(|outcome| outcome.steps_per_second());
            let ([fetch, cpu, fixed], q_star) = (others, outcome(Mode::Hybrid)?);
            replayed.table.push([
                share.into(),
                n_slots.into(),
                lru.into(),
                lfu_8.into(),
                lfu_32.into(),
                best.into(),
                fetch.into(),
                cpu.into(),
                fixed.into(),
                q_star.steps_per_second().into(),
                q_star.hit_rate().into(),
                (q_star.steps_per_second() / fetch.max(cpu).max(fixed)).into(),
            ]);
        }
        Ok(replayed)
    }
}

/// What a machine with these rates takes, in virtual time. The cache begins as that of an engine does: with the first experts of
/// each layer, which stay there if all misses go to the CPU.
fn outcome(trace: &Trace, rates: Rates, mode: Mode, n_slots: usize, n_warm_up: usize) -> Result<Outcome> {
    let &Routing { n_layers, n_experts, .. } = trace.routing();
    let mut planner = Planner::new(PlannerOptions {
        n_layers,
        n_experts,
        n_slots,
        policy: Policy::DEFAULT,
        expert: EXPERT,
        rates,
        mode,
        choices: Choices { fetch: n_slots > 0, read_in_place: true, host: true },
        deterministic: true,
    })?;
    let cache = planner.cache_mut();
    let first =
        (0..n_experts as u32).flat_map(|expert| (0..n_layers as u32).map(move |layer| (layer, expert)));
    let mut changes = Vec::new();
    for (layer, expert) in first.take(n_slots) {
        cache.admit(layer, expert, &mut changes).expect("there is a slot for each of them");
    }
    cache.release();
    let experts_seconds = RATES.hits_seconds(EXPERT, TOP_K as f64);
    let dense_seconds = RESIDENT_STEP_SECONDS / N_LAYERS as f64 - experts_seconds;
    let machine = Machine { rates, dense_seconds, step_seconds: 0.0 };
    Ok(replay(&machine, &mut planner, trace, n_warm_up)?)
}
