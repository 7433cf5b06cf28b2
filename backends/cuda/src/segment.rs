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
        /// Whether it may come onto the device while the kernel before it still runs.
        early: bool,
    },
    /// A copy.
    Copy {
        /// To.
        dst: Span,
        /// From, as many bytes.
        src: Span,
    },
}

/// Queues work in the compute stream, in order. A kernel comes early behind another one only, not behind a copy, nor what was
/// queued before.
pub(crate) fn queue<'a>(device: &Device, work: impl IntoIterator<Item = &'a Work>) -> Result<()> {
    let mut behind_kernel = false;
    for work in work {
        match work {
            Work::Launch { kernel, shape, args, early } => {
                device.driver.launch(
                    &device.compute,
                    kernel,
                    *shape,
                    args.iter(),
                    *early && behind_kernel,
                )?;
                behind_kernel = true;
            }
            Work::Copy { dst, src } => {
                device.driver.copy(&device.compute, *dst, *src)?;
                behind_kernel = false;
            }
        }
    }
    Ok(())
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
        Ok(Segment::Graph(device.driver.capture(&device.compute, || queue(device, &work))?))
    }

    /// Queues all of it in the compute stream.
    pub(crate) fn queue(&self, device: &Device) -> Result<()> {
        match self {
            Segment::Graph(graph) => device.driver.launch_graph(graph),
            Segment::Staged(work) => queue(device, work),
        }
    }
}
