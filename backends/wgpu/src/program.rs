//! Programs: dispatches that are encoded again at each replay, with a stop at each route point.

use std::time::{Duration, Instant};

use freetoken_backend::{Program, Result, RouteServer, Stage, View};
use wgpu::{BufferDescriptor, BufferUsages};

use crate::{
    Wgpu,
    commands::{Commands, Copy, Run},
    device::State,
    dispatch::Recorder,
    memory::buffer,
    ops,
    route_point::RoutePoint,
};

/// A route point, and the commands up to the next question or to the outputs.
struct Stop {
    point: RoutePoint,
    behind: Run,
}

pub(crate) struct WgpuProgram {
    backend: Wgpu,
    /// Up to the first question, or all of it.
    first: Run,
    stops: Vec<Stop>,
    /// Words of each output.
    outputs: Vec<Vec<u32>>,
    /// All outputs, one behind the other.
    mapped: wgpu::Buffer,
    /// What the last wait for the outputs took. Nothing behind route points, where the cores have other work than to ask.
    waited: Duration,
}

impl WgpuProgram {
    /// The stages are checked and supported.
    pub(crate) fn record(backend: &Wgpu, stages: &[Stage], outputs: &[View]) -> Result<Self> {
        let State { pipelines, scratch, desk, .. } = &mut *backend.lock();
        let mut recorder =
            Recorder { gpu: backend.gpu(), pipelines, scratch, dispatches: Vec::new(), work: 0 };
        let (mut first, mut stops) = (Run::default(), Vec::<Stop>::new());
        for stage in stages {
            let run = stops.last_mut().map_or(&mut first, |stop| &mut stop.behind);
            match stage {
                Stage::Ops(ops) => {
                    ops::record_all(ops, &mut recorder);
                    run.dispatches.append(&mut recorder.dispatches);
                }
                Stage::Route(point) => {
                    let (point, question) = RoutePoint::record(&point.mlp, desk, &mut recorder)?;
                    run.copies.extend(question);
                    stops.push(Stop { point, behind: Run::default() });
                }
            }
        }
        let bytes: usize = outputs.iter().map(View::bytes).sum();
        let mapped = backend.gpu().device.create_buffer(&BufferDescriptor {
            label: None,
            size: bytes.max(4) as u64,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let last = stops.last_mut().map_or(&mut first, |stop| &mut stop.behind);
        let mut at = 0;
        for view in outputs {
            let (src, dst) = (buffer(view.buffer()).clone(), mapped.clone());
            last.copies.push(Copy { src, start: view.range().start, dst, at, bytes: view.bytes() });
            at += view.bytes();
        }
        let outputs = outputs.iter().map(|view| vec![0; view.bytes() / 4]).collect();
        Ok(WgpuProgram { backend: backend.clone(), first, stops, outputs, mapped, waited: Duration::ZERO })
    }

    /// Waits for everything queued, and takes the outputs.
    fn finish(
        outputs: &mut [Vec<u32>],
        mapped: &wgpu::Buffer,
        expected: Duration,
        mut commands: Commands<'_>,
    ) -> Result<()> {
        let seq = commands.submit();
        let bytes: usize = outputs.iter().map(|words| 4 * words.len()).sum();
        if bytes == 0 {
            return commands.lanes.wait(seq);
        }
        commands.lanes.mapped(mapped, bytes as u64, seq, expected, |bytes| {
            let mut rest = bytes;
            for words in outputs {
                let (own, behind) = rest.split_at(4 * words.len());
                bytemuck::cast_slice_mut(words).copy_from_slice(own);
                rest = behind;
            }
        })
    }
}

impl Program for WgpuProgram {
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()> {
        let WgpuProgram { backend, first, stops, outputs, mapped, waited } = self;
        let State { lanes, staging, desk, .. } = &mut *backend.lock();
        lanes.check()?;
        let mut commands = Commands::new(lanes, backend.gpu());
        commands.run(first);
        for Stop { point, behind } in stops.iter_mut() {
            point.replay(behind, &mut commands, staging, desk, server)?;
        }
        let start = Instant::now();
        Self::finish(outputs, mapped, *waited, commands)?;
        if stops.is_empty() {
            *waited = start.elapsed();
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        assert!(self.stops.is_empty(), "a program with a route point is replayed");
        let State { lanes, .. } = &mut *self.backend.lock();
        lanes.check()?;
        let mut commands = Commands::new(lanes, self.backend.gpu());
        commands.dispatch(&self.first.dispatches);
        commands.submit();
        Ok(())
    }

    fn output(&self, i: usize) -> &[u32] {
        &self.outputs[i]
    }
}
