//! The time of single ops and of dispatches that do nothing, for benches: a time stamp before and behind each where the device can write
//! one, else the host's clock; and the time of copies within a program.

use std::time::{Duration, Instant};

use freetoken_backend::{KernelCosts, Result, View};
use wgpu::{
    BufferDescriptor, BufferUsages, CommandEncoder, ComputePassDescriptor, ComputePassTimestampWrites,
    Features, QuerySet, QuerySetDescriptor, QueryType,
};

use crate::{
    device::Gpu,
    dispatch::{Call, Dispatch, Recorder},
    kernels::{EMPTY, MULTIPLY, READ},
    memory::{Slot, buffer},
    queue::Lanes,
};

/// What time stamps take: around a pass, and between copies.
pub(crate) const STAMPS: Features =
    Features::TIMESTAMP_QUERY.union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
/// Bytes of a time stamp.
const STAMP_BYTES: u64 = 8;
/// Bytes that a workgroup of the read kernel reads.
const READ_BYTES: usize = 64 << 10;
/// Steps of a thread that multiplies, workgroups of 256 such threads, and those that a CPU plays.
const STEPS: u32 = 2048;
const MULTIPLYING: u32 = 8192;
const SOFTWARE_MULTIPLYING: u32 = 32;
/// Operations of a thread in a step, as multiply.wgsl does it.
const STEP_FLOPS: u32 = 8 * 4 * 2;

/// Runs each list of dispatches by itself, in order; seconds of each.
pub(crate) fn time(lanes: &mut Lanes, gpu: &Gpu, timed: &[Vec<Dispatch>]) -> Result<Vec<f64>> {
    lanes.check()?;
    let one = if gpu.device.features().contains(Features::TIMESTAMP_QUERY) { by_stamps } else { by_clock };
    timed.iter().map(|dispatches| one(lanes, gpu, dispatches)).collect()
}

/// Measurements of which the best counts.
const TRIES: usize = 5;

/// The same of a few runs each, at best.
pub(crate) fn best_of<const N: usize>(
    lanes: &mut Lanes,
    gpu: &Gpu,
    timed: &[Vec<Dispatch>; N],
) -> Result<[f64; N]> {
    let mut best = [f64::INFINITY; N];
    for _ in 0..TRIES {
        for (best, seconds) in best.iter_mut().zip(time(lanes, gpu, timed)?) {
            *best = best.min(seconds);
        }
    }
    Ok(best)
}

/// Two time stamps.
pub(crate) struct Stamps {
    set: QuerySet,
    /// u64: both, in ticks, once they are [`Stamps::resolve`]d.
    pub(crate) ticks: wgpu::Buffer,
}

impl Stamps {
    /// Bytes of both.
    pub(crate) const BYTES: usize = 2 * STAMP_BYTES as usize;

    /// Stamps that are written between copies; `None` where the device cannot do that.
    pub(crate) fn between_copies(gpu: &Gpu) -> Option<Self> {
        gpu.device.features().contains(STAMPS).then(|| Stamps::new(gpu))
    }

    fn new(gpu: &Gpu) -> Self {
        let query = QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 };
        let ticks = BufferDescriptor {
            label: None,
            size: 2 * STAMP_BYTES,
            usage: BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        };
        Stamps { set: gpu.device.create_query_set(&query), ticks: gpu.device.create_buffer(&ticks) }
    }

    /// Writes one of them behind everything before it.
    pub(crate) fn write(&self, i: u32, encoder: &mut CommandEncoder) {
        encoder.write_timestamp(&self.set, i);
    }

    /// Puts both where they can be copied from.
    pub(crate) fn resolve(&self, encoder: &mut CommandEncoder) {
        encoder.resolve_query_set(&self.set, 0..2, &self.ticks, 0);
    }
}

/// Seconds from one stamp to the next.
pub(crate) fn seconds(ticks: [u64; 2], lanes: &Lanes) -> f64 {
    ticks[1].saturating_sub(ticks[0]) as f64 * f64::from(lanes.nanoseconds_a_tick()) * 1e-9
}

fn by_stamps(lanes: &mut Lanes, gpu: &Gpu, dispatches: &[Dispatch]) -> Result<f64> {
    let stamps = Stamps::new(gpu);
    let mapped = gpu.device.create_buffer(&BufferDescriptor {
        label: None,
        size: 2 * STAMP_BYTES,
        usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = lanes.encoder();
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor {
        label: None,
        timestamp_writes: Some(ComputePassTimestampWrites {
            query_set: &stamps.set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        }),
    });
    dispatches.iter().for_each(|dispatch| dispatch.encode(&mut pass));
    drop(pass);
    stamps.resolve(&mut encoder);
    encoder.copy_buffer_to_buffer(&stamps.ticks, 0, &mapped, 0, Some(2 * STAMP_BYTES));
    let seq = lanes.submit(Some(encoder));
    let mut ticks = [0_u64; 2];
    lanes.mapped(&mapped, 2 * STAMP_BYTES, seq, Duration::ZERO, |bytes| {
        bytemuck::cast_slice_mut(&mut ticks).copy_from_slice(bytes);
    })?;
    Ok(seconds(ticks, lanes))
}

fn by_clock(lanes: &mut Lanes, _gpu: &Gpu, dispatches: &[Dispatch]) -> Result<f64> {
    let mut encoder = lanes.encoder();
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
    dispatches.iter().for_each(|dispatch| dispatch.encode(&mut pass));
    drop(pass);
    let start = Instant::now();
    let seq = lanes.submit(Some(encoder));
    lanes.wait(seq)?;
    Ok(start.elapsed().as_secs_f64())
}

/// Reads a view once.
pub(crate) fn record_read(view: &View, recorder: &mut Recorder<'_>) {
    let align = recorder.gpu.align();
    let window = (recorder.gpu.max_binding() - 2 * align as usize) / READ_BYTES * READ_BYTES;
    let seen = Slot::whole(&recorder.scratch.get(recorder.gpu, "read.seen", 4));
    for start in (0..view.bytes()).step_by(window) {
        let bytes = window.min(view.bytes() - start);
        let at = (view.range().start + start) as u64;
        let part = Slot::part(buffer(view.buffer()), at, bytes as u64, align);
        recorder.call(Call {
            kernel: &READ,
            constants: vec![("VECS", (READ_BYTES / 16 / 256) as u32)],
            params: &[(bytes / 16) as u32, part.at(4) / 4],
            slots: vec![seen.clone(), part],
            chunks: &[],
            workgroups: recorder.grid(bytes.div_ceil(READ_BYTES)),
        });
    }
}

/// Multiplies out of registers; how many floating-point operations that is.
pub(crate) fn record_multiply(recorder: &mut Recorder<'_>) -> f64 {
    let workgroups = if recorder.gpu.software { SOFTWARE_MULTIPLYING } else { MULTIPLYING };
    let seen = Slot::whole(&recorder.scratch.get(recorder.gpu, "multiply.seen", 4));
    recorder.call(Call {
        kernel: &MULTIPLY,
        constants: Vec::new(),
        params: &[STEPS, 0.5_f32.to_bits()],
        slots: vec![seen],
        chunks: &[],
        workgroups: [workgroups, 1, 1],
    });
    f64::from(workgroups) * 256.0 * f64::from(STEPS) * f64::from(STEP_FLOPS)
}

/// So many dispatches that do nothing, each of which waits for the one before it, as the ops of a step do: it binds what that one wrote.
pub(crate) fn record_empty(n: usize, recorder: &mut Recorder<'_>) {
    let two = ["empty.a", "empty.b"].map(|name| Slot::whole(&recorder.scratch.get(recorder.gpu, name, 4)));
    for i in 0..n {
        recorder.call(Call {
            kernel: &EMPTY,
            constants: Vec::new(),
            slots: vec![two[i % 2].clone(), two[(i + 1) % 2].clone()],
            chunks: &[],
            params: &[0],
            workgroups: [1, 1, 1],
        });
    }
}

/// What dispatches cost, `n_kernels` of which the ops are. `chains` are those of [`record_empty`]: one dispatch, and [`KernelCosts::CHAINS`].
pub(crate) fn kernel_costs(
    lanes: &mut Lanes,
    gpu: &Gpu,
    n_kernels: usize,
    chains: &[Vec<Dispatch>; 3],
) -> Result<KernelCosts> {
    let [alone, few, many] = best_of(lanes, gpu, chains)?;
    Ok(KernelCosts { n_kernels, empty_kernel: KernelCosts::of_one([few, many]), empty_op: alone })
}
