//! Host memory that records lie in, in the best way that the device has of reading it. Found out when the device is opened: a way is
//! used only if the device saw what the host wrote.

use freetoken_backend::{Error, HostMemory, Result, os};

use crate::{
    device::Gpu,
    queue::Lanes,
    staging::Staging,
    vulkan::{self, SharedMemory},
};

/// Bytes that a way is tried with.
const TRIED_BYTES: usize = 128 << 10;

/// How the device comes by what lies in host memory; the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostPath {
    /// It reads memory of the process in place.
    Imported,
    /// It reads memory of the driver in place, which stays mapped.
    Mapped,
    /// It does not: the host copies into buffers on the way.
    Copied,
}

impl HostPath {
    /// The best that works on this device, `best` or a lower one.
    pub(crate) fn probe(best: HostPath, gpu: &Gpu, lanes: &mut Lanes, staging: &Staging) -> Self {
        let paths = [HostPath::Imported, HostPath::Mapped].into_iter().filter(|path| *path >= best);
        let mut works = paths.filter(|path| path.works(gpu, lanes, staging));
        works.next().unwrap_or(HostPath::Copied)
    }

    /// Whether the device sees what the host writes: at first, and behind its own first look.
    fn works(self, gpu: &Gpu, lanes: &mut Lanes, staging: &Staging) -> bool {
        let Some(mut memory) = self.share(gpu, TRIED_BYTES) else { return false };
        let mut seen = vec![0; TRIED_BYTES];
        (0..2).all(|round| {
            let half = round * TRIED_BYTES / 2..(round + 1) * TRIED_BYTES / 2;
            let pattern = (0_usize..).map(|i| (i * 31 + i / 251 + round) as u8);
            memory.bytes_mut()[half].iter_mut().zip(pattern).for_each(|(byte, value)| *byte = value);
            staging.download(lanes, memory.buffer(), 0, &mut seen).is_ok() && seen == memory.bytes()
        })
    }

    /// Zeroed memory. What the driver does not share, since no buffer can hold it or since it has lent enough, is copied: a model may
    /// be larger than what a driver pins.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(crate) fn alloc(self, gpu: &Gpu, bytes: usize) -> Result<WgpuHostMemory> {
        if let Some(shared) = self.share(gpu, bytes) {
            return Ok(WgpuHostMemory::Shared(shared));
        }
        let memory = os::anonymous(bytes.max(1)).map_err(|_| {
            let free = os::available_memory().and_then(|free| usize::try_from(free).ok()).unwrap_or(0);
            Error::OutOfMemory { wanted: bytes, free }
        })?;
        Ok(WgpuHostMemory::Own { memory, bytes })
    }

    fn share(self, gpu: &Gpu, bytes: usize) -> Option<SharedMemory> {
        let most = usize::try_from(gpu.limits.max_buffer_size).unwrap_or(usize::MAX);
        match self {
            HostPath::Imported => vulkan::import(&gpu.device, bytes, most),
            HostPath::Mapped => vulkan::map(&gpu.device, bytes, most),
            HostPath::Copied => None,
        }
    }

    /// In a few words, for people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            HostPath::Imported => "host memory read in place (imported)",
            HostPath::Mapped => "host memory read in place (mapped)",
            HostPath::Copied => "host memory copied",
        }
    }
}

/// Host memory that records lie in.
pub(crate) enum WgpuHostMemory {
    /// The process's own: uploads copy out of it.
    Own {
        /// At least one byte.
        memory: os::AnonymousMemory,
        /// What was asked for.
        bytes: usize,
    },
    /// The device's as well.
    Shared(SharedMemory),
}

impl WgpuHostMemory {
    /// The buffer that the device reads it through, if it does.
    pub(crate) fn buffer(&self) -> Option<&wgpu::Buffer> {
        match self {
            WgpuHostMemory::Own { .. } => None,
            WgpuHostMemory::Shared(memory) => Some(memory.buffer()),
        }
    }
}

impl HostMemory for WgpuHostMemory {
    fn bytes(&self) -> &[u8] {
        match self {
            WgpuHostMemory::Own { memory, bytes } => &memory.as_ref()[..*bytes],
            WgpuHostMemory::Shared(memory) => memory.bytes(),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            WgpuHostMemory::Own { memory, bytes } => &mut memory.as_mut()[..*bytes],
            WgpuHostMemory::Shared(memory) => memory.bytes_mut(),
        }
    }
}
