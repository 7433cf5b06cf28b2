//! The ops: a struct each, outputs first, then inputs, then `#[repr(C)]` parameters that Rust, CUDA and WGSL share.
//!
//! An op names views of device memory and never touches them. What is common to all of them (name, bindings, bytes,
//! flops) is [`OpSpec`]; checking, tracing, conformance, timing and the roofline are one loop over it each.
//! Activations are f32 unless a field says otherwise; indices are i32; rows with a sequence of -1 are padding.

mod attention;
mod combine;
mod edit_logits;
mod embed;
mod expert_mlp;
mod gated_delta;
mod matmul;
mod rope_cache;
mod route;
mod short_conv;
mod top_logits;

pub use attention::{Attention, AttentionGate, AttentionParams};
pub use combine::{Combine, CombineParams, SharedExpert};
pub use edit_logits::{EditLogits, EditLogitsParams, LogitEdit};
pub use embed::{Embed, EmbedParams};
pub use expert_mlp::{ExpertMlp, ExpertMlpParams};
pub use gated_delta::{GatedDelta, GatedDeltaParams};
pub use matmul::{Activation, MatMul, MatMulParams};
pub use rope_cache::{KvCache, PAGE_TOKENS, RopeCache, RopeCacheParams};
pub use route::{Route, RouteParams, SharedGate};
pub use short_conv::{MAX_CONV_KERNEL, ShortConv, ShortConvParams, Span};
pub use top_logits::{MAX_TOP_LOGITS, TopLogits, TopLogitsParams};

use crate::{Experts, Matrix, View, Weight};

/// What an op does with something it binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads.
    Read,
    /// Writes all of it, or all of it that is not padding, without reading it.
    Write,
    /// Updates it in place.
    ReadWrite,
}

/// One thing an op binds.
#[derive(Debug, Clone)]
pub struct Binding<'a> {
    /// Field of the op.
    pub name: &'static str,
    /// What it binds.
    pub view: &'a View,
    /// Bytes it needs there.
    pub bytes: usize,
    /// What it does with them.
    pub access: Access,
}

/// What all ops have in common.
pub trait OpSpec {
    /// Stem of its kernels, cases and bench rows.
    fn name(&self) -> &'static str;
    /// Everything it binds, outputs first; without the experts of a pool, which a backend reaches through its table.
    fn bindings(&self) -> Vec<Binding<'_>>;
    /// Its parameters as kernels read them: at most 128 bytes.
    fn params(&self) -> &[u8];
    /// Bytes it moves at least, counting each weight once; an expectation where the data decides.
    fn bytes(&self) -> u64;
    /// Floating-point operations, a multiply-add counting two.
    fn flops(&self) -> u64;
    /// Refuses parameters that contradict each other or the weights: asserts.
    fn check_shape(&self);
}

macro_rules! ops {
    ($($op:ident),* $(,)?) => {
        /// One piece of work for a device.
        #[derive(Debug, Clone)]
        #[allow(missing_docs, reason = "each variant is the struct of the same name")]
        pub enum Op { $($op($op)),* }

        impl Op {
            /// What it has in common with all others.
            pub fn spec(&self) -> &dyn OpSpec {
                match self { $(Op::$op(op) => op),* }
            }
        }

        $(impl From<$op> for Op {
            fn from(op: $op) -> Op { Op::$op(op) }
        })*
    };
}

ops!(
    Embed, MatMul, RopeCache, Attention, ShortConv, GatedDelta, Route, ExpertMlp, Combine, EditLogits,
    TopLogits
);

impl Op {
    /// Stem of its kernels, cases and bench rows.
    pub fn name(&self) -> &'static str {
        self.spec().name()
    }

    /// Asserts that every view is large enough, that nothing an op writes is bound a second time, and that no buffer is bound
    /// both to read and to write (WebGPU refuses that even for disjoint ranges). A failure is a bug of the caller; backends
    /// call this before they run or record an op.
    pub fn check(&self) {
        let spec = self.spec();
        spec.check_shape();
        assert!(spec.params().len() <= 128, "{}: parameters of more than 128 bytes", spec.name());
        let bindings = spec.bindings();
        for (i, b) in bindings.iter().enumerate() {
            let (op, field) = (spec.name(), b.name);
            assert!(b.view.bytes() >= b.bytes, "{op}.{field}: {} bytes, {} needed", b.view.bytes(), b.bytes);
            for other in bindings[i + 1..].iter().filter(|o| o.view.buffer().same(b.view.buffer())) {
                let (reads, other_reads) = (b.access == Access::Read, other.access == Access::Read);
                assert!(reads == other_reads, "{op}: {field} and {} read and write one buffer", other.name);
                assert!(reads || !other.view.overlaps(b.view), "{op}: {field} and {} overlap", other.name);
            }
        }
    }
}

/// Bytes of `n` f32 or i32 values.
const fn words(n: usize) -> usize {
    n * 4
}

fn write<'a>(name: &'static str, view: &'a View, bytes: usize) -> Binding<'a> {
    Binding { name, view, bytes, access: Access::Write }
}

fn read<'a>(name: &'static str, view: &'a View, bytes: usize) -> Binding<'a> {
    Binding { name, view, bytes, access: Access::Read }
}

fn read_write<'a>(name: &'static str, view: &'a View, bytes: usize) -> Binding<'a> {
    Binding { name, view, bytes, access: Access::ReadWrite }
}

/// A weight that is codes only.
fn weight<'a>(name: &'static str, weight: &'a Weight) -> Binding<'a> {
    read(name, &weight.view, weight.code_bytes())
}

/// The codes of all pieces under `name`, and what else their format has.
fn matrix<'a>(name: &'static str, matrix: &'a Matrix) -> impl Iterator<Item = Binding<'a>> {
    matrix.pieces().iter().flat_map(move |piece| {
        let scales = piece.scales.as_ref().map(|scales| read("scales", scales, piece.scale_bytes()));
        let globals = piece.globals.as_ref().map(|globals| read("globals", globals, piece.global_bytes()));
        [Some(weight(name, piece)), scales, globals].into_iter().flatten()
    })
}

/// The slot table of a pool: the only part of the experts that an op binds by itself.
fn experts<'a>(experts: &'a Experts) -> Option<Binding<'a>> {
    match experts {
        Experts::InPlace(_) => None,
        Experts::Pool { pool, .. } => Some(read("table", &pool.table, words(pool.n_layers * pool.n_experts))),
    }
}
