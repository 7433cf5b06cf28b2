//! Experts that host memory does not hold: prompts and decode steps beside the bound of the disk, which is the bytes that came from
//! it at the rate at which its files are read for their own sake, in the same run.

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use serde_json::json;

use super::{
    super::{memory::MemoryArgs, terminal::note},
    load::{Disk, best},
    report::ReportArgs,
    subject::{DecodeArgs, PromptArgs, Subject, SubjectArgs, WARM_UP},
    table::{Column, Table, column},
};
use crate::{
    engine::Sequence,
    model_files::ModelFiles,
    moe::{ByteCount, DiskSums},
};

/// How often the files are read for their own sake; the best time counts.
const TURNS: usize = 2;

/// A model that is larger than memory: prompts and decode steps beside what the disk gives.
#[derive(Debug, Args)]
pub(super) struct DiskArgs {
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

const COLUMNS: [Column; 11] = [
    column("stage", "stage", 1.0, 0),
    column("in_memory", "in memory %", 100.0, 0),
    column("tokens", "tokens", 1.0, 0),
    column("seconds", "ms", 1e3, 1),
    column("tokens_per_second", "tok/s", 1.0, 2),
    column("disk_reads", "reads", 1.0, 1),
    column("disk_bytes", "read MB", 1e-6, 1),
    column("bound_seconds", "bound ms", 1e3, 1),
    column("share_of_bound", "% of bound", 100.0, 1),
    column("waited_seconds", "waited ms", 1e3, 1),
    column("disk_bytes_per_second", "disk GB/s", 1e-9, 2),
];

/// Measures everything that is asked for.
pub(super) fn run(args: &DiskArgs) -> Result<()> {
    let files = ModelFiles::open(args.subject.model.as_deref())?;
    let dir = files.checkpoint().dir().to_path_buf();
    ensure!(dir.is_dir(), "what is made up, and the demo model, are in memory: give --model DIR");
    let mut disk = Disk::open(&[dir])?;
    let mut seconds = Vec::new();
    for _ in 0..TURNS {
        disk.forget();
        seconds.push(disk.read(&mut |_| ())?);
    }
    let disk_rate = disk.bytes() as f64 / best(seconds);
    let is_direct = disk.is_direct();
    drop(disk);

    let deepest = args.decode.deepest() + WARM_UP + args.decode.decode as usize;
    let options = args.decode.options(deepest.max(args.prompt.longest()));
    let mut subject = Subject::open(&args.subject, &args.memory, options)?;
    let elastic = subject.engine.elastic().filter(|elastic| elastic.n_records().is_some());
    let Some((n_records, n_all)) = elastic.map(|e| (e.n_records().unwrap_or(0), e.n_experts())) else {
        anyhow::bail!("{} fits into memory: give less of it with --ram", subject.name);
    };
    let held = n_records as f64 / n_all as f64;
    let mut table = Table::new(&COLUMNS);
    let mut push = |stage: &str, tokens: usize, seconds: f64, n: f64, sums: DiskSums| {
        let bytes = sums.bytes as f64 / n;
        let bound = bytes / disk_rate;
        table.push([
            stage.into(),
            held.into(),
            tokens.into(),
            seconds.into(),
            (tokens as f64 / seconds).into(),
            (sums.reads as f64 / n).into(),
            bytes.into(),
            bound.into(),
            (bound / seconds).into(),
            (sums.waited_seconds / n).into(),
            disk_rate.into(),
        ]);
    };
    for &prompt in &args.prompt.prompt {
        let mut sequence = subject.sequence();
        let before = sums(&subject);
        let start = Instant::now();
        subject.compute(prompt as usize, &mut sequence)?;
        let seconds = start.elapsed().as_secs_f64();
        push("prefill", prompt as usize, seconds, 1.0, sums(&subject).since(&before));
        subject.engine.release(&mut sequence);
    }
    for &batch in &args.decode.batch {
        let mut sequences: Vec<Sequence> = (0..batch).map(|_| subject.sequence()).collect();
        for sequence in &mut sequences {
            subject.bring_to(args.decode.deepest(), sequence)?;
        }
        (0..WARM_UP).try_for_each(|_| subject.decode(&mut sequences))?;
        let before = sums(&subject);
        let start = Instant::now();
        (0..args.decode.decode).try_for_each(|_| subject.decode(&mut sequences))?;
        let n = f64::from(args.decode.decode);
        let seconds = start.elapsed().as_secs_f64() / n;
        push("decode", batch as usize, seconds, n, sums(&subject).since(&before));
        sequences.iter_mut().for_each(|sequence| subject.engine.release(sequence));
    }
    if !is_direct {
        note("this file system has no reads past the page cache: what is measured may be memory");
    }
    let name = subject.name.clone();
    let caps = subject.engine.backend().caps().clone();
    let record = ByteCount(subject.engine.elastic().map_or(0, |elastic| elastic.record_bytes() as u64));
    let text = || {
        format!(
            "{name}, {n_records} of {n_all} experts of {record} in memory\n{}: {}, {}, precision {}\nthe files are read at {:.2} \
             GB/s\n\n{}",
            caps.backend,
            caps.device,
            caps.detail,
            caps.precision,
            disk_rate / 1e9,
            table.text()
        )
    };
    let json = || {
        json!({
            "model": name,
            "backend": caps.backend,
            "device": caps.device,
            "detail": caps.detail,
            "precision": caps.precision.to_string(),
            "direct": is_direct,
            "disk_bytes_per_second": disk_rate,
            "rows": table.json(),
        })
    };
    args.report.print(&table, text, json)
}

fn sums(subject: &Subject) -> DiskSums {
    subject.engine.elastic().map(|elastic| elastic.counters().disk).unwrap_or_default()
}
