//! Host memory on the way: a ring of mapped buffers for uploads, one buffer for reads.

use std::time::Duration;

use freetoken_backend::Result;
use wgpu::{BufferDescriptor, BufferUsages, Device, MapMode};

use crate::queue::Lanes;

/// Bytes of each buffer.
const PIECE: usize = 4 << 20;
/// Buffers of the ring: one is filled while others are on their way.
const PIECES: usize = 4;
/// Up to here wgpu's own staging is quicker.
const SMALL: usize = 64 << 10;

struct Piece {
    buffer: wgpu::Buffer,
    /// The submission that read it last; 0 while it is mapped.
    seq: u64,
}

/// The ring and the buffer.
pub(crate) struct Staging {
    ring: Vec<Piece>,
    next: usize,
    read: wgpu::Buffer,
}

impl Staging {
    pub(crate) fn new(device: &Device) -> Self {
        let buffer = |usage, mapped_at_creation| {
            device.create_buffer(&BufferDescriptor {
                label: None,
                size: PIECE as u64,
                usage,
                mapped_at_creation,
            })
        };
        let piece =
            |_| Piece { buffer: buffer(BufferUsages::MAP_WRITE | BufferUsages::COPY_SRC, true), seq: 0 };
        Staging {
            ring: (0..PIECES).map(piece).collect(),
            next: 0,
            read: buffer(BufferUsages::MAP_READ | BufferUsages::COPY_DST, false),
        }
    }

    /// Queues a write of whole words behind everything before it. The bytes may be reused when it returns.
    pub(crate) fn upload(
        &mut self,
        lanes: &mut Lanes,
        dst: &wgpu::Buffer,
        at: u64,
        bytes: &[u8],
    ) -> Result<()> {
        if bytes.len() <= SMALL {
            lanes.write(dst, at, bytes);
            return Ok(());
        }
        let mut at = at;
        for part in bytes.chunks(PIECE) {
            let piece = &mut self.ring[self.next];
            self.next = (self.next + 1) % PIECES;
            if piece.seq > 0 {
                lanes.wait(piece.seq)?;
            }
            let range = 0..part.len() as u64;
            let mut view = piece
                .buffer
                .get_mapped_range_mut(range)
                .map_err(|e| freetoken_backend::Error::DeviceLost { what: e.to_string() })?;
            view.copy_from_slice(part);
            drop(view);
            piece.buffer.unmap();
            let mut encoder = lanes.encoder();
            encoder.copy_buffer_to_buffer(&piece.buffer, 0, dst, at, Some(part.len() as u64));
            piece.seq = lanes.submit(Some(encoder));
            piece.buffer.map_async(MapMode::Write, .., |_| ());
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Reads whole words once everything queued before is done.
    pub(crate) fn download(
        &self,
        lanes: &mut Lanes,
        src: &wgpu::Buffer,
        at: u64,
        out: &mut [u8],
    ) -> Result<()> {
        let mut at = at;
        for part in out.chunks_mut(PIECE) {
            let bytes = part.len() as u64;
            let mut encoder = lanes.encoder();
            encoder.copy_buffer_to_buffer(src, at, &self.read, 0, Some(bytes));
            let seq = lanes.submit(Some(encoder));
            lanes.mapped(&self.read, bytes, seq, Duration::ZERO, |mapped| part.copy_from_slice(mapped))?;
            at += bytes;
        }
        Ok(())
    }
}
