//! Programs: dispatches that are encoded again at each replay, with a stop at each route point.

use freetoken_backend::{Program, Result, RouteServer, Stage, View};
use wgpu::{BufferDescriptor, BufferUsages};

use crate::{
    Wgpu,
    commands::Commands,
    device::State,
    dispatch::{Dispatch, Recorder},
    memory::buffer,
    ops,
    route_point::RoutePoint,
};

enum Segment {
    Dispatches(Vec<Dispatch>),
    Route(Box<RoutePoint>),
}

/// What the host reads when a replay is done.
struct Output {
    source: wgpu::Buffer,
    at: usize,
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
    pub(crate) fn record(backend: &Wgpu, stages: &[Stage], outputs: &[View]) -> Result<Self> {
        let State { pipelines, scratch, desk, .. } = &mut *backend.lock();
        let mut recorder =
            Recorder { gpu: backend.gpu(), pipelines, scratch, dispatches: Vec::new(), work: 0 };
        let mut segments = Vec::new();
        for stage in stages {
            match stage {
                Stage::Ops(ops) => ops.iter().for_each(|op| ops::record(op, &mut recorder)),
                Stage::Route(point) => {
                    segments.push(Segment::Dispatches(std::mem::take(&mut recorder.dispatches)));
                    let point = RoutePoint::record(&point.mlp, desk, &mut recorder)?;
                    segments.push(Segment::Route(Box::new(point)));
                }
            }
        }
        segments.push(Segment::Dispatches(recorder.dispatches));
        let output = |view: &View| {
            let words = vec![0; view.bytes() / 4];
            Output { source: buffer(view.buffer()).clone(), at: view.range().start, words }
        };
        let outputs: Vec<Output> = outputs.iter().map(output).collect();
        let words: usize = outputs.iter().map(|output| output.words.len()).sum();
        let mapped = backend.gpu().device.create_buffer(&BufferDescriptor {
            label: None,
            size: 4 * words.max(1) as u64,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        Ok(WgpuProgram { backend: backend.clone(), segments, outputs, mapped })
    }

    /// Copies the outputs out behind everything queued, and waits for it.
    fn finish(outputs: &mut [Output], mapped: &wgpu::Buffer, mut commands: Commands<'_>) -> Result<()> {
        let mut end = 0;
        for output in outputs.iter() {
            let bytes = 4 * output.words.len();
            commands.copy(&output.source, output.at, mapped, end, bytes);
            end += bytes;
        }
        let seq = commands.submit();
        if end == 0 {
            return commands.lanes.wait(seq);
        }
        commands.lanes.mapped(mapped, end as u64, seq, |bytes| {
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
        let State { lanes, staging, desk, .. } = &mut *backend.lock();
        lanes.check()?;
        let mut commands = Commands::new(lanes, backend.gpu());
        for segment in segments {
            match segment {
                Segment::Dispatches(dispatches) => commands.dispatch(dispatches),
                Segment::Route(point) => point.replay(&mut commands, staging, desk, server)?,
            }
        }
        Self::finish(outputs, mapped, commands)
    }

    fn submit(&mut self) -> Result<()> {
        let State { lanes, .. } = &mut *self.backend.lock();
        lanes.check()?;
        let mut commands = Commands::new(lanes, self.backend.gpu());
        for segment in &self.segments {
            match segment {
                Segment::Dispatches(dispatches) => commands.dispatch(dispatches),
                Segment::Route(_) => unreachable!("a program with a route point is replayed"),
            }
        }
        commands.submit();
        Ok(())
    }

    fn output(&self, i: usize) -> &[u32] {
        &self.outputs[i].words
    }
}
