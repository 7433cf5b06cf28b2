//! How bytes of a caller reach the device and come back: through pinned blocks, so that a copy is asynchronous, runs at
//! the link's speed, and the caller's bytes are free when the call returns.

use std::sync::Arc;

use cudarc::driver::CudaEvent;
use freetoken_backend::{HostMemory, Result};

use crate::{
    driver::Span,
    memory::{Device, PinnedMemory, WAIT_LIMIT, no_answer},
};

/// Size of a block.
const BLOCK_BYTES: usize = 4 << 20;
/// Blocks that are on their way at a time.
const N_BLOCKS: usize = 4;
/// Writes start at a multiple of this many bytes of a block.
const ALIGN: usize = 64;

struct Block {
    memory: PinnedMemory,
    /// Lies behind the last copy out of it.
    drained: CudaEvent,
}

/// A ring of blocks for writes, and a block for reads.
pub(crate) struct Staging {
    blocks: Vec<Block>,
    /// The block that is being filled, and how far.
    current: usize,
    filled: usize,
    landing: PinnedMemory,
    landed: CudaEvent,
}

impl Staging {
    /// Of a device.
    pub(crate) fn new(device: &Arc<Device>) -> Result<Self> {
        let block = || Ok(Block { memory: device.pin(BLOCK_BYTES)?, drained: device.driver.event()? });
        Ok(Staging {
            blocks: (0..N_BLOCKS).map(|_| block()).collect::<Result<_>>()?,
            current: 0,
            filled: 0,
            landing: device.pin(BLOCK_BYTES)?,
            landed: device.driver.event()?,
        })
    }

    /// Queues a write in the compute stream. `bytes` are free when it returns.
    pub(crate) fn write(&mut self, device: &Device, dst: Span, bytes: &[u8]) -> Result<()> {
        let mut start = 0;
        while start < bytes.len() {
            if self.filled == BLOCK_BYTES {
                self.turn(device)?;
            }
            let piece = (bytes.len() - start).min(BLOCK_BYTES - self.filled);
            let block = &mut self.blocks[self.current].memory;
            let place = self.filled..self.filled + piece;
            block.bytes_mut()[place.clone()].copy_from_slice(&bytes[start..start + piece]);
            device.driver.copy(
                &device.compute,
                dst.slice(start..start + piece),
                block.span().slice(place),
            )?;
            self.filled = (self.filled + piece).next_multiple_of(ALIGN).min(BLOCK_BYTES);
            start += piece;
        }
        Ok(())
    }

    /// Leaves a full block and waits for the copies out of the next.
    fn turn(&mut self, device: &Device) -> Result<()> {
        device.driver.record(&self.blocks[self.current].drained, &device.compute)?;
        let next = (self.current + 1) % N_BLOCKS;
        wait(device, &self.blocks[next].drained)?;
        (self.current, self.filled) = (next, 0);
        Ok(())
    }

    /// Reads behind everything queued in the compute stream.
    pub(crate) fn read(&mut self, device: &Device, src: Span, out: &mut [u8]) -> Result<()> {
        let mut start = 0;
        for piece in out.chunks_mut(BLOCK_BYTES) {
            let (place, landing) = (start..start + piece.len(), self.landing.span().slice(0..piece.len()));
            device.driver.copy(&device.compute, landing, src.slice(place))?;
            device.driver.record(&self.landed, &device.compute)?;
            wait(device, &self.landed)?;
            piece.copy_from_slice(&self.landing.bytes()[..piece.len()]);
            start += piece.len();
        }
        Ok(())
    }
}

fn wait(device: &Device, event: &CudaEvent) -> Result<()> {
    let reached = device.driver.wait(WAIT_LIMIT, || device.driver.reached(event))?;
    if reached { Ok(()) } else { Err(no_answer()) }
}
