//! Experts behind a cache: for each share of the experts that has a slot, every way of treating the others, in turns, beside
//! the bound of the machine and the model that the policy goes by.
//!
//! Bound of a decode step: the bytes of the misses at the rate of link and CPU together, plus the step of the same backend
//! with all experts on the device. Bound of a prompt: the longer of the streamed bytes at the link's rate and the same
//! prompt with all experts on the device.

use anyhow::{Context, Result, ensure};
use clap::Args;

use super::{
    super::memory::MemoryArgs,
    median,
    report::{Report, ReportArgs, read_bandwidth},
    steps::{decode_seconds, prefill_runs},
    subject::{DecodeArgs, PromptArgs, Source, Subject, SubjectArgs},
    table::{Cell, Column, Table, column},
};
use crate::{
    engine::{Division, EngineOptions, Sequence},
    moe::{CacheSize, Counters, Mode},
};

/// Experts behind a cache: every way of treating misses, beside the bound.
#[derive(Debug, Args)]
pub(super) struct ElasticArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Shares of the experts that have a slot, in per cent.
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_value = "50,25", value_parser = per_cent)]
    cache: Vec<f64>,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 18] = [
    column("stage", "stage", 1.0, 0),
    column("cache", "cache %", 100.0, 0),
    column("prompt", "prompt", 1.0, 0),
    column("batch", "batch", 1.0, 0),
    column("experts", "experts", 1.0, 0),
    column("seconds", "ms", 1e3, 2),
    column("tokens_per_second", "tok/s", 1.0, 1),
    column("bound_seconds", "bound ms", 1e3, 2),
    column("share_of_bound", "% of bound", 100.0, 1),
    column("model_seconds", "model ms", 1e3, 2),
    column("misses", "misses %", 100.0, 1),
    column("missed_bytes", "missed MB", 1e-6, 0),
    column("fetched", "fetched", 1.0, 1),
    column("in_place", "in place", 1.0, 1),
    column("host", "on CPU", 1.0, 1),
    column("link_bytes_per_second", "link GB/s", 1e-9, 1),
    column("host_bytes_per_second", "CPU GB/s", 1e-9, 1),
    column("resident_seconds", "resident ms", 1e3, 2),
];

/// Turns of each mode; the median counts.
const ROUNDS: usize = 5;

/// Ways of treating misses, by name: `--experts`, and a fixed split to compare with.
const MODES: [(&str, Mode); 5] = [
    ("auto", Mode::Auto),
    ("hybrid", Mode::Hybrid),
    ("gpu", Mode::Gpu),
    ("cpu", Mode::Cpu),
    ("half", Mode::Share(0.5)),
];

/// What all experts on the device take: seconds for each prompt and each batch.
struct Resident {
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Measures everything that is asked for.
pub(super) fn run(args: &ElasticArgs) -> Result<()> {
    ensure!(
        args.memory.expert_cache.is_none(),
        "--expert-cache and --cache both say how many experts have a slot: give --cache"
    );
    let backend = args.subject.device.open()?;
    let read_bandwidth = read_bandwidth(&*backend)?;
    let depth = args.decode.deepest();
    let deepest = depth + ROUNDS * MODES.len() * 2 * args.decode.decode as usize;
    let source = Source::open(&args.subject)?;
    let base = args.decode.options(deepest.max(args.prompt.longest()));
    let resident = {
        let mut subject = source.subject(&args.subject, backend.clone(), &base)?;
        ensure!(
            subject.engine.model().sizes().moe.is_some_and(|moe| moe.n_layers > 0),
            "{} has no routed experts: give another model",
            subject.name
        );
        ensure!(
            subject.engine.elastic().is_none(),
            "{} does not fit on the device, and the bound needs a step with all experts there: try fewer --layers",
            subject.name
        );
        resident(&mut subject, args, depth)?
    };
    let mut shares = args.cache.clone();
    shares.sort_by(|a, b| b.total_cmp(a));
    let largest = *shares.first().context("--cache names no share")?;
    let behind = args.memory.options(base, &*backend, &args.subject.device)?;
    let behind = EngineOptions { expert_cache: Some(CacheSize::Percent(largest)), ..behind };
    let mut subject = source.subject(&args.subject, backend.clone(), &behind)?;
    drop(source);
    args.memory.say(&subject.engine);
    let mut table = Table::new(&COLUMNS);
    for share in shares {
        let n_experts = elastic(&subject).n_experts();
        let expert_slots = Some((n_experts as f64 * share / 100.0).round() as usize);
        subject.engine.divide(Division { expert_slots, ..Division::default() }, &mut [])?;
        subject.engine.set_experts_mode(Mode::Auto)?;
        for (&prompt, &resident) in args.prompt.prompt.iter().zip(&resident.prefill) {
            prefill(&mut subject, share / 100.0, prompt as usize, resident, &mut table)?;
        }
        for (&batch, &resident) in args.decode.batch.iter().zip(&resident.decode) {
            let cell = DecodeCell { share: share / 100.0, batch: batch as usize, depth, resident };
            decode(&mut subject, args.decode.decode as usize, &cell, &mut table)?;
        }
    }
    let name = format!("{}, experts behind a cache", subject.name);
    Report { subject: name, caps: backend.caps(), read_bandwidth, expert_use: &[], table }.print(&args.report)
}

/// A share in per cent.
pub(super) fn per_cent(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=100.0).contains(share));
    share.ok_or_else(|| "a share is from 0 to 100".into())
}

fn elastic(subject: &Subject) -> &crate::moe::Elastic {
    subject.engine.elastic().expect("loaded behind a cache")
}

fn sequences(subject: &mut Subject, batch: usize, depth: usize) -> Result<Vec<Sequence>> {
    let mut sequences: Vec<Sequence> = (0..batch).map(|_| subject.sequence()).collect();
    sequences.iter_mut().try_for_each(|sequence| subject.bring_to(depth, sequence))?;
    Ok(sequences)
}

fn resident(subject: &mut Subject, args: &ElasticArgs, depth: usize) -> Result<Resident> {
    let prefill = args.prompt.prompt.iter().map(|&prompt| Ok(prefill_runs(subject, prompt as usize)?.0));
    let prefill = prefill.collect::<Result<_>>()?;
    let mut decode = Vec::new();
    for &batch in &args.decode.batch {
        let mut sequences = sequences(subject, batch as usize, depth)?;
        let turns = (0..ROUNDS).map(|_| decode_seconds(subject, &mut sequences, args.decode.decode as usize));
        decode.push(median(turns.collect::<Result<Vec<_>>>()?));
        sequences.iter_mut().for_each(|sequence| subject.engine.release(sequence));
    }
    Ok(Resident { prefill, decode })
}

fn prefill(subject: &mut Subject, share: f64, prompt: usize, resident: f64, table: &mut Table) -> Result<()> {
    let before = elastic(subject).counters().prefill;
    let (seconds, n_runs) = prefill_runs(subject, prompt)?;
    let sums = elastic(subject).counters().prefill.since(&before);
    let record = elastic(subject).record_bytes() as f64;
    let streamed = (sums.n_fetched + sums.n_wasted) as f64 / n_runs as f64;
    let (rates, _) = elastic(subject).rates();
    let bound = (streamed * record / rates.link_alone).max(resident);
    let n_used = (sums.n_fetched + sums.n_hits).max(1) as f64;
    table.push([
        "prefill".into(),
        share.into(),
        prompt.into(),
        1.0.into(),
        "auto".into(),
        seconds.into(),
        (prompt as f64 / seconds).into(),
        bound.into(),
        (bound / seconds).into(),
        Cell::Empty,
        (sums.n_fetched as f64 / n_used).into(),
        (streamed * record).into(),
        streamed.into(),
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
        Cell::Empty,
        resident.into(),
    ]);
    Ok(())
}

struct DecodeCell {
    share: f64,
    batch: usize,
    depth: usize,
    resident: f64,
}

/// What one mode did in its turns.
#[derive(Default)]
struct Turns {
    seconds: Vec<f64>,
    sums: Counters,
    /// Bytes that the device timed on its link, and their seconds.
    link: (f64, f64),
    /// Seconds in which the host computed.
    host_seconds: f64,
}

fn decode(subject: &mut Subject, n_steps: usize, cell: &DecodeCell, table: &mut Table) -> Result<()> {
    let mut sequences = sequences(subject, cell.batch, cell.depth)?;
    let mut turns: Vec<Option<Turns>> = MODES.iter().map(|_| Some(Turns::default())).collect();
    for _ in 0..ROUNDS {
        for ((_, mode), turns) in MODES.iter().zip(&mut turns) {
            // A mode that this device or this cache cannot honour has no row.
            let Some(measured) = turns else { continue };
            if subject.engine.set_experts_mode(*mode).is_err() {
                *turns = None;
                continue;
            }
            (0..n_steps).try_for_each(|_| subject.decode(&mut sequences))?;
            let before = elastic(subject).counters();
            measured.seconds.push(decode_seconds(subject, &mut sequences, n_steps)?);
            let after = elastic(subject).counters();
            measured.sums = measured.sums.plus(&after.decode.since(&before.decode));
            measured.link.0 += (after.link_bytes - before.link_bytes) as f64;
            measured.link.1 += after.link_seconds - before.link_seconds;
            measured.host_seconds += after.host_seconds - before.host_seconds;
        }
    }
    sequences.iter_mut().for_each(|sequence| subject.engine.release(sequence));
    let (rates, record) = (*elastic(subject).rates().0, elastic(subject).record_bytes() as f64);
    for ((name, _), turns) in MODES.iter().zip(turns) {
        let Some(Turns { seconds, sums, link, host_seconds }) = turns else { continue };
        let rate = |bytes: f64, seconds: f64| match seconds > 0.0 {
            true => Cell::Number(bytes / seconds),
            false => Cell::Empty,
        };
        let per_step = |n: u64| n as f64 / (ROUNDS * n_steps) as f64;
        let missed = per_step(sums.misses());
        let seconds = median(seconds);
        let bound = missed * record / (rates.link_shared + rates.host_shared) + cell.resident;
        let model = cell.resident + sums.exposed_seconds / (ROUNDS * n_steps) as f64;
        table.push([
            "decode".into(),
            cell.share.into(),
            cell.depth.into(),
            cell.batch.into(),
            (*name).into(),
            seconds.into(),
            (cell.batch as f64 / seconds).into(),
            bound.into(),
            (bound / seconds).into(),
            model.into(),
            (missed / (missed + per_step(sums.hits)).max(1.0)).into(),
            (missed * record).into(),
            per_step(sums.fetched).into(),
            per_step(sums.in_place).into(),
            per_step(sums.host).into(),
            rate(link.0, link.1),
            rate(sums.host as f64 * record, host_seconds),
            cell.resident.into(),
        ]);
    }
    Ok(())
}
