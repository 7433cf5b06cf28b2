//! Each op of a decode step by itself, as the device times it, grouped by what it is.

use anyhow::Result;
use clap::Args;
use freetoken_backend::{Backend, Op};

use super::{
    super::{memory::MemoryArgs, synth::n_distinct},
    report::ReportArgs,
    subject::{DecodeArgs, Subject, SubjectArgs, WARM_UP, kv_token_bytes},
    table::{Column, Table, column},
};
use crate::engine::Sequence;

/// Each op of a decode step by itself.
#[derive(Debug, Args)]
pub(super) struct OpsArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 9] = [
    column("op", "op", 1.0, 0),
    column("depth", "depth", 1.0, 0),
    column("batch", "batch", 1.0, 0),
    column("calls", "calls", 1.0, 0),
    column("seconds", "us a step", 1e6, 1),
    column("share_of_step", "% of step", 100.0, 1),
    column("bytes", "MB a step", 1e-6, 3),
    column("bytes_per_second", "GB/s", 1e-9, 2),
    column("share_of_read", "% of read", 100.0, 1),
];

/// Ops of one kind in one step.
struct Group {
    name: String,
    n_calls: usize,
    seconds: f64,
    bytes: f64,
}

/// Measures every depth with every batch.
pub(super) fn run(args: &OpsArgs) -> Result<()> {
    let options = args.decode.options(args.decode.deepest() + WARM_UP + args.decode.decode as usize);
    let mut subject = Subject::open(&args.subject, &args.memory, options)?;
    let read_bandwidth = subject.read_bandwidth()?;
    let mut table = Table::new(&COLUMNS);
    subject.at_each_depth(&args.decode, |subject, depth, sequences| {
        let mut groups = step(subject, sequences, args.decode.decode as usize)?;
        groups.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let step_seconds: f64 = groups.iter().map(|group| group.seconds).sum();
        let (n_calls, bytes) = groups.iter().fold((0, 0.0), |(n, bytes), g| (n + g.n_calls, bytes + g.bytes));
        groups.push(Group { name: "all".into(), n_calls, seconds: step_seconds, bytes });
        for Group { name, n_calls, seconds, bytes } in groups {
            table.push([
                name.as_str().into(),
                depth.into(),
                sequences.len().into(),
                n_calls.into(),
                seconds.into(),
                (seconds / step_seconds).into(),
                bytes.into(),
                (bytes / seconds).into(),
                (bytes / seconds / read_bandwidth).into(),
            ]);
        }
        Ok(())
    })?;
    subject.report(read_bandwidth, table, &args.report)
}

/// Means of `n_steps` steps. A real step goes before each, so that the buffers hold its input.
fn step(subject: &mut Subject, sequences: &mut [Sequence], n_steps: usize) -> Result<Vec<Group>> {
    let ops = subject.ops(sequences.len());
    let mut groups: Vec<Group> = Vec::new();
    for step in 0..WARM_UP + n_steps {
        subject.decode(sequences)?;
        let kv_tokens: usize = sequences.iter().map(Sequence::n_computed).sum();
        groups
            .iter_mut()
            .filter(|_| step == WARM_UP)
            .for_each(|group| (group.seconds, group.bytes) = (0.0, 0.0));
        for (op, seconds) in ops.iter().zip(subject.engine.backend().time(&ops)?) {
            let name = name(op);
            let bytes = bytes(subject.engine.backend(), op, kv_tokens)?;
            let group = match groups.iter_mut().position(|group| group.name == name) {
                Some(i) => &mut groups[i],
                None => groups.push_mut(Group { name, n_calls: 0, seconds: 0.0, bytes: 0.0 }),
            };
            group.n_calls += usize::from(step == 0);
            group.seconds += seconds / n_steps as f64;
            group.bytes += bytes / n_steps as f64;
        }
    }
    Ok(groups)
}

/// Ops of one name and one shape are a group; of projections the shape tells which it is.
fn name(op: &Op) -> String {
    match op {
        Op::MatMul(op) => format!("matmul {}x{}", op.weight.rows(), op.weight.cols()),
        op => op.name().to_owned(),
    }
}

/// Bytes that the op must read with its present input.
fn bytes(backend: &dyn Backend, op: &Op, kv_tokens: usize) -> Result<f64> {
    Ok(match op {
        Op::ExpertMlp(op) => {
            let mut ids = vec![0_i32; (op.p.n_rows * op.p.top_k) as usize];
            backend.read(&op.ids, bytemuck::cast_slice_mut(&mut ids))?;
            (n_distinct(&ids) * op.experts.expert_bytes()) as f64
        }
        // Greedy sequences edit nothing.
        Op::EditLogits(_) => 0.0,
        Op::Attention(op) => kv_token_bytes(op) * kv_tokens as f64,
        op => op.spec().bytes() as f64,
    })
}
