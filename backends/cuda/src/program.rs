//! Programs: segments of work, and the route points that the host serves, over memory that the program keeps.
//!
//! A replay queues one segment and serves its bells in turn. Where the device cannot wait for the host, a route point lies
//! between two segments: the replay waits for the host's copy of the question, lets it be served, queues the answer, the fetches
//! and the experts' work, and goes on. It allocates nothing, and each of its waits is bounded.

use std::{ops::Range, time::Duration};

use cudarc::driver::CudaEvent;
use freetoken_backend::{Error, HostMemory, Program, Result, RouteReply, RouteServer, Stage, View};

use crate::{
    Cuda,
    memory::{CudaMemory, Device, PinnedMemory, WAIT_LIMIT},
    route_point::{
        bell::{self, BellPoint, Bells, Words},
        staged::{Desk, StagedPoint},
    },
    segment::Segment,
};

/// How long a step that broke off waits for what it had queued.
const ABORT_LIMIT: Duration = Duration::from_secs(1);

/// What a program is made of, in the order of its replay.
pub(crate) enum Part {
    /// Work that ends in the question of the route point behind it, or in the outputs.
    Segment(Segment),
    /// A question out of the segment that runs.
    Rung(Box<BellPoint>),
    /// The host's decision and the experts' work.
    Staged {
        /// What is asked and answered.
        point: Box<StagedPoint>,
        /// The answer's way to the device, and the kernels of the experts.
        experts: Segment,
    },
}

/// How the route points of a program reach the host.
pub(crate) enum HostReached {
    /// There are none.
    Never,
    /// Inside one graph.
    ByBells(Bells),
    /// Between two segments.
    BetweenSegments(Desk),
}

/// A recorded program.
pub(crate) struct CudaProgram {
    cuda: Cuda,
    parts: Vec<Part>,
    reached: HostReached,
    /// Outputs, one behind the other.
    landing: PinnedMemory,
    /// Bytes of each output in `landing`.
    outputs: Vec<Range<usize>>,
    reply: RouteReply,
    /// Lies behind the last work queued by a replay.
    done: CudaEvent,
    /// A replay broke off: its work may still run, and what it left is not cleared.
    broken_off: bool,
    /// What the recorded work points to.
    _kept: (Vec<Stage>, Vec<View>, CudaMemory),
}

impl CudaProgram {
    /// Puts a program together. `kept` are the stages, the outputs and the scratch that the parts point to.
    pub(crate) fn new(
        cuda: Cuda,
        parts: Vec<Part>,
        reached: HostReached,
        landing: PinnedMemory,
        outputs: Vec<Range<usize>>,
        kept: (Vec<Stage>, Vec<View>, CudaMemory),
    ) -> Result<Self> {
        let n_experts = kept.0.iter().map(|stage| match stage {
            Stage::Route(point) => point.mlp.p.n_experts as usize,
            Stage::Ops(_) => 0,
        });
        Ok(CudaProgram {
            reply: RouteReply::with_capacity(n_experts.max().unwrap_or(0)),
            done: cuda.device().driver.event()?,
            cuda,
            parts,
            reached,
            landing,
            outputs,
            broken_off: false,
            _kept: kept,
        })
    }

    /// Waits until the work of a replay that broke off is done, and clears what it left.
    fn recover(&mut self, device: &Device) -> Result<()> {
        if self.broken_off {
            device.wait_idle()?;
            if let HostReached::ByBells(bells) = &self.reached {
                bells.reset(device)?;
            }
            self.broken_off = false;
        }
        Ok(())
    }
}

/// Waits for everything queued so far.
fn wait(device: &Device, done: &CudaEvent, layer: u32) -> Result<()> {
    device.driver.record(done, &device.compute)?;
    if device.driver.wait(WAIT_LIMIT, || device.driver.reached(done))? {
        return Ok(());
    }
    let why = format!("the device did not finish within {} s", WAIT_LIMIT.as_secs());
    Err(Error::StepFailed { layer, why })
}

/// Leaves a step: unless it ended well, no kernel waits for the host any more, and what it queued had time to end.
struct Step<'a> {
    device: &'a Device,
    words: Option<&'a Words>,
    broken_off: &'a mut bool,
}

impl Step<'_> {
    fn ended(self) {
        *self.broken_off = false;
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if *self.broken_off {
            self.words.inspect(|words| words.abort());
            // An error here is kept by the driver, and the next replay waits again.
            let _ = self.device.driver.wait(ABORT_LIMIT, || self.device.driver.is_idle(&self.device.compute));
        }
    }
}

impl Program for CudaProgram {
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()> {
        let cuda = self.cuda.clone();
        let _turn = cuda.lock();
        let device = cuda.device();
        device.driver.alive()?;
        self.recover(device)?;
        let CudaProgram { parts, reached, reply, done, broken_off, .. } = self;
        *broken_off = true;
        let (before, words, mut papers, mut desk) = match reached {
            HostReached::Never => (0, None, None, None),
            HostReached::ByBells(bells) => (bells.begin(), Some(&bells.words), Some(&mut bells.papers), None),
            HostReached::BetweenSegments(desk) => (0, None, None, Some(desk)),
        };
        let step = Step { device, words, broken_off };
        let mut layer = 0;
        for part in parts.iter() {
            match part {
                Part::Segment(segment) => segment.queue(device)?,
                Part::Rung(point) => {
                    layer = point.layer();
                    let (words, papers) = words.zip(papers.as_deref_mut()).expect("recorded with bells");
                    point.serve(device, words, papers, before, reply, server)?;
                }
                Part::Staged { point, experts } => {
                    layer = point.layer();
                    let desk = desk.as_deref_mut().expect("recorded with a desk");
                    wait(device, done, layer)?;
                    reply.clear();
                    server.answer(&point.ask(desk), reply)?;
                    point.settle(desk, reply).map_err(|why| Error::StepFailed { layer, why })?;
                    point.apply(device, reply)?;
                    experts.queue(device)?;
                    point.take_host_rows(device, desk, &reply.host, server)?;
                }
            }
        }
        wait(device, done, layer)?;
        if words.is_some_and(Words::failed) {
            return Err(bell::too_late(layer));
        }
        step.ended();
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        let cuda = self.cuda.clone();
        let _turn = cuda.lock();
        let device = cuda.device();
        device.driver.alive()?;
        self.recover(device)?;
        self.parts.iter().try_for_each(|part| match part {
            Part::Segment(segment) => segment.queue(device),
            Part::Rung(_) | Part::Staged { .. } => unreachable!("a program with a route point is replayed"),
        })
    }

    fn output(&self, i: usize) -> &[u32] {
        bytemuck::cast_slice(&self.landing.bytes()[self.outputs[i].clone()])
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        for part in self.parts.drain(..) {
            if let Part::Segment(Segment::Graph(graph))
            | Part::Staged { experts: Segment::Graph(graph), .. } = part
            {
                self.cuda.device().bury_graph(graph);
            }
        }
    }
}
