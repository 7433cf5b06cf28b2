//! From ops to work: which kernels an op is, what they point to, and how much scratch they need.

use std::{
    ops::Range,
    sync::{Arc, Weak},
};

use freetoken_backend::{Backend, Error, ExpertPool, Experts, Op, Result, Stage, View};

use crate::{
    Cuda, State,
    args::Args,
    driver::{Driver, Kernel, Shape, Span},
    kernels,
    launch::{Arg, Launch, N_COUNTERS},
    memory::{self, CudaMemory, Device},
    modules::Modules,
    program::{CudaProgram, HostReached, Part},
    route_point::{
        bell::{self, BellPoint, Bells},
        staged::{Desk, StagedPoint},
    },
    segment::{self, Segment, Work},
    staging::Staging,
};

/// Outputs lie at multiples of this many bytes of their pinned memory.
const OUTPUT_ALIGN: usize = 256;

/// The kernels of an op and the scratch they share.
pub(crate) struct Plan {
    pub(crate) launches: Vec<Launch>,
    pub(crate) scratch_bytes: usize,
}

/// Plans an op. The error says what this backend lacks.
pub(crate) fn plan(cuda: &Cuda, op: &Op) -> Result<Plan> {
    let unsupported = |why: String| Error::Unsupported { backend: "cuda", op: op.name(), why };
    if matches!(op, Op::ExpertMlp(mlp) if matches!(mlp.experts, Experts::InPlace(_))) {
        return Err(unsupported("experts lie in a pool here".into()));
    }
    if matches!(op, Op::ExpertMlp(mlp) if mlp.p.in_place > 0) && !cuda.caps().reads_host {
        return Err(unsupported("the device does not read host memory".into()));
    }
    let planned = kernels::launches(op, cuda.precision(), cuda.facts());
    let (launches, scratch_bytes) = planned.map_err(|why| unsupported(why.0))?;
    Ok(Plan { launches, scratch_bytes })
}

impl From<Launch> for Plan {
    fn from(launch: Launch) -> Self {
        Plan { launches: vec![launch], scratch_bytes: 0 }
    }
}

/// Where the records of a pool and of one of its banks lie, on the device.
struct ChunkTable {
    pool: Weak<ExpertPool>,
    layer: u32,
    addresses: CudaMemory,
}

/// The chunk tables that kernels were given, each for as long as its pool lives.
#[derive(Default)]
pub(crate) struct ChunkTables(Vec<ChunkTable>);

impl ChunkTables {
    fn of(
        &mut self,
        device: &Arc<Device>,
        staging: &mut Staging,
        pool: &Arc<ExpertPool>,
        layer: u32,
    ) -> Result<Span> {
        let is_known = |table: &&ChunkTable| table.pool.as_ptr() == Arc::as_ptr(pool) && table.layer == layer;
        if let Some(table) = self.0.iter().find(is_known) {
            return Ok(table.addresses.span());
        }
        self.0.retain(|table| table.pool.strong_count() > 0);
        let mut addresses: Vec<u64> =
            pool.chunks.iter().map(|chunk| memory::span(&chunk.whole()).address()).collect();
        if let Some(bank) = pool.banks.get(layer as usize) {
            let bank = memory::host_span(device, bank);
            let chunk_bytes = pool.slots_per_chunk.max(1) * pool.record.bytes;
            addresses
                .extend((0..bank.bytes()).step_by(chunk_bytes).map(|start| bank.address() + start as u64));
        }
        let table = device.alloc(addresses.len() * size_of::<u64>())?;
        staging.write(device, table.span(), bytemuck::cast_slice(&addresses))?;
        let span = table.span();
        self.0.push(ChunkTable { pool: Arc::downgrade(pool), layer, addresses: table });
        Ok(span)
    }
}

/// What the work of an op points to besides its views.
pub(crate) struct Resolver<'a> {
    device: &'a Arc<Device>,
    modules: &'a mut Modules,
    staging: &'a mut Staging,
    chunk_tables: &'a mut ChunkTables,
    counters: Span,
    scratch: Span,
    kernels_wait: bool,
}

impl<'a> Resolver<'a> {
    /// For work that uses this scratch.
    pub(crate) fn new(cuda: &'a Cuda, state: &'a mut State, scratch: Span) -> Self {
        let State { modules, staging, chunk_tables, counters, .. } = state;
        let (device, kernels_wait) = (cuda.device(), cuda.facts().sm_90);
        Resolver { device, modules, staging, chunk_tables, counters: counters.span(), scratch, kernels_wait }
    }

    /// The work of a planned op.
    pub(crate) fn work(&mut self, plan: Plan) -> Result<impl Iterator<Item = Work>> {
        let launches: Result<Vec<Work>> = plan.launches.iter().map(|launch| self.launch(launch)).collect();
        Ok(launches?.into_iter())
    }

    fn launch(&mut self, launch: &Launch) -> Result<Work> {
        let kernel = self.modules.kernel(&self.device.driver, launch)?;
        let args = Args::pack(&launch.args, |arg| self.address(arg))?;
        check_params(&self.device.driver, launch.kernel, &kernel, &args)?;
        let Launch { grid, block, shared_bytes, early, .. } = *launch;
        let early = early && self.kernels_wait;
        Ok(Work::Launch { kernel, shape: Shape { grid, block, shared_bytes }, args, early })
    }

    fn address(&mut self, arg: &Arg) -> Result<u64> {
        Ok(match arg {
            Arg::View(view) => memory::span(view).address(),
            Arg::ChunkTable(pool, layer) => {
                self.chunk_tables.of(self.device, self.staging, pool, *layer)?.address()
            }
            Arg::Scratch(start) => self.scratch.slice(*start..self.scratch.bytes()).address(),
            Arg::Counters => self.counters.address(),
            Arg::Null => 0,
            Arg::Params(_) | Arg::U32(_) => unreachable!("passed by value"),
        })
    }
}

/// Asserts that a kernel declares as many parameters as it is given, each of that size.
fn check_params(driver: &Driver, name: &str, kernel: &Kernel, args: &Args) -> Result<()> {
    let mut given = 0;
    for (i, arg) in args.iter().enumerate() {
        let declared = driver.param_bytes(kernel, i)?;
        assert_eq!(declared, Some(arg.len()), "`{name}`: bytes of parameter {i}");
        given = i + 1;
    }
    assert_eq!(driver.param_bytes(kernel, given)?, None, "`{name}` is given {given} parameters");
    Ok(())
}

/// Memory of [`Arg::Counters`].
pub(crate) fn counters(device: &Arc<Device>) -> Result<CudaMemory> {
    device.alloc(N_COUNTERS * size_of::<u32>())
}

/// Queues ops in the compute stream.
pub(crate) fn run(cuda: &Cuda, state: &mut State, ops: &[Op]) -> Result<()> {
    let device = cuda.device();
    for op in ops {
        op.check();
        let plan = plan(cuda, op)?;
        if state.scratch.span().bytes() < plan.scratch_bytes {
            state.scratch = device.alloc(plan.scratch_bytes)?;
        }
        let scratch = state.scratch.span();
        let work: Vec<Work> = Resolver::new(cuda, state, scratch).work(plan)?.collect();
        segment::queue(device, &work)?;
    }
    Ok(())
}

/// A stage with its kernels, before it is known where they find their scratch.
enum Planned {
    Ops(Vec<Plan>),
    Staged { point: Box<StagedPoint>, experts: Plan },
}

/// Makes a program.
pub(crate) fn record(
    cuda: &Cuda,
    state: &mut State,
    stages: &[Stage],
    outputs: &[View],
) -> Result<CudaProgram> {
    let device = cuda.device();
    let points = stages.iter().filter_map(|stage| match stage {
        Stage::Route(point) => Some(&point.mlp),
        Stage::Ops(_) => None,
    });
    for point in points.clone() {
        assert!(matches!(point.experts, Experts::Pool { .. }), "a route point has a pool");
        Op::from(point.clone()).check();
    }
    let mut reached = match points.clone().next() {
        None => HostReached::Never,
        Some(_) if cuda.rings() && points.clone().all(bell::fits) => {
            HostReached::ByBells(Bells::new(device, points)?)
        }
        Some(_) => HostReached::BetweenSegments(Desk::new(device, points)?),
    };
    let mut scratch_bytes = 0;
    let mut plan_one = |op: &Op| -> Result<Plan> {
        op.check();
        let plan = plan(cuda, op)?;
        scratch_bytes = scratch_bytes.max(plan.scratch_bytes);
        Ok(plan)
    };
    let mut planned = Vec::new();
    let mut rung = Vec::new();
    for stage in stages {
        planned.push(match (stage, &mut reached) {
            (Stage::Ops(ops), _) => Planned::Ops(ops.iter().map(&mut plan_one).collect::<Result<_>>()?),
            (Stage::Route(_), HostReached::Never) => unreachable!("a program with a route point has a host"),
            (Stage::Route(route), HostReached::ByBells(bells)) => {
                let point = Box::new(BellPoint::new(device, &route.mlp, bells));
                let hits = plan_one(&point.hits().clone().into())?;
                let arrivals = plan_one(&point.arrivals().clone().into())?;
                let plans =
                    vec![point.ring().into(), hits, point.take().into(), arrivals, point.rows().into()];
                rung.push(Part::Rung(point));
                Planned::Ops(plans)
            }
            (Stage::Route(route), HostReached::BetweenSegments(desk)) => {
                let point = Box::new(StagedPoint::new(device, &route.mlp, desk));
                let experts = plan_one(&point.mlp.clone().into())?;
                Planned::Staged { point, experts }
            }
        });
    }
    let scratch = device.alloc(scratch_bytes)?;
    let (landing, places) = landing(device, outputs)?;
    let mut resolver = Resolver::new(cuda, state, scratch.span());
    let segment = |work: &mut Vec<Work>| Segment::new(device, cuda.submission(), std::mem::take(work));
    let mut parts = Vec::new();
    let mut work = Vec::new();
    for stage in planned {
        match (stage, &reached) {
            (Planned::Ops(plans), _) => {
                for plan in plans {
                    work.extend(resolver.work(plan)?);
                }
            }
            (Planned::Staged { point, experts }, HostReached::BetweenSegments(desk)) => {
                work.extend(point.question(desk).map(|(dst, src)| Work::Copy { dst, src }));
                parts.push(Part::Segment(segment(&mut work)?));
                let (dst, src) = point.answer(desk);
                work.push(Work::Copy { dst, src });
                work.extend(resolver.work(experts)?);
                parts.push(Part::Staged { point, experts: segment(&mut work)? });
            }
            (Planned::Staged { .. }, _) => unreachable!("planned for a host between segments"),
        }
    }
    work.extend(outputs.iter().zip(&places).map(|(view, place)| Work::Copy {
        dst: landing.span().slice(place.clone()),
        src: memory::span(view).slice(0..place.len()),
    }));
    parts.push(Part::Segment(segment(&mut work)?));
    parts.extend(rung);
    let kept = (stages.to_vec(), outputs.to_vec(), scratch);
    CudaProgram::new(cuda.clone(), parts, reached, landing, places, kept)
}

/// Pinned memory for the outputs, and the bytes of each in it.
fn landing(device: &Arc<Device>, outputs: &[View]) -> Result<(memory::PinnedMemory, Vec<Range<usize>>)> {
    let mut end = 0;
    let places = outputs.iter().map(|view| {
        let start = end;
        end += view.bytes().next_multiple_of(OUTPUT_ALIGN);
        start..start + view.bytes() / 4 * 4
    });
    let places: Vec<_> = places.collect();
    Ok((device.pin(end)?, places))
}
