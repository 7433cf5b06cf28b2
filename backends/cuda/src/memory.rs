//! Memory of the device and pinned memory of the host: who owns it, and when it is freed.
//!
//! A handle may be dropped by any thread at any time, also while a step runs. Freeing can wait for the device, so dropped
//! memory goes to a graveyard; the thread that drives the backend empties it outside of steps, once both streams are idle.

use std::{
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    time::Duration,
};

use cudarc::driver::CudaStream;
use freetoken_backend::{DeviceMemory, Error, HostBuffer, HostMemory, Result, View, os};

use crate::driver::{Driver, Graph, Pinned, Span};

/// The longest that the device may take for anything before a waiting host gives up.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(20);
/// The same for the last owner of a card, which has nothing more to ask of it.
const DROP_LIMIT: Duration = Duration::from_secs(1);

/// A card that is open: its context, its streams, and what was dropped and not yet freed.
pub(crate) struct Device {
    pub(crate) driver: Driver,
    /// Where ops and programs run.
    pub(crate) compute: Arc<CudaStream>,
    /// Where uploads run beside them.
    pub(crate) copy: Arc<CudaStream>,
    /// Where new memory is cleared: new memory waits for no queued work.
    clear: Arc<CudaStream>,
    graveyard: Mutex<Vec<Grave>>,
}

enum Grave {
    Device(Span),
    Pinned(Pinned),
    /// Freed with its value.
    Graph {
        _graph: Graph,
    },
}

impl Device {
    /// Opens the card of this number.
    pub(crate) fn open(ordinal: usize) -> Result<Arc<Self>> {
        let driver = Driver::open(ordinal)?;
        let (compute, copy, clear) = (driver.stream()?, driver.stream()?, driver.stream()?);
        Ok(Arc::new(Device { driver, compute, copy, clear, graveyard: Mutex::default() }))
    }

    /// Zeroed device memory. Never inside a step.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: usize) -> Result<CudaMemory> {
        self.empty_graveyard()?;
        let span = match self.driver.alloc(bytes) {
            Err(Error::OutOfMemory { .. }) => {
                self.wait_idle()?;
                self.empty_graveyard()?;
                self.driver.alloc(bytes)?
            }
            answer => answer?,
        };
        let memory = CudaMemory { span, device: self.clone() };
        self.driver.zero(&self.clear, span)?;
        self.wait(WAIT_LIMIT, &self.clear)?;
        Ok(memory)
    }

    /// Zeroed host memory that the device reaches. Never inside a step.
    pub(crate) fn pin(self: &Arc<Self>, bytes: usize) -> Result<PinnedMemory> {
        self.empty_graveyard()?;
        let memory = os::anonymous(bytes.max(1))
            .map_err(|source| Error::Os { what: "reserving host memory for the device", source })?;
        let pinned = self.driver.pin(memory, bytes)?;
        Ok(PinnedMemory { pinned: Some(pinned), device: self.clone() })
    }

    /// Gives a graph up.
    pub(crate) fn bury_graph(&self, graph: Graph) {
        self.graves().push(Grave::Graph { _graph: graph });
    }

    /// Frees what was dropped, if nothing is queued that could use it. Never inside a step.
    pub(crate) fn empty_graveyard(&self) -> Result<()> {
        if self.graves().is_empty() || !self.is_idle()? {
            return Ok(());
        }
        let graves = std::mem::take(&mut *self.graves());
        graves.into_iter().try_for_each(|grave| match grave {
            Grave::Device(span) => self.driver.free(span),
            Grave::Pinned(pinned) => self.driver.unpin(pinned),
            Grave::Graph { .. } => Ok(()),
        })
    }

    fn is_idle(&self) -> Result<bool> {
        Ok(self.driver.is_idle(&self.compute)? && self.driver.is_idle(&self.copy)?)
    }

    /// Waits until nothing is queued, a bounded time.
    pub(crate) fn wait_idle(&self) -> Result<()> {
        self.wait(WAIT_LIMIT, &self.compute)?;
        self.wait(WAIT_LIMIT, &self.copy)
    }

    fn wait(&self, limit: Duration, stream: &CudaStream) -> Result<()> {
        let idle = self.driver.wait(limit, || self.driver.is_idle(stream))?;
        if idle { Ok(()) } else { Err(no_answer()) }
    }

    fn graves(&self) -> MutexGuard<'_, Vec<Grave>> {
        // Pushing and taking leave the list whole.
        self.graveyard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error of a wait that reached its limit.
pub(crate) fn no_answer() -> Error {
    Error::DeviceLost { what: format!("it did not finish within {} s", WAIT_LIMIT.as_secs()) }
}

impl Drop for Device {
    /// The last owner drives. Where the device still works, or is lost, its memory is left to the end of the process.
    fn drop(&mut self) {
        let idle = self.wait(DROP_LIMIT, &self.compute).and_then(|()| self.wait(DROP_LIMIT, &self.copy));
        let freed = idle.and_then(|()| self.empty_graveyard());
        if freed.is_err() {
            std::mem::take(&mut *self.graves()).into_iter().for_each(std::mem::forget);
        }
    }
}

/// What a buffer of this backend is: memory of the device.
pub(crate) struct CudaMemory {
    span: Span,
    /// Where it is buried.
    device: Arc<Device>,
}

impl CudaMemory {
    /// Where it lies.
    pub(crate) fn span(&self) -> Span {
        self.span
    }
}

impl DeviceMemory for CudaMemory {
    fn bytes(&self) -> usize {
        self.span().bytes()
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        self.device.graves().push(Grave::Device(self.span));
    }
}

/// Pinned host memory of a device.
pub(crate) struct PinnedMemory {
    /// `None` once buried.
    pinned: Option<Pinned>,
    device: Arc<Device>,
}

impl PinnedMemory {
    fn pinned(&self) -> &Pinned {
        self.pinned.as_ref().expect("buried by drop alone")
    }

    /// As the device addresses it.
    pub(crate) fn span(&self) -> Span {
        self.pinned().span()
    }

    /// A word that host and device write while work is under way. Memory that has such words holds nothing else.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        self.pinned().word(index)
    }

    /// Whether it belongs to this device.
    pub(crate) fn is_of(&self, device: &Arc<Device>) -> bool {
        ptr::eq(&*self.device, &**device)
    }
}

impl HostMemory for PinnedMemory {
    fn bytes(&self) -> &[u8] {
        self.pinned().as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.pinned.as_mut().expect("buried by drop alone").as_mut_slice()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.device.graves().extend(self.pinned.take().map(Grave::Pinned));
    }
}

/// Where a view lies for the device. Asserts that this backend made it.
pub(crate) fn span(view: &View) -> Span {
    let memory: &CudaMemory = view.buffer().downcast().expect("a view of the CUDA backend");
    memory.span().slice(view.range())
}

/// Where a host buffer lies for the device. Asserts that this device made it.
pub(crate) fn host_span(device: &Arc<Device>, buffer: &HostBuffer) -> Span {
    let memory: &PinnedMemory = buffer.downcast().expect("a host buffer of the CUDA backend");
    assert!(memory.is_of(device), "a host buffer of this card");
    memory.span()
}
