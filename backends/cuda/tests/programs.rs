//! Programs beside each other, steps that break off, and what a replay allocates; on the first card of this machine.

#![allow(unsafe_code, reason = "an allocator that counts")]
#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    io::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::{Duration, Instant},
};

use freetoken_backend::{
    Activation, Backend, Banked, Banks, Error, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Fetch,
    Format, MatMul, MatMulParams, Matrix, NoRoutePoints, Op, Precision, RouteAsk, RoutePoint, RouteReply,
    RouteServer, Stage, TableChange, View, Weight, record,
};
use freetoken_cuda::{CardChoice, Cuda, CudaOptions, Submission, cards};

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: the system's allocator does the work; counting touches a thread-local number without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: usize = 64;
const EXPERTS: usize = 6;

/// The first card in both ways of submission; empty where there is none.
fn backends(precision: Precision) -> Vec<Cuda> {
    if let Err(error) = cards() {
        // Past the harness, which hides what a passing test prints.
        let text = format!("SKIPPED: {error}; no program of the CUDA backend was run\n");
        std::io::stderr().write_all(text.as_bytes()).expect("standard error");
        return Vec::new();
    }
    let open = |submission| Cuda::open(&CardChoice::First, CudaOptions { precision, submission }).unwrap();
    vec![open(Submission::Staged), open(Submission::Graph)]
}

/// `out = factor * x`
fn scale(cuda: &Cuda, factor: f32, x: &View, out: &View) -> Op {
    let mut w = vec![0.0_f32; WIDTH * WIDTH];
    (0..WIDTH).for_each(|i| w[i * WIDTH + i] = factor);
    let view = cuda.alloc(w.len() * 4).unwrap().whole();
    cuda.write(&view, bytemuck::cast_slice(&w)).unwrap();
    MatMul {
        out: out.clone(),
        x: x.clone(),
        rows: None,
        norm: None,
        weight: Matrix::from(Weight::plain(view, Format::F32, WIDTH, WIDTH)),
        bias: None,
        p: MatMulParams {
            n_rows: 1,
            in_features: WIDTH as u32,
            out_features: WIDTH as u32,
            activation: Activation::None as u32,
            accumulate: 0,
            eps: 0.0,
        },
    }
    .into()
}

fn vector(cuda: &Cuda) -> View {
    cuda.alloc(WIDTH * 4).unwrap().whole()
}

fn floats(words: &[u32]) -> &[f32] {
    bytemuck::cast_slice(words)
}

#[test]
fn two_programs_and_eager_runs_share_a_card() {
    for cuda in backends(Precision::F32) {
        let (x, y, z) = (vector(&cuda), vector(&cuda), vector(&cuda));
        let (twice, thrice, back) =
            (scale(&cuda, 2.0, &x, &y), scale(&cuda, 3.0, &y, &z), scale(&cuda, 0.5, &z, &x));
        let mut first = cuda.record(&[Stage::Ops(vec![twice])], std::slice::from_ref(&y)).unwrap();
        let mut second = cuda.record(&[Stage::Ops(vec![thrice])], std::slice::from_ref(&z)).unwrap();
        cuda.write(&x, bytemuck::cast_slice(&[1.0_f32; WIDTH])).unwrap();
        let mut value = 1.0;
        for _ in 0..5 {
            first.replay(&mut NoRoutePoints).unwrap();
            second.replay(&mut NoRoutePoints).unwrap();
            cuda.run(std::slice::from_ref(&back)).unwrap();
            assert_eq!(floats(first.output(0)), [2.0 * value; WIDTH]);
            assert_eq!(floats(second.output(0)), [6.0 * value; WIDTH]);
            value *= 3.0;
        }
        drop(first);
        second.replay(&mut NoRoutePoints).unwrap();
        assert_eq!(floats(second.output(0)), [2.0 * value; WIDTH], "y was not written again");
    }
}

#[test]
fn a_code_that_is_no_number_gives_none() {
    // Rows of a kernel of decode, of one more, and of tiles.
    for (precision, n_rows) in
        [Precision::F32, Precision::Auto].into_iter().flat_map(|p| [(p, 1), (p, 5), (p, 40)])
    {
        let Some(cuda) = backends(precision).pop() else { return };
        for (format, what) in [(Format::Fp8, "code"), (Format::Mxfp4, "scale")] {
            let banks = Banks::new(0, format, WIDTH, WIDTH);
            let mut bytes = vec![0x22; banks.end()];
            if format == Format::Fp8 {
                bytes[banks.scales.clone()]
                    .chunks_exact_mut(4)
                    .for_each(|b| b.copy_from_slice(&1.0_f32.to_ne_bytes()));
            }
            // In row 3 the last column, or its group.
            match format {
                Format::Fp8 => bytes[4 * WIDTH - 1] = 0xff,
                _ => bytes[banks.scales.start + 4 * format.scale_row_bytes(WIDTH) - 1] = 0xff,
            }
            let memory = cuda.alloc(banks.end()).unwrap().whole();
            cuda.write(&memory, &bytes).unwrap();
            let rows = || cuda.alloc(n_rows * WIDTH * 4).unwrap().whole();
            let (x, out) = (rows(), rows());
            cuda.write(&x, bytemuck::cast_slice(&vec![1.0_f32; n_rows * WIDTH])).unwrap();
            let op = MatMul {
                out: out.clone(),
                x,
                rows: None,
                norm: None,
                weight: Matrix::from(Weight::in_banks(&memory, &banks, format, WIDTH, WIDTH)),
                bias: None,
                p: MatMulParams {
                    n_rows: n_rows as u32,
                    in_features: WIDTH as u32,
                    out_features: WIDTH as u32,
                    activation: Activation::None as u32,
                    accumulate: 0,
                    eps: 0.0,
                },
            };
            cuda.run(&[op.into()]).unwrap();
            let mut got = vec![0.0_f32; n_rows * WIDTH];
            cuda.read(&out, bytemuck::cast_slice_mut(&mut got)).unwrap();
            for (i, value) in got.iter().enumerate() {
                assert_eq!(value.is_nan(), i % WIDTH == 3, "{format} {what}, {n_rows} rows: {i} is {value}");
            }
        }
    }
}

/// Bytes of an expert.
fn record_bytes() -> usize {
    record(Format::F32, WIDTH, WIDTH).bytes
}

/// Whether the device rings for the host inside of a graph.
fn rings(cuda: &Cuda) -> bool {
    cuda.caps().detail.contains("graphs")
}

/// Takes every expert's slot.
fn evict(cuda: &Cuda, pool: &ExpertPool) {
    cuda.write(&pool.table, bytemuck::cast_slice(&[-1_i32; EXPERTS])).unwrap();
}

/// A program of one route point with equal rows, over a pool of two slots; its output are the rows of the routes.
fn one_route_point(cuda: &Cuda, n_rows: usize) -> (Box<dyn freetoken_backend::Program>, Arc<ExpertPool>) {
    let record = record(Format::F32, WIDTH, WIDTH);
    let mut bank = cuda.alloc_host(EXPERTS * record.bytes).unwrap();
    for (i, value) in bank.as_mut_slice().chunks_exact_mut(4).enumerate() {
        value.copy_from_slice(&((i % 7) as f32 * 0.01).to_ne_bytes());
    }
    let table = cuda.alloc(EXPERTS * 4).unwrap().whole();
    let pool = Arc::new(ExpertPool {
        chunks: vec![cuda.alloc(2 * record.bytes).unwrap()],
        slots_per_chunk: 2,
        n_layers: 1,
        n_experts: EXPERTS,
        table,
        banks: vec![Arc::new(bank)],
        record,
    });
    evict(cuda, &pool);
    let filled = |values: &[u32]| {
        let view = cuda.alloc(values.len() * 4).unwrap().whole();
        cuda.write(&view, bytemuck::cast_slice(values)).unwrap();
        view
    };
    let mlp = ExpertMlp {
        parts: cuda.alloc(n_rows * 2 * WIDTH * 4).unwrap().whole(),
        x: filled(&vec![1.0_f32.to_bits(); n_rows * WIDTH]),
        ids: filled(&[1, 4].repeat(n_rows)),
        weights: filled(&vec![0.5_f32.to_bits(); n_rows * 2]),
        experts: Experts::Pool { pool: pool.clone(), layer: 0 },
        p: ExpertMlpParams {
            n_rows: n_rows as u32,
            top_k: 2,
            hidden: WIDTH as u32,
            intermediate: WIDTH as u32,
            n_experts: EXPERTS as u32,
            in_place: 0,
        },
    };
    let parts = mlp.parts.clone();
    (cuda.record(&[Stage::Route(RoutePoint { mlp })], &[parts]).unwrap(), pool)
}

/// A server that gives nothing to the host.
struct Decide<F>(F);

impl<F: FnMut(&RouteAsk<'_>, &mut RouteReply) -> freetoken_backend::Result<()>> RouteServer for Decide<F> {
    fn answer(&mut self, ask: &RouteAsk<'_>, reply: &mut RouteReply) -> freetoken_backend::Result<()> {
        self.0(ask, reply)
    }

    fn compute(&mut self, _: &RouteAsk<'_>, _: &[u32], _: &mut [f32]) -> freetoken_backend::Result<()> {
        unreachable!("nothing was given to the host")
    }
}

fn in_place(_: &RouteAsk<'_>, reply: &mut RouteReply) -> freetoken_backend::Result<()> {
    reply.read_in_place.extend([1, 4].map(Banked::own));
    Ok(())
}

fn fetched(_: &RouteAsk<'_>, reply: &mut RouteReply) -> freetoken_backend::Result<()> {
    reply.table.extend([TableChange { entry: 1, slot: 1 }, TableChange { entry: 4, slot: 0 }]);
    reply.fetch.extend([(1, 1), (4, 0)].map(|(expert, slot)| Fetch { from: Banked::own(expert), slot }));
    Ok(())
}

fn nothing(_: &RouteAsk<'_>, _: &mut RouteReply) -> freetoken_backend::Result<()> {
    Ok(())
}

#[test]
fn a_step_that_breaks_off_ends_soon_and_leaves_the_program_usable() {
    for cuda in backends(Precision::F32) {
        let (mut program, _pool) = one_route_point(&cuda, 1);
        program.replay(&mut Decide(in_place)).unwrap();
        let expected = program.output(0).to_vec();
        assert!(floats(&expected).iter().all(|value| value.is_finite() && *value != 0.0));

        let start = Instant::now();
        let refused = program.replay(&mut Decide(|ask: &RouteAsk<'_>, _: &mut RouteReply| {
            Err(Error::StepFailed { layer: ask.layer, why: "no".into() })
        }));
        assert!(matches!(refused, Err(Error::StepFailed { layer: 0, .. })), "{refused:?}");
        let forgotten = program.replay(&mut Decide(nothing));
        assert!(
            matches!(&forgotten, Err(Error::StepFailed { why, .. }) if why.contains("expert 1")),
            "{forgotten:?}"
        );
        let killed = catch_unwind(AssertUnwindSafe(|| {
            program
                .replay(&mut Decide(|_: &RouteAsk<'_>, _: &mut RouteReply| panic!("the serving thread dies")))
        }));
        assert!(killed.is_err());
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());

        program.replay(&mut Decide(in_place)).unwrap();
        assert_eq!(program.output(0), expected);
        program.replay(&mut Decide(fetched)).unwrap();
        assert_eq!(program.output(0), expected, "a record gives the same rows from wherever it is read");
        program.replay(&mut Decide(nothing)).unwrap();
        assert_eq!(program.output(0), expected, "both experts have a slot now");
    }
}

#[test]
fn a_host_that_is_late_fails_the_step_and_not_the_next() {
    for cuda in backends(Precision::F32).into_iter().filter(rings) {
        let (mut program, _pool) = one_route_point(&cuda, 1);
        program.replay(&mut Decide(in_place)).unwrap();
        let expected = program.output(0).to_vec();
        let late = program.replay(&mut Decide(|ask: &RouteAsk<'_>, reply: &mut RouteReply| {
            std::thread::sleep(Duration::from_millis(1200));
            in_place(ask, reply)
        }));
        assert!(
            matches!(&late, Err(Error::StepFailed { layer: 0, why }) if why.contains("a second")),
            "{late:?}"
        );
        program.replay(&mut Decide(in_place)).unwrap();
        assert_eq!(program.output(0), expected);
    }
}

#[test]
fn where_all_experts_have_a_slot_nothing_is_left_to_decide() {
    for cuda in backends(Precision::F32).into_iter().filter(rings) {
        let (mut program, _pool) = one_route_point(&cuda, 1);
        program.replay(&mut Decide(fetched)).unwrap();
        let expected = program.output(0).to_vec();
        let unread = program.replay(&mut Decide(fetched));
        assert!(
            matches!(&unread, Err(Error::StepFailed { why, .. }) if why.contains("not empty")),
            "{unread:?}"
        );
        program.replay(&mut Decide(nothing)).unwrap();
        assert_eq!(program.output(0), expected);
    }
}

#[test]
fn the_next_question_tells_how_long_a_fetch_took() {
    for cuda in backends(Precision::F32).into_iter().filter(rings) {
        let (mut program, _pool) = one_route_point(&cuda, 1);
        program.replay(&mut Decide(fetched)).unwrap();
        for expected_bytes in [Some(2 * record_bytes() as u64), None] {
            let mut link = None;
            program
                .replay(&mut Decide(|ask: &RouteAsk<'_>, _: &mut RouteReply| {
                    link = ask.link;
                    Ok(())
                }))
                .unwrap();
            assert_eq!(link.map(|link| link.bytes), expected_bytes);
            assert!(link.is_none_or(|link| link.seconds > 0.0 && link.seconds < 1.0), "{link:?}");
        }
    }
}

#[test]
fn more_rows_than_a_decode_step_are_served_as_well() {
    for cuda in backends(Precision::F32) {
        let (mut one, _pool) = one_route_point(&cuda, 1);
        one.replay(&mut Decide(in_place)).unwrap();
        let (mut many, pool) = one_route_point(&cuda, 17);
        for way in [in_place, fetched, nothing] {
            many.replay(&mut Decide(way)).unwrap();
            for rows in floats(many.output(0)).chunks_exact(2 * WIDTH) {
                let pairs = rows.iter().zip(floats(one.output(0)));
                assert!(
                    pairs.into_iter().all(|(got, expected)| (got - expected).abs() <= 1e-5 * expected.abs())
                );
            }
        }
        evict(&cuda, &pool);
        assert!(many.replay(&mut Decide(nothing)).is_err());
    }
}

#[test]
fn a_replay_allocates_nothing() {
    for cuda in backends(Precision::F32) {
        let (mut program, pool) = one_route_point(&cuda, 1);
        let mut in_every_way = || {
            for way in [in_place, fetched, nothing] {
                program.replay(&mut Decide(way)).unwrap();
            }
            evict(&cuda, &pool);
        };
        // The driver's library finds a function when it is first called.
        in_every_way();
        let before = ALLOCATIONS.get();
        (0..3).for_each(|_| in_every_way());
        assert_eq!(ALLOCATIONS.get(), before);
    }
}

#[test]
fn each_op_of_a_list_is_timed() {
    for cuda in backends(Precision::F32) {
        let (x, y) = (vector(&cuda), vector(&cuda));
        cuda.write(&x, bytemuck::cast_slice(&[1.0_f32; WIDTH])).unwrap();
        let ops = [scale(&cuda, 2.0, &x, &y), scale(&cuda, 2.0, &y, &x)];
        let seconds = cuda.time(&ops).unwrap();
        assert!(seconds.len() == 2 && seconds.iter().all(|&s| s > 0.0 && s < 1.0), "{seconds:?}");
        let mut words = [0_u32; WIDTH];
        cuda.read(&x, bytemuck::cast_slice_mut(&mut words)).unwrap();
        assert_eq!(floats(&words), [4.0; WIDTH]);
    }
}
