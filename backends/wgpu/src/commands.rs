//! Commands on their way to the device: dispatches and copies in order, cut into submissions of bounded work. What is not
//! submitted when they are dropped is forgotten.

use freetoken_backend::{HostMemory, Result};
use wgpu::{CommandBuffer, CommandEncoder, ComputePassDescriptor};

use crate::{device::Gpu, dispatch::Dispatch, host::WgpuHostMemory, queue::Lanes, staging::Staging};

/// Floating-point operations of a submission, roughly: far below what a driver's watchdog allows on a small GPU.
const WORK: u64 = 200_000_000_000;
/// The same where a CPU plays the GPU.
const SOFTWARE_WORK: u64 = 10_000_000_000;
/// Dispatches of the first submission, so that the device starts early; each further one has twice as many.
const FIRST_DISPATCHES: usize = 8;
/// Dispatches of a submission, at most.
const DISPATCHES: usize = 64;

/// A recorded copy of whole words.
pub(crate) struct Copy {
    pub(crate) src: wgpu::Buffer,
    pub(crate) start: usize,
    pub(crate) dst: wgpu::Buffer,
    pub(crate) at: usize,
    pub(crate) bytes: usize,
}

/// Recorded commands between two decisions of the host: dispatches, then copies.
#[derive(Default)]
pub(crate) struct Run {
    pub(crate) dispatches: Vec<Dispatch>,
    pub(crate) copies: Vec<Copy>,
}

impl Run {
    fn encode(&self, encoder: &mut CommandEncoder) {
        if !self.dispatches.is_empty() {
            let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
            self.dispatches.iter().for_each(|dispatch| dispatch.encode(&mut pass));
        }
        self.copies.iter().for_each(|copy| copy.encode(encoder));
    }
}

impl Copy {
    fn encode(&self, encoder: &mut CommandEncoder) {
        let Copy { src, start, dst, at, bytes } = self;
        encoder.copy_buffer_to_buffer(src, *start as u64, dst, *at as u64, Some(*bytes as u64));
    }
}

/// A list of commands that grows, and what it may grow to.
pub(crate) struct Commands<'a> {
    pub(crate) lanes: &'a mut Lanes,
    encoder: Option<CommandEncoder>,
    most_work: u64,
    /// Of the open submission.
    work: u64,
    n_dispatches: usize,
    most_dispatches: usize,
}

impl<'a> Commands<'a> {
    pub(crate) fn new(lanes: &'a mut Lanes, gpu: &Gpu) -> Self {
        let most_work = if gpu.software { SOFTWARE_WORK } else { WORK };
        Commands {
            lanes,
            encoder: None,
            most_work,
            work: 0,
            n_dispatches: 0,
            most_dispatches: FIRST_DISPATCHES,
        }
    }

    /// Adds dispatches.
    pub(crate) fn dispatch(&mut self, dispatches: &[Dispatch]) {
        let mut rest = dispatches;
        while let Some(next) = rest.first() {
            let full = self.n_dispatches == self.most_dispatches || self.work + next.work > self.most_work;
            if full && self.n_dispatches > 0 {
                let most = DISPATCHES.min(2 * self.most_dispatches);
                self.submit();
                self.most_dispatches = most;
            }
            let mut work = self.work;
            let fits = rest.iter().take(self.most_dispatches - self.n_dispatches).take_while(|dispatch| {
                work += dispatch.work;
                work <= self.most_work
            });
            let (now, later) = rest.split_at(fits.count().max(1));
            let mut pass = self.encoder().begin_compute_pass(&ComputePassDescriptor::default());
            now.iter().for_each(|dispatch| dispatch.encode(&mut pass));
            drop(pass);
            self.n_dispatches += now.len();
            self.work += now.iter().map(|dispatch| dispatch.work).sum::<u64>();
            rest = later;
        }
    }

    /// Adds recorded commands.
    pub(crate) fn run(&mut self, run: &Run) {
        self.dispatch(&run.dispatches);
        run.copies.iter().for_each(|copy| copy.encode(self.encoder()));
    }

    /// Encodes recorded commands that may be added later: a host that waits has the time. `None` where they are too many for one
    /// submission.
    pub(crate) fn ahead(&self, run: &Run) -> Option<CommandBuffer> {
        let work: u64 = run.dispatches.iter().map(|dispatch| dispatch.work).sum();
        (run.dispatches.len() <= DISPATCHES && work <= self.most_work).then(|| {
            let mut encoder = self.lanes.encoder();
            run.encode(&mut encoder);
            encoder.finish()
        })
    }

    /// Adds recorded commands, encoded ahead or not.
    pub(crate) fn add(&mut self, run: &Run, ahead: Option<CommandBuffer>) {
        let Some(ahead) = ahead else { return self.run(run) };
        let open = self.encoder.take().map(CommandEncoder::finish);
        self.lanes.ready.extend(open.into_iter().chain([ahead]));
    }

    /// Adds a copy of whole words.
    pub(crate) fn copy(
        &mut self,
        src: &wgpu::Buffer,
        start: usize,
        dst: &wgpu::Buffer,
        at: usize,
        bytes: usize,
    ) {
        self.encoder().copy_buffer_to_buffer(src, start as u64, dst, at as u64, Some(bytes as u64));
    }

    /// Adds a copy of whole words out of host memory. They stay as they are until the device was there.
    pub(crate) fn bring(
        &mut self,
        staging: &mut Staging,
        src: &WgpuHostMemory,
        start: usize,
        dst: &wgpu::Buffer,
        at: usize,
        bytes: usize,
    ) -> Result<()> {
        if let Some(shared) = src.buffer() {
            self.copy(shared, start, dst, at, bytes);
            return Ok(());
        }
        // Staging does not wait for what is not submitted.
        self.submit();
        staging.upload(self.lanes, dst, at as u64, &src.bytes()[start..start + bytes])
    }

    /// Sends what was added, if anything; the number of the last submission.
    pub(crate) fn submit(&mut self) -> u64 {
        (self.work, self.n_dispatches, self.most_dispatches) = (0, 0, FIRST_DISPATCHES);
        match self.encoder.take() {
            None if self.lanes.ready.is_empty() => self.lanes.last(),
            encoder => self.lanes.submit(encoder),
        }
    }

    /// What commands are added to.
    pub(crate) fn encoder(&mut self) -> &mut CommandEncoder {
        self.encoder.get_or_insert_with(|| self.lanes.encoder())
    }
}

impl Drop for Commands<'_> {
    fn drop(&mut self) {
        self.lanes.ready.clear();
    }
}
