//! The two queues of a device and their events: points in a stream's order that another stream or the host waits for.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream};
use freetoken_backend::{Event, Lane, Result};

use crate::memory::{Device, WAIT_LIMIT, no_answer};

/// Events that a lane keeps. A wait for one that is older waits for the one that took its place, which lies behind it.
const KEPT: u64 = 64;

/// One queue.
pub(crate) struct Queue {
    lane: Lane,
    stream: Arc<CudaStream>,
    events: Vec<CudaEvent>,
    /// Events recorded so far.
    recorded: u64,
}

impl Queue {
    fn new(device: &Device, lane: Lane, stream: &Arc<CudaStream>) -> Result<Self> {
        let events = (0..KEPT).map(|_| device.driver.event()).collect::<Result<_>>()?;
        Ok(Queue { lane, stream: stream.clone(), events, recorded: 0 })
    }

    /// The event that is recorded at the place of `seq`, or one behind it.
    fn at(&self, seq: u64) -> &CudaEvent {
        &self.events[(seq % KEPT) as usize]
    }
}

/// Both queues.
pub(crate) struct Lanes {
    compute: Queue,
    copy: Queue,
}

impl Lanes {
    /// Of a device.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Lanes {
            compute: Queue::new(device, Lane::Compute, &device.compute)?,
            copy: Queue::new(device, Lane::Copy, &device.copy)?,
        })
    }

    fn queue(&mut self, lane: Lane) -> &mut Queue {
        match lane {
            Lane::Compute => &mut self.compute,
            Lane::Copy => &mut self.copy,
        }
    }

    /// The stream of a lane.
    pub(crate) fn stream(&mut self, lane: Lane) -> Arc<CudaStream> {
        self.queue(lane).stream.clone()
    }

    /// A point behind everything queued in the lane so far.
    pub(crate) fn event(&mut self, device: &Device, lane: Lane) -> Result<Event> {
        let queue = self.queue(lane);
        let seq = queue.recorded;
        device.driver.record(queue.at(seq), &queue.stream)?;
        queue.recorded += 1;
        Ok(Event { lane: queue.lane, seq })
    }

    /// Makes everything queued in `lane` from now on wait for the event.
    pub(crate) fn after(&mut self, device: &Device, lane: Lane, event: Event) -> Result<()> {
        let stream = self.stream(lane);
        device.driver.after(&stream, self.queue(event.lane).at(event.seq))
    }

    /// Whether the event is reached.
    pub(crate) fn reached(&mut self, device: &Device, event: Event) -> Result<bool> {
        device.driver.reached(self.queue(event.lane).at(event.seq))
    }

    /// Blocks until the event is reached, a bounded time.
    pub(crate) fn wait(&mut self, device: &Device, event: Event) -> Result<()> {
        let awaited = self.queue(event.lane).at(event.seq);
        let reached = device.driver.wait(WAIT_LIMIT, || device.driver.reached(awaited))?;
        if reached { Ok(()) } else { Err(no_answer()) }
    }
}
