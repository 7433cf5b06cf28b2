//! Each op of a step by itself, as the device times it, grouped by what it is; and the whole step beside them.

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use freetoken_backend::{Backend, KernelCosts, Op};

use super::{
    super::{memory::MemoryArgs, synth::n_distinct},
    report::ReportArgs,
    subject::{DecodeArgs, Subject, SubjectArgs, WARM_UP, kv_token_bytes},
    table::{Cell, Column, Table, column},
};
use crate::engine::Sequence;

/// Each op of a step by itself: of decode steps, and with --prompt of the chunk that a prompt is; and of a recurrent model, all ops
/// of a decode step that stand in for attention together.
///
/// Below the ops of a decode step stands the step as it runs; and where the device tells, what of it is no kernel's work but between
/// them, what as many kernels that do nothing take, and what these and the step's bytes take, which is the step at its best. "% of
/// products" is the rate of a matrix product as a share of the one at which the device multiplies without reading anything, measured
/// in the same run.
#[derive(Debug, Args)]
pub(super) struct OpsArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    decode: DecodeArgs,
    /// Also measure the ops of prompts of so many tokens, each in one chunk.
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prompt: Vec<u32>,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 13] = [
    column("stage", "stage", 1.0, 0),
    column("op", "op", 1.0, 0),
    column("prompt", "prompt", 1.0, 0),
    column("depth", "depth", 1.0, 0),
    column("batch", "batch", 1.0, 0),
    column("calls", "calls", 1.0, 0),
    column("seconds", "us a step", 1e6, 1),
    column("share_of_step", "% of step", 100.0, 1),
    column("bytes", "MB a step", 1e-6, 3),
    column("bytes_per_second", "GB/s", 1e-9, 2),
    column("share_of_read", "% of read", 100.0, 1),
    column("flops_per_second", "TFLOP/s", 1e-12, 1),
    column("share_of_products", "% of products", 100.0, 1),
];

/// Steps of a prompt that are timed, behind one that is not.
const PROMPT_STEPS: usize = 5;

/// Ops of one kind in one step.
struct Group {
    name: String,
    n_calls: usize,
    seconds: f64,
    bytes: f64,
    /// Of matrix products.
    flops: f64,
}

/// The groups of a step; largest first, once sorted.
#[derive(Default)]
struct Groups(Vec<Group>);

impl Groups {
    /// Adds what one of `n_steps` steps measured; `is_first` of them counts calls.
    fn add(&mut self, op: &Op, seconds: f64, bytes: f64, n_steps: usize, is_first: bool) {
        self.add_to(name(op), op, seconds, bytes, n_steps, is_first);
    }

    /// The same in the group of a name.
    fn add_to(&mut self, name: String, op: &Op, seconds: f64, bytes: f64, n_steps: usize, is_first: bool) {
        let n_steps = n_steps as f64;
        let group = match self.0.iter_mut().position(|group| group.name == name) {
            Some(i) => &mut self.0[i],
            None => self.0.push_mut(Group { name, n_calls: 0, seconds: 0.0, bytes: 0.0, flops: 0.0 }),
        };
        group.n_calls += usize::from(is_first);
        group.seconds += seconds / n_steps;
        group.bytes += bytes / n_steps;
        if matches!(op, Op::MatMul(_) | Op::ExpertMlp(_)) {
            group.flops += op.spec().flops() as f64 / n_steps;
        }
    }

    /// The largest first, and behind them all together.
    fn summed(mut self) -> Vec<Group> {
        self.0.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        let sum = |of: fn(&Group) -> f64| self.0.iter().map(of).sum::<f64>();
        let all = Group {
            name: "all".into(),
            n_calls: self.0.iter().map(|group| group.n_calls).sum(),
            seconds: sum(|group| group.seconds),
            bytes: sum(|group| group.bytes),
            flops: 0.0,
        };
        self.0.push(all);
        self.0
    }
}

/// Where the rows of a step belong.
struct Stage {
    name: &'static str,
    prompt: Cell,
    depth: Cell,
    batch: usize,
}

/// Measures every prompt, then every depth with every batch.
pub(super) fn run(args: &OpsArgs) -> Result<()> {
    let longest = args.prompt.iter().copied().max().unwrap_or(0) as usize;
    let deepest = args.decode.deepest() + WARM_UP + args.decode.decode as usize;
    let mut subject = Subject::open(&args.subject, &args.memory, args.decode.options(deepest.max(longest)))?;
    let read_bandwidth = subject.read_bandwidth()?;
    let product_rate = subject.engine.backend().product_rate()?;
    let mut table = Table::new(&COLUMNS);
    let mut push = |stage: &Stage, group: &Group, whole: f64| {
        let rate = |amount: f64| if amount > 0.0 { (amount / group.seconds).into() } else { Cell::Empty };
        let product_share =
            product_rate.filter(|_| group.flops > 0.0).map(|r| group.flops / group.seconds / r);
        table.push([
            stage.name.into(),
            group.name.as_str().into(),
            stage.prompt.clone(),
            stage.depth.clone(),
            stage.batch.into(),
            group.n_calls.into(),
            group.seconds.into(),
            (group.seconds / whole).into(),
            if group.bytes > 0.0 { group.bytes.into() } else { Cell::Empty },
            rate(group.bytes),
            rate(group.bytes / read_bandwidth),
            rate(group.flops),
            product_share.map_or(Cell::Empty, Cell::from),
        ]);
    };
    for &prompt in &args.prompt {
        let groups = prompt_step(&mut subject, prompt as usize)?.summed();
        let stage = Stage { name: "prefill", prompt: (prompt as usize).into(), depth: Cell::Empty, batch: 1 };
        let whole = groups.last().map_or(0.0, |all| all.seconds);
        groups.iter().for_each(|group| push(&stage, group, whole));
    }
    subject.at_each_depth(&args.decode, |subject, depth, sequences| {
        let (groups, delta_nets, seconds) = step(subject, sequences, args.decode.decode as usize)?;
        let mut groups = groups.summed();
        groups.splice(groups.len() - 1..groups.len() - 1, delta_nets.0);
        let stage =
            Stage { name: "decode", prompt: Cell::Empty, depth: depth.into(), batch: sequences.len() };
        let all = groups.last().expect("all of them together");
        groups.iter().for_each(|group| push(&stage, group, all.seconds));
        let costs = subject.engine.backend().kernel_costs(&subject.ops(sequences.len()))?;
        as_it_runs(all, seconds, costs, read_bandwidth).iter().for_each(|group| push(&stage, group, seconds));
        Ok(())
    })?;
    subject.report(read_bandwidth, table, &args.report)
}

/// The step as it runs, and where the device tells, what of it no kernel works, beside what empty kernels take. What a kernel
/// works is what its op takes by itself beyond an empty one.
fn as_it_runs(all: &Group, seconds: f64, costs: Option<KernelCosts>, read_bandwidth: f64) -> Vec<Group> {
    let row = |name: &str, n_calls: usize, seconds: f64, bytes: f64| Group {
        name: name.into(),
        n_calls,
        seconds,
        bytes,
        flops: 0.0,
    };
    let mut rows = vec![row("the step as it runs", 1, seconds, all.bytes)];
    if let Some(costs) = costs {
        let KernelCosts { n_kernels, empty_kernel, empty_op } = costs;
        let n_more = n_kernels.saturating_sub(all.n_calls) as f64;
        let work = all.seconds - all.n_calls as f64 * empty_op - n_more * empty_kernel;
        rows.push(row("between kernels", n_kernels, seconds - work, 0.0));
        let empty = costs.empty();
        rows.push(row("as many empty kernels", n_kernels, empty, 0.0));
        rows.push(row("bytes and empty kernels", n_kernels, empty + all.bytes / read_bandwidth, 0.0));
    }
    rows
}

/// Means of `n_steps` decode steps, by what an op is; of the ops of delta nets once more together, where there are any; and of the
/// seconds of the real steps that go before each, so that the buffers hold its input.
fn step(subject: &mut Subject, sequences: &mut [Sequence], n_steps: usize) -> Result<(Groups, Groups, f64)> {
    let ops = subject.ops(sequences.len());
    let is_delta_net = of_delta_nets(&ops);
    let (mut groups, mut delta_nets, mut whole) = (Groups::default(), Groups::default(), 0.0);
    for step in 0..WARM_UP + n_steps {
        let start = Instant::now();
        subject.decode(sequences)?;
        let seconds = start.elapsed().as_secs_f64();
        let kv_tokens: usize = sequences.iter().map(Sequence::n_computed).sum();
        let times = subject.engine.backend().time(&ops)?;
        if step < WARM_UP {
            continue;
        }
        whole += seconds / n_steps as f64;
        for ((op, &is_delta_net), seconds) in ops.iter().zip(&is_delta_net).zip(times) {
            let (bytes, is_first) = (bytes(subject.engine.backend(), op, kv_tokens)?, step == WARM_UP);
            groups.add(op, seconds, bytes, n_steps, is_first);
            if is_delta_net {
                delta_nets.add_to("delta nets".into(), op, seconds, bytes, n_steps, is_first);
            }
        }
    }
    Ok((groups, delta_nets, whole))
}

/// Which ops make delta nets: the convolution and the rule, the projections of the same rows in front of them, and the one behind.
fn of_delta_nets(ops: &[Op]) -> Vec<bool> {
    let projection = |i: usize| match ops.get(i) {
        Some(Op::MatMul(op)) => Some(op),
        _ => None,
    };
    let is_conv = |i: usize| matches!(ops.get(i), Some(Op::ShortConv(_)));
    let reads_alike =
        |i: usize| projection(i).zip(projection(i + 1)).is_some_and(|(a, b)| a.x.buffer().same(b.x.buffer()));
    let is_of_one = |(i, op): (usize, &Op)| match op {
        Op::ShortConv(_) | Op::GatedDelta(_) => true,
        Op::MatMul(_) => {
            is_conv(i + 1)
                || is_conv(i + 2) && reads_alike(i)
                || i > 0 && matches!(ops[i - 1], Op::GatedDelta(_))
        }
        _ => false,
    };
    ops.iter().enumerate().map(is_of_one).collect()
}

/// The ops of a prompt of one chunk.
fn prompt_step(subject: &mut Subject, n_tokens: usize) -> Result<Groups> {
    let ops = subject.prompt_ops(n_tokens);
    let rows =
        ops.iter().find_map(|op| if let Op::Embed(op) = op { Some(op.p.n_rows as usize) } else { None });
    ensure!(
        rows.is_some_and(|rows| n_tokens <= rows),
        "a prompt of {n_tokens} tokens is more than a chunk of {}: ask for a shorter one",
        rows.unwrap_or(0)
    );
    // A real chunk leaves in the buffers what its ops read; a token drawn behind it would write over that.
    let mut sequence = subject.sequence();
    subject.compute(n_tokens, &mut sequence)?;
    let mut groups = Groups::default();
    for step in 0..=PROMPT_STEPS {
        let times = subject.engine.backend().time(&ops)?;
        for (op, seconds) in ops.iter().zip(times).filter(|_| step > 0) {
            let bytes = bytes(subject.engine.backend(), op, n_tokens)?;
            groups.add(op, seconds, bytes, PROMPT_STEPS, step == 1);
        }
    }
    subject.engine.release(&mut sequence);
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
