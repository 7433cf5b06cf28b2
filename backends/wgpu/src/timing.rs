//! The time of single ops, for benches: a time stamp before and behind each where the device can write one, else the host's clock.

use std::time::Instant;

use freetoken_backend::{Result, View};
use wgpu::{
    BufferDescriptor, BufferUsages, ComputePassDescriptor, ComputePassTimestampWrites, Features,
    QuerySetDescriptor, QueryType,
};

use crate::{
    device::Gpu,
    dispatch::{Call, Dispatch, Recorder},
    kernels::READ,
    memory::{Slot, buffer},
    queue::Lanes,
};

/// Bytes of a time stamp.
const STAMP_BYTES: u64 = 8;
/// Bytes that a workgroup of the read kernel reads.
const READ_BYTES: usize = 64 << 10;

/// Runs each list of dispatches by itself, in order; seconds of each.
pub(crate) fn time(lanes: &mut Lanes, gpu: &Gpu, timed: &[Vec<Dispatch>]) -> Result<Vec<f64>> {
    lanes.check()?;
    let one = if gpu.device.features().contains(Features::TIMESTAMP_QUERY) { by_stamps } else { by_clock };
    timed.iter().map(|dispatches| one(lanes, gpu, dispatches)).collect()
}

fn by_stamps(lanes: &mut Lanes, gpu: &Gpu, dispatches: &[Dispatch]) -> Result<f64> {
    let set =
        gpu.device.create_query_set(&QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 });
    let stamps = |usage| {
        let size = 2 * STAMP_BYTES;
        gpu.device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let resolved = stamps(BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC);
    let mapped = stamps(BufferUsages::MAP_READ | BufferUsages::COPY_DST);
    let mut encoder = lanes.encoder();
    let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor {
        label: None,
        timestamp_writes: Some(ComputePassTimestampWrites {
            query_set: &set,
            beginning_of_pass_write_index: Some(0),
            end_of_pass_write_index: Some(1),
        }),
    });
    dispatches.iter().for_each(|dispatch| dispatch.encode(&mut pass));
    drop(pass);
    encoder.resolve_query_set(&set, 0..2, &resolved, 0);
    encoder.copy_buffer_to_buffer(&resolved, 0, &mapped, 0, Some(2 * STAMP_BYTES));
    let seq = lanes.submit(Some(encoder));
    let mut ticks = [0_u64; 2];
    lanes.mapped(&mapped, 2 * STAMP_BYTES, seq, |bytes| {
        bytemuck::cast_slice_mut(&mut ticks).copy_from_slice(bytes);
    })?;
    Ok(ticks[1].saturating_sub(ticks[0]) as f64 * f64::from(lanes.nanoseconds_a_tick()) * 1e-9)
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
