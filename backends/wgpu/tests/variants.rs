//! Kernels that the conformance table does not reach, since a shape or a limit chooses them: many routes of one expert, windows of
//! a matrix and of a pool, every width of a batch.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_adapter;

use freetoken_backend::{
    Activation, Backend, Embed, EmbedParams, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Format,
    GatedDelta, GatedDeltaParams, MatMul, MatMulParams, Matrix, Op, Precision, Result, Weight,
    conformance::{Arena, Fill},
    record,
};
use freetoken_cpu::Cpu;
use freetoken_wgpu::Options;

/// f32 against f32 in another order of summation.
const BOUND: f64 = 1e-10;

type Build = Box<dyn Fn(&mut Arena<'_>) -> Result<Op>>;

fn check(cases: Vec<(String, Build)>) {
    for (subgroups, floor) in [(true, false), (true, true), (false, true)] {
        let options = Options { subgroups, floor, as_hardware: floor, ..Options::new(Precision::F32) };
        on_every_adapter::run(&options, |device| {
            for (name, build) in &cases {
                let reference = Cpu::reference();
                let (mut here, mut there) = (Arena::new(device), Arena::new(&reference));
                let (op, expected) = (build(&mut here).unwrap(), build(&mut there).unwrap());
                device.supports(&op).unwrap();
                here.fill(1).unwrap();
                there.fill(1).unwrap();
                device.run(&[op]).unwrap();
                reference.run(&[expected]).unwrap();
                let name = format!("{name} on {} subgroups={subgroups} floor={floor}", device.caps().device);
                let error = here.compare(&there).unwrap_or_else(|why| panic!("{name}: {why}"));
                println!("{name}: error {error:.1e}");
                assert!(error <= BOUND, "{name}: error {error:.1e}");
            }
        });
    }
}

fn case(name: String, build: impl Fn(&mut Arena<'_>) -> Result<Op> + 'static) -> (String, Build) {
    (name, Box::new(build))
}

#[derive(Clone, Copy)]
struct Product {
    n: usize,
    pieces: usize,
    rows: usize,
    cols: usize,
    glu: bool,
    format: Format,
}

fn matmul(a: &mut Arena<'_>, c: Product) -> Result<Op> {
    let mut weights = Vec::new();
    let mut biases = Vec::new();
    for _ in 0..c.pieces {
        weights.push(a.weight(c.format, c.rows, c.cols, 0.1)?);
        biases.push(a.weight(Format::Bf16, 1, c.rows, 1.0)?);
    }
    let out_features = c.pieces * c.rows / if c.glu { 2 } else { 1 };
    Ok(MatMul {
        out: a.updated(c.n * out_features, Fill::Uniform(1.0))?,
        x: a.input(c.n * c.cols, Fill::Uniform(1.0))?,
        rows: None,
        norm: Some(a.norm(c.cols)?),
        weight: Matrix::new(weights),
        bias: Some(biases),
        p: MatMulParams {
            n_rows: c.n as u32,
            in_features: c.cols as u32,
            out_features: out_features as u32,
            activation: if c.glu { Activation::SiluGlu } else { Activation::None } as u32,
            // Gate and up in several pieces are not added to what is there.
            accumulate: (!c.glu || c.pieces == 1) as u32,
            eps: 1e-6,
        },
    }
    .into())
}

#[test]
fn every_width_of_a_batch() {
    let mut cases = Vec::new();
    for (format, widths) in [
        (Format::Bf16, &[1, 2, 4, 7, 13, 16, 17][..]),
        (Format::F32, &[1, 13, 17]),
        (Format::F16, &[1, 13, 17]),
        (Format::Fp8, &[1, 17]),
        (Format::Nvfp4, &[1, 4, 13, 17]),
        (Format::Mxfp4, &[1, 13]),
    ] {
        for &n in widths {
            // Gate and up lie in one piece; in two they are in the conformance table.
            for (glu, pieces, rows) in [(false, 2, 37), (true, 1, 74)] {
                let cols = if format.group().is_some() { 160 } else { 136 };
                let c = Product { n, pieces, rows, cols, glu, format };
                cases.push(case(format!("matmul {format} n={n} glu={glu}"), move |a| matmul(a, c)));
            }
        }
    }
    // More columns than meet in workgroup memory at a time.
    for format in [Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
        let c = Product { n: 1, pieces: 1, rows: 20, cols: 4128, glu: true, format };
        cases.push(case(format!("matmul {format} of {} columns", c.cols), move |a| matmul(a, c)));
    }
    check(cases);
}

/// On a device that binds little: gate and up in windows that end at different rows of their pieces, and a table in windows.
#[test]
fn matrices_larger_than_a_binding() {
    let mut cases = Vec::new();
    for (n, glu) in [(1, false), (3, true), (20, true)] {
        for (format, cols) in [(Format::Bf16, 512), (Format::Nvfp4, 2048)] {
            let c = Product { n, pieces: 4, rows: 2200, cols, glu, format };
            cases.push(case(format!("matmul {format} in windows n={n} glu={glu}"), move |a| matmul(a, c)));
        }
    }
    cases.push(case("embed in windows".into(), |a| {
        let (n, vocab, hidden) = (9, 700, 1000);
        Ok(Embed {
            out: a.output(n * hidden)?,
            ids: a.input(n, Fill::Below(vocab as i32))?,
            table: a.weight(Format::F32, vocab, hidden, 1.0)?,
            p: EmbedParams { n_rows: n as u32, hidden: hidden as u32, vocab: vocab as u32 },
        }
        .into())
    }));
    check(cases);
}

/// Ten experts in a chunk each: more chunks than a window has.
fn experts(a: &mut Arena<'_>, format: Format, n: usize, top_k: usize, hidden: usize) -> Result<Op> {
    let n_experts = 10;
    let intermediate = if format.group().is_some() { 32 } else { 40 };
    let record = record(format, hidden, intermediate);
    let mut chunks = Vec::new();
    for _ in 0..n_experts {
        chunks.push(a.records(&record, 1, 0.2)?);
    }
    let slots: Vec<i32> = (0..n_experts as i32).map(|expert| expert * 7 % n_experts as i32).collect();
    let table = a.fixed(&slots)?;
    let pool =
        ExpertPool { record, n_layers: 1, n_experts, chunks, slots_per_chunk: 1, table, banks: Vec::new() };
    // Few rows choose anything, most choose the first experts; every sixth is padding.
    let ids = (0..n).flat_map(|row| {
        let first = if row % 5 == 0 { row % n_experts } else { row % 3 };
        (0..top_k).map(move |k| if row % 6 == 5 { -1 } else { ((first + k) % n_experts) as i32 })
    });
    Ok(ExpertMlp {
        parts: a.updated(n * top_k * hidden, Fill::Uniform(0.5))?,
        x: a.input(n * hidden, Fill::Uniform(1.0))?,
        ids: a.fixed(&ids.collect::<Vec<i32>>())?,
        weights: a.input(n * top_k, Fill::Uniform(1.0))?,
        experts: Experts::Pool { pool: pool.into(), layer: 0 },
        p: ExpertMlpParams {
            n_rows: n as u32,
            top_k: top_k as u32,
            hidden: hidden as u32,
            intermediate: intermediate as u32,
            n_experts: n_experts as u32,
            in_place: 0,
        },
    }
    .into())
}

/// One row, few rows, few routes an expert, many routes an expert; and rows of odd width.
#[test]
fn every_walk_through_routes() {
    let mut cases = Vec::new();
    let mut add = |format: Format, n, hidden| {
        let name = format!("expert_mlp {format} n={n} hidden={hidden}");
        cases.push(case(name, move |a| experts(a, format, n, 2, hidden)));
    };
    for (n, hidden) in [(1, 72), (4, 72), (16, 72), (40, 72), (70, 72), (200, 72), (1, 50), (90, 50)] {
        add(Format::Bf16, n, hidden);
    }
    for n in [1, 16, 200] {
        add(Format::F32, n, 72);
        add(Format::F16, n, 72);
    }
    for (n, hidden) in [(1, 96), (16, 96), (40, 96), (200, 96), (1, 2080)] {
        add(Format::Fp8, n, hidden);
        add(Format::Nvfp4, n, hidden);
        add(Format::Mxfp4, n, hidden);
    }
    check(cases);
}

/// On a device that binds little: a span in each of three windows of slots. Keys are wide, so that many threads share a column.
#[test]
fn states_larger_than_a_binding() {
    check(vec![case("gated_delta in windows".into(), |a| {
        let (heads, key_dim, value_dim, n_slots, n) = (3, 520, 70, 11, 9);
        let p = GatedDeltaParams {
            n_rows: n as u32,
            n_sequences: 4,
            n_slots: n_slots as u32,
            n_key_heads: 1,
            n_value_heads: heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            z_width: (heads * value_dim) as u32,
            z_start: 0,
            ba_width: 2 * heads as u32,
            ba_start: 0,
            eps: 1e-6,
        };
        let constants = a.input(2 * heads + value_dim, Fill::Uniform(1.0))?;
        Ok(GatedDelta {
            out: a.output(n * heads * value_dim)?,
            state: a.updated(n_slots * p.state_values() as usize, Fill::Uniform(0.5))?,
            qkv: a.input(n * p.qkv_width() as usize, Fill::Uniform(1.0))?,
            z: a.input(n * heads * value_dim, Fill::Uniform(2.0))?,
            ba: a.input(n * 2 * heads, Fill::Uniform(2.0))?,
            constants: Weight::plain(constants, Format::F32, 1, 2 * heads + value_dim),
            // First row, end, slot, and whether it resumes.
            spans: a.fixed(&[[0, 3, 10, 1], [3, 4, 0, 1], [4, 4, 0, 0], [4, 9, 5, 0]])?,
            p,
        }
        .into())
    })]);
}
