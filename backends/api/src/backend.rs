//! The trait every device implements.

use std::{sync::Arc, time::Instant};

use crate::{Buffer, Caps, HostBuffer, HostBytes, Op, Program, Result, Stage, View, ViewCopy};

/// A queue of a device. Work in one lane runs in order; lanes meet through events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    /// Ops and programs.
    Compute,
    /// Uploads.
    Copy,
}

/// A point in a lane's order: reached when everything queued in the lane before it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The lane it lies in.
    pub lane: Lane,
    /// Its place in the lane; only grows.
    pub seq: u64,
}

/// What kernels cost besides their work, measured.
#[derive(Debug, Clone, Copy)]
pub struct KernelCosts {
    /// Kernels that the ops are.
    pub n_kernels: usize,
    /// Seconds that a kernel which does nothing adds to a program.
    pub empty_kernel: f64,
    /// Seconds of one by itself, as [`Backend::time`] measures an op.
    pub empty_op: f64,
}

impl KernelCosts {
    /// Kernels that do nothing in the two chains whose difference tells what one of them adds.
    pub const CHAINS: [usize; 2] = [64, 576];

    /// Seconds that a kernel adds, by those that the [`KernelCosts::CHAINS`] take.
    pub fn of_one(chains: [f64; 2]) -> f64 {
        let more = Self::CHAINS[1] - Self::CHAINS[0];
        (chains[1] - chains[0]) / more as f64
    }

    /// Seconds of as many kernels that do nothing.
    pub fn empty(&self) -> f64 {
        self.n_kernels as f64 * self.empty_kernel
    }
}

/// A device that runs ops in order.
///
/// Ordering: `write`, `read`, `copy`, `run` and replays belong to [`Lane::Compute`] and are seen in the order of the calls; a
/// `read` waits for what stands before it. Uploads in [`Lane::Copy`] are ordered with the rest by events alone.
/// One thread at a time drives a backend; implementations may block a second one.
pub trait Backend: Send + Sync {
    /// What it can do.
    fn caps(&self) -> &Caps;

    /// Bytes that can still be allocated, as far as the system tells.
    fn free_bytes(&self) -> Result<Option<u64>>;

    /// Zeroed device memory. Never called inside a step.
    fn alloc(&self, bytes: usize) -> Result<Buffer>;

    /// Zeroed host memory that uploads and in-place reads start from. Never called inside a step.
    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer>;

    /// Read-only device memory that is `bytes` where they lie; only with [`Caps::host_memory`].
    fn import(&self, bytes: &HostBytes) -> Result<Buffer>;

    /// Writes `bytes` to the start of `dst`. They may be reused when the call returns.
    fn write(&self, dst: &View, bytes: &[u8]) -> Result<()>;

    /// Reads the start of `src` once everything queued before is done.
    fn read(&self, src: &View, out: &mut [u8]) -> Result<()>;

    /// Queues a copy of `src[start..start + dst.bytes()]` to `dst` in a lane.
    fn upload(&self, lane: Lane, src: &Arc<HostBuffer>, start: usize, dst: &View) -> Result<Event>;

    /// Queues copies within the device, in order. Nothing passes through the host, and the caller does not wait.
    fn copy(&self, copies: &[ViewCopy]) -> Result<()>;

    /// A point behind everything queued in the lane so far.
    fn event(&self, lane: Lane) -> Result<Event>;

    /// Makes everything queued in `lane` from now on wait for the event.
    fn after(&self, lane: Lane, event: Event) -> Result<()>;

    /// Whether the event is reached; asks without waiting.
    fn reached(&self, event: Event) -> Result<bool>;

    /// Blocks the caller until the event is reached: a bounded time, then a typed error.
    fn wait(&self, event: Event) -> Result<()>;

    /// Whether it can run the op; the error says what it lacks.
    fn supports(&self, op: &Op) -> Result<()>;

    /// Runs ops once, in order. For tests, loading and tracing; steps are programs.
    fn run(&self, ops: &[Op]) -> Result<()>;

    /// Runs ops once, in order, and measures each, in seconds. For benches: a device that can tell leaves out what a launch
    /// from the host costs; this way measures from call to answer.
    fn time(&self, ops: &[Op]) -> Result<Vec<f64>> {
        let seconds = |op: &Op| {
            let start = Instant::now();
            self.run(std::slice::from_ref(op))?;
            self.wait(self.event(Lane::Compute)?)?;
            Ok(start.elapsed().as_secs_f64())
        };
        ops.iter().map(seconds).collect()
    }

    /// Reads a view once, as fast as the device can, and measures that, in seconds. For benches: the roof above everything
    /// that is bound by bytes.
    fn time_read(&self, view: &View) -> Result<f64>;

    /// What kernels cost here, and how many of them these ops are. For benches; `None` where the device does not tell.
    fn kernel_costs(&self, _ops: &[Op]) -> Result<Option<KernelCosts>> {
        Ok(None)
    }

    /// Floating-point operations a second of products that read nothing, in the precision of prefill: the roof above matrix
    /// products. For benches; `None` where the device does not tell.
    fn product_rate(&self) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Makes a program. `outputs` are the views that [`Program::output`] gives after each replay.
    fn record(&self, stages: &[Stage], outputs: &[View]) -> Result<Box<dyn Program>>;
}
