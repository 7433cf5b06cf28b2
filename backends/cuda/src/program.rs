//! Programs: segments of work with a route point between two of them, over memory that the program keeps.
//!
//! A replay queues a segment, waits for the host's copy of what a route point asks, lets it be served, queues the answer,
//! the fetches and the experts' work, and goes on. It allocates nothing, and each of its waits is bounded.

use std::{ops::Range, time::Duration};

use cudarc::driver::CudaEvent;
use freetoken_backend::{Error, HostMemory, Program, Result, RouteReply, RouteServer, Stage, View};

use crate::{
    Cuda,
    memory::{CudaMemory, Device, PinnedMemory, WAIT_LIMIT},
    route_point::{Desk, Point},
    segment::Segment,
};

/// How long a step that broke off waits for what it had queued.
const ABORT_LIMIT: Duration = Duration::from_secs(1);

/// What a program is made of, in the order of its replay.
pub(crate) enum Part {
    /// Work that ends in the question of the route point behind it, or in the outputs.
    Segment(Segment),
    /// The host's decision and the experts' work.
    Route {
        /// What is asked and answered.
        point: Box<Point>,
        /// The answer's way to the device, and the kernels of the experts.
        experts: Segment,
    },
}

/// A recorded program.
pub(crate) struct CudaProgram {
    cuda: Cuda,
    parts: Vec<Part>,
    desk: Option<Desk>,
    /// Outputs, one behind the other.
    landing: PinnedMemory,
    /// Bytes of each output in `landing`.
    outputs: Vec<Range<usize>>,
    reply: RouteReply,
    /// Lies behind the last work queued by a replay.
    done: CudaEvent,
    /// A replay broke off, and its work may still run.
    broken_off: bool,
    /// What the recorded work points to.
    _kept: (Vec<Stage>, Vec<View>, CudaMemory),
}

impl CudaProgram {
    /// Puts a program together. `kept` are the stages, the outputs and the scratch that the parts point to.
    pub(crate) fn new(
        cuda: Cuda,
        parts: Vec<Part>,
        desk: Option<Desk>,
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
            desk,
            landing,
            outputs,
            broken_off: false,
            _kept: kept,
        })
    }

    /// Waits until the work of a replay that broke off is done.
    fn recover(&mut self, device: &Device) -> Result<()> {
        if self.broken_off {
            device.wait_idle()?;
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

/// Leaves a step: unless it ended well, what it queued is done, or the program knows that it is not.
struct Step<'a> {
    device: &'a Device,
    broken_off: &'a mut bool,
}

impl Step<'_> {
    fn ended(&mut self) {
        *self.broken_off = false;
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if *self.broken_off {
            // An error here is kept by the driver, and the next replay asks again.
            let idle =
                self.device.driver.wait(ABORT_LIMIT, || self.device.driver.is_idle(&self.device.compute));
            *self.broken_off = !matches!(idle, Ok(true));
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
        let CudaProgram { parts, desk, reply, done, broken_off, .. } = self;
        *broken_off = true;
        let mut step = Step { device, broken_off };
        let mut layer = 0;
        for part in parts.iter() {
            match part {
                Part::Segment(segment) => segment.queue(device)?,
                Part::Route { point, experts } => {
                    layer = point.layer();
                    let desk = desk.as_mut().expect("a program with route points has a desk");
                    wait(device, done, layer)?;
                    reply.clear();
                    server.answer(&point.ask(&desk.asked), reply)?;
                    point.settle(desk, reply).map_err(|why| Error::StepFailed { layer, why })?;
                    point.apply(device, reply)?;
                    experts.queue(device)?;
                    point.take_host_rows(device, desk, &reply.host, server)?;
                }
            }
        }
        wait(device, done, layer)?;
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
            Part::Route { .. } => unreachable!("a program with a route point is replayed"),
        })
    }

    fn output(&self, i: usize) -> &[u32] {
        bytemuck::cast_slice(&self.landing.bytes()[self.outputs[i].clone()])
    }
}

impl Drop for CudaProgram {
    fn drop(&mut self) {
        for part in self.parts.drain(..) {
            let (Part::Segment(segment) | Part::Route { experts: segment, .. }) = part;
            if let Segment::Graph(graph) = segment {
                self.cuda.device().bury_graph(graph);
            }
        }
    }
}
