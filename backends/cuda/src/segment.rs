//! A run of queued work between two places where the host decides: kernels and copies, in a graph or one by one.

use freetoken_backend::Result;

use crate::{
    args::Args,
    driver::{Graph, Kernel, Shape, Span},
    memory::Device,
};

/// One thing that is queued.
pub(crate) enum Work {
    /// A kernel.
    Launch {
        /// The function.
        kernel: Kernel,
        /// Its blocks.
        shape: Shape,
        /// Its parameters.
        args: Args,
    },
    /// A copy.
    Copy {
        /// To.
        dst: Span,
        /// From, as many bytes.
        src: Span,
    },
}

impl Work {
    /// Queues it in the compute stream.
    pub(crate) fn queue(&self, device: &Device) -> Result<()> {
        match self {
            Work::Launch { kernel, shape, args } => {
                device.driver.launch(&device.compute, kernel, *shape, args.iter())
            }
            Work::Copy { dst, src } => device.driver.copy(&device.compute, *dst, *src),
        }
    }
}

/// How a program's work reaches the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Submission {
    /// A graph for the whole program, in which the device rings for the host: one launch of the driver.
    #[default]
    Graph,
    /// Kernel by kernel: for the sanitizer and the profiler.
    Staged,
}

/// Work in order.
pub(crate) enum Segment {
    /// One launch for all of it.
    Graph(Graph),
    /// One by one.
    Staged(Vec<Work>),
}

impl Segment {
    /// Makes `work` replayable.
    pub(crate) fn new(device: &Device, submission: Submission, work: Vec<Work>) -> Result<Self> {
        if submission == Submission::Staged || work.is_empty() {
            return Ok(Segment::Staged(work));
        }
        let queue = || work.iter().try_for_each(|work| work.queue(device));
        Ok(Segment::Graph(device.driver.capture(&device.compute, queue)?))
    }

    /// Queues all of it in the compute stream.
    pub(crate) fn queue(&self, device: &Device) -> Result<()> {
        match self {
            Segment::Graph(graph) => device.driver.launch_graph(graph),
            Segment::Staged(work) => work.iter().try_for_each(|work| work.queue(device)),
        }
    }
}
