//! Commands on their way to the device: dispatches and copies in order, cut into submissions of bounded work. What is not
//! submitted when they are dropped is forgotten.

use freetoken_backend::{HostMemory, Result};
use wgpu::{CommandEncoder, ComputePassDescriptor};

use crate::{device::Gpu, dispatch::Dispatch, host::WgpuHostMemory, queue::Lanes, staging::Staging};

/// Floating-point operations of a submission, roughly: far below what a driver's watchdog allows on a small GPU.
const WORK: u64 = 200_000_000_000;
/// The same where a CPU plays the GPU.
const SOFTWARE_WORK: u64 = 10_000_000_000;
/// Dispatches of the first submission, so that the device starts early; each further one has twice as many.
const FIRST_DISPATCHES: usize = 8;
/// Dispatches of a submission, at most.
const DISPATCHES: usize = 64;

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
            Some(encoder) => self.lanes.submit(Some(encoder)),
            None => self.lanes.last(),
        }
    }

    fn encoder(&mut self) -> &mut CommandEncoder {
        self.encoder.get_or_insert_with(|| self.lanes.encoder())
    }
}
