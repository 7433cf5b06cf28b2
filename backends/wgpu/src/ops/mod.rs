//! One file an op: which kernel runs it on this device in this shape, and with what.

mod attention;
mod combine;
mod edit_logits;
mod embed;
pub(crate) mod expert_mlp;
mod gated_delta;
mod half_rows;
mod matmul;
mod rope_cache;
mod route;
mod short_conv;
mod top_logits;

use freetoken_backend::{Experts, Format, KvCache, Op};

use crate::{device::Gpu, dispatch::Recorder};

/// Adds the dispatches of ops that run one behind the other; two of them may share one. They are checked and supported.
pub(crate) fn record_all(ops: &[Op], recorder: &mut Recorder<'_>) {
    let mut rest = ops;
    while let [op, behind @ ..] = rest {
        rest = match (op, behind) {
            (Op::ExpertMlp(mlp), [Op::Combine(combine), behind @ ..])
                if expert_mlp::combines(mlp, combine, recorder.gpu) =>
            {
                recorder.work = op.spec().flops().max(op.spec().bytes());
                expert_mlp::record_combined(mlp, combine, recorder);
                behind
            }
            _ => {
                record(op, recorder);
                behind
            }
        };
    }
}

/// Adds an op's dispatches. The op is checked and supported.
pub(crate) fn record(op: &Op, recorder: &mut Recorder<'_>) {
    recorder.work = op.spec().flops().max(op.spec().bytes());
    match op {
        Op::Embed(op) => embed::record(op, recorder),
        Op::MatMul(op) => matmul::record(op, recorder),
        Op::RopeCache(op) => rope_cache::record(op, recorder),
        Op::Attention(op) => attention::record(op, recorder),
        Op::ShortConv(op) => short_conv::record(op, recorder),
        Op::GatedDelta(op) => gated_delta::record(op, recorder),
        Op::Route(op) => route::record(op, recorder),
        Op::ExpertMlp(op) => expert_mlp::record(op, recorder),
        Op::Combine(op) => combine::record(op, recorder),
        Op::EditLogits(op) => edit_logits::record(op, recorder),
        Op::TopLogits(op) => top_logits::record(op, recorder),
    }
}

/// What the device lacks for an op, if anything.
pub(crate) fn supports(op: &Op, gpu: &Gpu) -> Result<(), String> {
    // A binding may begin a little before what it is for, and end a little behind.
    let most = gpu.max_binding() - 2 * gpu.align() as usize;
    for binding in op.spec().bindings() {
        // Matrices are walked through in windows of rows, large states in windows of slots.
        let in_windows = matches!(
            (op, binding.name),
            (Op::Embed(_), "table")
                | (Op::MatMul(_), "weight" | "scales" | "globals")
                | (Op::GatedDelta(_), "state")
        );
        if binding.bytes > most && !in_windows {
            let (name, bytes) = (binding.name, binding.bytes);
            return Err(format!("`{name}` has {bytes} bytes, and the device binds at most {most}"));
        }
    }
    match op {
        Op::RopeCache(op) => cache(&op.kv, op.p.head_dim),
        Op::Attention(op) => {
            attention::supports(op)?;
            cache(&op.kv, op.p.head_dim)
        }
        Op::GatedDelta(op) => gated_delta::supports(op, most),
        Op::Route(op) if op.p.n_experts as usize > route::MAX_EXPERTS => {
            Err(format!("{} experts; it routes among {} at most", op.p.n_experts, route::MAX_EXPERTS))
        }
        Op::MatMul(op) => matmul::supports(op, gpu),
        Op::ExpertMlp(op) => expert_mlp::supports(op, gpu),
        _ => Ok(()),
    }
}

fn cache(kv: &KvCache, head_dim: u32) -> Result<(), String> {
    match kv.format {
        Format::F16 => Err("the cache is f32 or bf16".into()),
        Format::Bf16 if !head_dim.is_multiple_of(2) => {
            Err(format!("a bf16 cache holds pairs, and a head has {head_dim}"))
        }
        _ => Ok(()),
    }
}

/// Why experts in place cannot be run.
fn pool_only(experts: &Experts) -> Result<(), String> {
    match experts {
        Experts::InPlace(_) => Err("its experts lie in slots of a pool".into()),
        Experts::Pool { .. } => Ok(()),
    }
}
