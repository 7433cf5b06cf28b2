//! Programs: dispatches that are encoded again at each replay, cut into bounded submissions, with a stop at each route point.

use freetoken_backend::{Program, Result, RouteServer, Stage, View};
use wgpu::{BufferDescriptor, BufferUsages, ComputePassDescriptor};

use crate::{
    Wgpu,
    device::{Gpu, State},
    dispatch::{Dispatch, Recorder},
    memory::buffer,
    ops,
    queue::Lanes,
    route_point::RoutePoint,
};

/// Floating-point operations of a submission, roughly: far below what a driver's watchdog allows on a small GPU.
const WORK: u64 = 200_000_000_000;
/// The same where a CPU plays the GPU.
const SOFTWARE_WORK: u64 = 10_000_000_000;
/// Dispatches of the first submission, so that the device starts early; each further one has twice as many.
const FIRST_DISPATCHES: usize = 8;
/// Dispatches of a submission, at most.
const DISPATCHES: usize = 64;

/// Queues dispatches, in submissions of bounded work.
pub(crate) fn submit(lanes: &mut Lanes, dispatches: &[Dispatch], gpu: &Gpu) {
    let most = if gpu.software { SOFTWARE_WORK } else { WORK };
    let mut rest = dispatches;
    let mut n_next = FIRST_DISPATCHES;
    while !rest.is_empty() {
        let mut work = 0;
        let fits = rest.iter().take_while(|dispatch| {
            work += dispatch.work;
            work <= most
        });
        let n = fits.take(n_next).count().max(1);
        n_next = DISPATCHES.min(2 * n_next);
        let mut encoder = lanes.encoder();
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        rest[..n].iter().for_each(|dispatch| dispatch.encode(&mut pass));
        drop(pass);
        lanes.submit(Some(encoder));
        rest = &rest[n..];
    }
}

enum Segment {
    Dispatches(Vec<Dispatch>),
    Route(Box<RoutePoint>),
}

/// What the host reads when a replay is done.
struct Output {
    source: wgpu::Buffer,
    at: u64,
    words: Vec<u32>,
}

pub(crate) struct WgpuProgram {
    backend: Wgpu,
    segments: Vec<Segment>,
    outputs: Vec<Output>,
    /// All outputs, one behind the other.
    mapped: wgpu::Buffer,
}

impl WgpuProgram {
    /// The stages are checked and supported.
    pub(crate) fn record(backend: &Wgpu, stages: &[Stage], outputs: &[View]) -> Self {
        let State { pipelines, scratch, .. } = &mut *backend.lock();
        let mut recorder =
            Recorder { gpu: backend.gpu(), pipelines, scratch, dispatches: Vec::new(), work: 0 };
        let mut segments = Vec::new();
        for stage in stages {
            match stage {
                Stage::Ops(ops) => ops.iter().for_each(|op| ops::record(op, &mut recorder)),
                Stage::Route(point) => {
                    segments.push(Segment::Dispatches(std::mem::take(&mut recorder.dispatches)));
                    segments.push(Segment::Route(Box::new(RoutePoint::record(&point.mlp, &mut recorder))));
                }
            }
        }
        segments.push(Segment::Dispatches(recorder.dispatches));
        let output = |view: &View| {
            let words = vec![0; view.bytes() / 4];
            Output { source: buffer(view.buffer()).clone(), at: view.range().start as u64, words }
        };
        let outputs: Vec<Output> = outputs.iter().map(output).collect();
        let words: usize = outputs.iter().map(|output| output.words.len()).sum();
        let mapped = backend.gpu().device.create_buffer(&BufferDescriptor {
            label: None,
            size: 4 * words.max(1) as u64,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        WgpuProgram { backend: backend.clone(), segments, outputs, mapped }
    }

    /// Copies the outputs out behind everything queued, and waits for it.
    fn finish(outputs: &mut [Output], mapped: &wgpu::Buffer, lanes: &mut Lanes) -> Result<()> {
        let mut encoder = lanes.encoder();
        let mut end = 0;
        for output in outputs.iter() {
            let bytes = 4 * output.words.len() as u64;
            encoder.copy_buffer_to_buffer(&output.source, output.at, mapped, end, Some(bytes));
            end += bytes;
        }
        let seq = lanes.submit(Some(encoder));
        if end == 0 {
            return lanes.wait(seq);
        }
        lanes.mapped(mapped, end, seq, |bytes| {
            let mut rest = bytes;
            for output in outputs {
                let (words, behind) = rest.split_at(4 * output.words.len());
                bytemuck::cast_slice_mut(&mut output.words).copy_from_slice(words);
                rest = behind;
            }
        })
    }
}

impl Program for WgpuProgram {
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()> {
        let WgpuProgram { backend, segments, outputs, mapped } = self;
        let State { lanes, staging, .. } = &mut *backend.lock();
        lanes.check()?;
        for segment in segments {
            match segment {
                Segment::Dispatches(dispatches) => submit(lanes, dispatches, backend.gpu()),
                Segment::Route(point) => point.replay(lanes, staging, backend.gpu(), server)?,
            }
        }
        Self::finish(outputs, mapped, lanes)
    }

    fn submit(&mut self) -> Result<()> {
        let State { lanes, .. } = &mut *self.backend.lock();
        lanes.check()?;
        for segment in &self.segments {
            match segment {
                Segment::Dispatches(dispatches) => submit(lanes, dispatches, self.backend.gpu()),
                Segment::Route(_) => unreachable!("a program with a route point is replayed"),
            }
        }
        Ok(())
    }

    fn output(&self, i: usize) -> &[u32] {
        &self.outputs[i].words
    }
}
