//! Whole steps: time to the first token of a prompt, and decode steps at a depth for a number of sequences.

use std::{collections::HashMap, time::Instant};

use anyhow::Result;
use clap::Args;

use super::{
    super::memory::MemoryArgs,
    median,
    report::ReportArgs,
    subject::{DecodeArgs, PromptArgs, Subject, SubjectArgs, WARM_UP},
    table::{Cell, Column, Table, column},
};
use crate::engine::Sequence;

/// Prompts and decode steps, whole.
///
/// Tokens are random and never those that the model draws, since random weights fall into cycles. A decode step must read
/// each weight once, of the experts those that its tokens choose, and the cache of its sequences; "% of read" is the rate at
/// which it does, as a share of the rate at which the device reads its own memory in order, measured in the same run. The
/// ms of a prompt are the time to its first token.
///
/// Where the device tells what a kernel that does nothing costs, "x of floor" is what the step takes over the time of its bytes at that rate
/// and of as many empty kernels; where all experts have a place on the device.
///
/// With experts behind a cache (--vram, --expert-cache) the bound of a step is what it reads on the device at that rate, and the
/// experts without a place there at the rate of link and CPU together. "x of KV" is what a step takes longer than at the least depth,
/// over the time in which the device reads the keys and values that are more.
#[derive(Debug, Args)]
pub(super) struct StepsArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 16] = [
    column("stage", "stage", 1.0, 0),
    column("prompt", "prompt", 1.0, 0),
    column("depth", "depth", 1.0, 0),
    column("batch", "batch", 1.0, 0),
    column("seconds", "ms", 1e3, 2),
    column("tokens_per_second", "tok/s", 1.0, 1),
    column("bytes", "MB a step", 1e-6, 1),
    column("bytes_per_second", "GB/s", 1e-9, 1),
    column("share_of_read", "% of read", 100.0, 1),
    column("kernels", "kernels", 1.0, 0),
    column("empty_kernel_seconds", "us an empty one", 1e6, 2),
    column("over_floor", "x of floor", 1.0, 2),
    column("missed_bytes", "missed MB", 1e-6, 1),
    column("bound_seconds", "bound ms", 1e3, 2),
    column("share_of_bound", "% of bound", 100.0, 1),
    column("depth_over_kv", "x of KV", 1.0, 2),
];

/// A prompt is computed again until this much time has passed.
const PREFILL_SECONDS: f64 = 1.0;
/// Or so many times.
const PREFILL_RUNS: usize = 9;

/// Measures every prompt, then every depth with every batch.
pub(super) fn run(args: &StepsArgs) -> Result<()> {
    let n_steps = args.decode.decode as usize;
    let deepest = args.decode.deepest() + n_steps.max(WARM_UP) + n_steps;
    let options = args.decode.options(deepest.max(args.prompt.longest()));
    let mut subject = Subject::open(&args.subject, &args.memory, options)?;
    let read_bandwidth = subject.read_bandwidth()?;
    let mut table = Table::new(&COLUMNS);
    for &prompt in &args.prompt.prompt {
        let (seconds, _) = prefill_runs(&mut subject, prompt as usize)?;
        let tokens_per_second = prompt as f64 / seconds;
        table.push([
            "prefill".into(),
            (prompt as usize).into(),
            Cell::Empty,
            1.0.into(),
            seconds.into(),
            tokens_per_second.into(),
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
            Cell::Empty,
        ]);
    }
    let mut at_least_depth: HashMap<usize, (usize, Decoded)> = HashMap::new();
    subject.at_each_depth(&args.decode, |subject, depth, sequences| {
        let decoded = decode(subject, sequences, args.decode.decode as usize)?;
        let Decoded { seconds, kv_bytes, missed } = decoded;
        let bytes = decoded.bytes(subject, sequences.len());
        let (least, shallow) = *at_least_depth.entry(sequences.len()).or_insert((depth, decoded));
        let bound = missed.map(|missed| {
            let rates = subject.engine.elastic().expect("counted by it").rates().0;
            (bytes - missed) / read_bandwidth + missed / (rates.link_shared + rates.host_shared)
        });
        let costs = match missed {
            Some(_) => None,
            None => subject.engine.backend().kernel_costs(&subject.ops(sequences.len()))?,
        };
        let floor = costs.map(|costs| bytes / read_bandwidth + costs.empty());
        let kv_seconds = (kv_bytes - shallow.kv_bytes) / read_bandwidth;
        let over_kv = (depth > least).then(|| (seconds - shallow.seconds) / kv_seconds);
        let cell = |value: Option<f64>| value.map_or(Cell::Empty, Cell::from);
        table.push([
            "decode".into(),
            Cell::Empty,
            depth.into(),
            sequences.len().into(),
            seconds.into(),
            (sequences.len() as f64 / seconds).into(),
            bytes.into(),
            (bytes / seconds).into(),
            (bytes / seconds / read_bandwidth).into(),
            costs.map_or(Cell::Empty, |costs| costs.n_kernels.into()),
            cell(costs.map(|costs| costs.empty_kernel)),
            cell(floor.map(|floor| seconds / floor)),
            cell(missed),
            cell(bound),
            cell(bound.map(|bound| bound / seconds)),
            cell(over_kv),
        ]);
        Ok(())
    })?;
    subject.report(read_bandwidth, table, &args.report)
}

/// Time to the first token: the median of a few runs behind one that records the programs; and how many runs that were in all.
pub(super) fn prefill_runs(subject: &mut Subject, n_tokens: usize) -> Result<(f64, usize)> {
    let mut seconds = Vec::new();
    let begin = Instant::now();
    for run in 0..=PREFILL_RUNS {
        let mut sequence = subject.sequence();
        (0..n_tokens).for_each(|_| sequence.push(subject.token()));
        let start = Instant::now();
        subject.engine.prefill(&mut sequence, &mut |_| true)?;
        if run > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
        subject.engine.release(&mut sequence);
        if run > 0 && begin.elapsed().as_secs_f64() > PREFILL_SECONDS {
            break;
        }
    }
    let n_runs = seconds.len() + 1;
    Ok((median(seconds), n_runs))
}

/// Means over the timed steps.
#[derive(Clone, Copy)]
struct Decoded {
    seconds: f64,
    /// Bytes of the cache of keys and values.
    kv_bytes: f64,
    /// Bytes of experts that have no place on the device; `None` where all of them have.
    missed: Option<f64>,
}

impl Decoded {
    /// Bytes that a step must read.
    fn bytes(&self, subject: &Subject, n_sequences: usize) -> f64 {
        subject.weight_bytes(n_sequences) + self.kv_bytes
    }
}

/// Seconds of a decode step, the mean over `n_steps`.
pub(super) fn decode_seconds(
    subject: &mut Subject,
    sequences: &mut [Sequence],
    n_steps: usize,
) -> Result<f64> {
    let start = Instant::now();
    (0..n_steps).try_for_each(|_| subject.decode(sequences))?;
    Ok(start.elapsed().as_secs_f64() / n_steps as f64)
}

fn decode(subject: &mut Subject, sequences: &mut [Sequence], n_steps: usize) -> Result<Decoded> {
    // What a cache holds settles before it is timed.
    let n_before = if subject.engine.elastic().is_some() { n_steps } else { WARM_UP };
    (0..n_before).try_for_each(|_| subject.decode(sequences))?;
    let before = subject.engine.elastic().map(|elastic| elastic.counters().decode);
    let mut kv_tokens = 0;
    let start = Instant::now();
    for _ in 0..n_steps {
        subject.decode(sequences)?;
        kv_tokens += sequences.iter().map(Sequence::n_computed).sum::<usize>();
    }
    let seconds = start.elapsed().as_secs_f64() / n_steps as f64;
    let kv_bytes = subject.kv_token_bytes() * kv_tokens as f64 / n_steps as f64;
    let missed = before.zip(subject.engine.elastic()).map(|(before, elastic)| {
        let misses = elastic.counters().decode.since(&before).misses();
        (misses * elastic.record_bytes() as u64) as f64 / n_steps as f64
    });
    Ok(Decoded { seconds, kv_bytes, missed })
}
