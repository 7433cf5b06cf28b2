//! Which kernels an op is, and how they are launched. Pure: shapes in, launches out.

mod attention;
mod expert_mlp;
mod gated_delta;
mod matmul;
mod route;
mod small;
mod top_logits;

use freetoken_backend::{Format, Op, Precision, Weight};

pub(crate) use expert_mlp::record_place;
pub(crate) use small::{empty, products, read};

use crate::launch::{Arg, CardFacts, Launch, Unsupported};

/// Largest number of rows that the kernels of decode take.
pub(crate) const MAX_DECODE_ROWS: u32 = 16;
/// Most blocks of a grid in y and in z.
const MAX_GRID_Y: u32 = 65_535;
/// Places in scratch start at a multiple of this many bytes.
const SCRATCH_ALIGN: usize = 256;

/// The launches of an op, in order, and the bytes of scratch they need.
pub(crate) fn launches(
    op: &Op,
    precision: Precision,
    card: &CardFacts,
) -> Result<(Vec<Launch>, usize), Unsupported> {
    let (launches, scratch_bytes) = match op {
        Op::Embed(op) => Ok((vec![small::embed(op)], 0)),
        Op::MatMul(op) => matmul::launches(op, precision),
        Op::RopeCache(op) => Ok((vec![small::rope_cache(op)?], 0)),
        Op::Attention(op) => attention::launches(op, precision, card),
        Op::ShortConv(op) => Ok((vec![small::short_conv(op)], 0)),
        Op::GatedDelta(op) => Ok(gated_delta::launches(op, precision, card)),
        Op::Route(op) => route::launches(op),
        Op::ExpertMlp(op) => expert_mlp::launches(op, precision),
        Op::Combine(op) => Ok((vec![small::combine(op)], 0)),
        Op::EditLogits(op) => Ok((vec![small::edit_logits(op)], 0)),
        Op::TopLogits(op) => top_logits::launches(op),
    }?;
    if launches.iter().any(|launch| launch.grid[1].max(launch.grid[2]) > MAX_GRID_Y) {
        return Err(Unsupported(format!(
            "a grid of more than {MAX_GRID_Y} blocks in one direction: use a smaller chunk"
        )));
    }
    Ok((launches, scratch_bytes))
}

/// Hands out places in scratch.
#[derive(Default)]
struct Scratch {
    bytes: usize,
}

impl Scratch {
    fn place(&mut self, bytes: usize) -> Arg {
        let start = self.bytes;
        self.bytes += bytes.next_multiple_of(SCRATCH_ALIGN);
        Arg::Scratch(start)
    }
}

/// A one-dimensional block.
fn launch(kernel: &'static str, grid: [u32; 3], threads: u32, args: Vec<Arg>) -> Launch {
    Launch { kernel, grid, block: [threads, 1, 1], shared_bytes: 0, args, early: false }
}

fn params(p: &[u8]) -> Arg {
    Arg::Params(p.to_vec())
}

/// A format as kernels number it.
fn number(format: Format) -> u32 {
    match format {
        Format::F32 => 0,
        Format::Bf16 => 1,
        Format::F16 => 2,
        Format::Fp8 => 3,
        Format::Nvfp4 => 4,
        Format::Mxfp4 => 5,
    }
}

fn format(format: Format) -> Arg {
    Arg::U32(number(format))
}

/// Address and format of a weight that may be absent.
fn optional(weight: Option<&Weight>) -> (Arg, Arg) {
    match weight {
        Some(weight) => (Arg::View(weight.view.clone()), format(weight.format)),
        None => (Arg::Null, Arg::U32(0)),
    }
}

/// Whether a view starts where a 16-byte load may.
fn is_aligned(view: &freetoken_backend::View) -> bool {
    view.range().start.is_multiple_of(16)
}

/// One of four names, by the format of a weight: a kernel for all formats with scales is told which it is.
fn by_format(of: Format, names: [&'static str; 4]) -> &'static str {
    match of {
        Format::F32 => names[0],
        Format::Bf16 => names[1],
        Format::F16 => names[2],
        Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => names[3],
    }
}

/// Rows of a weight have a multiple of so many columns where kernels of decode load them 16 bytes at a time.
fn decode_columns(of: Format) -> u32 {
    match of {
        Format::F32 | Format::Bf16 | Format::F16 => 8,
        Format::Fp8 => 16,
        Format::Nvfp4 | Format::Mxfp4 => 32,
    }
}

/// The same of tiles on tensor cores; `None` where those take no such weight.
fn mma_columns(of: Format) -> Option<u32> {
    match of {
        Format::F32 | Format::F16 => None,
        Format::Bf16 => Some(8),
        Format::Fp8 | Format::Nvfp4 | Format::Mxfp4 => Some(16),
    }
}
