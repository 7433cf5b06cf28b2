//! The CUDA backend: NVIDIA cards from compute capability 8.0 on, through the driver alone.
//!
//! Ops become launches of kernels that were compiled long before (`bundle`); a program is captured into a CUDA graph once and
//! replayed by one call, its route points included. The library of the driver is loaded at run time: without one, [`cards`] says so and nothing panics.

mod args;
mod bundle;
mod driver;
mod kernels;
mod lanes;
mod launch;
mod memory;
mod modules;
mod probe;
mod program;
mod recorder;
mod route_point;
mod segment;
mod staging;
mod timing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use freetoken_backend::{
    Backend, Buffer, Caps, Error, Event, HostBuffer, HostBytes, KernelCosts, Lane, Op, Precision, Program,
    Result, Stage, View, ViewCopy,
};
pub use probe::{Card, CardChoice, ProbeError, cards};
pub use segment::Submission;

use crate::{
    lanes::Lanes,
    launch::CardFacts,
    memory::{CudaMemory, Device},
    modules::Modules,
    recorder::ChunkTables,
    staging::Staging,
};

/// How a card is used.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// How exactly.
    pub precision: Precision,
    /// How programs reach it.
    pub submission: Submission,
}

/// Why a card could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is none, or none that kernels run on.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The card's refusal.
    #[error(transparent)]
    Backend(#[from] Error),
    /// The kernels in this binary do not fit the card.
    #[error("the kernels of this binary do not run on {name}: {why}")]
    Kernels {
        /// Name of the card.
        name: String,
        /// What is missing.
        why: String,
    },
}

/// A card as a device.
#[derive(Clone)]
pub struct Cuda(Arc<Inner>);

struct Inner {
    caps: Caps,
    facts: CardFacts,
    submission: Submission,
    /// Whether the device may wait for the host in the middle of a graph.
    rings: bool,
    device: Arc<Device>,
    /// Held by whoever queues something.
    state: Mutex<State>,
}

/// What changes while a card is used.
pub(crate) struct State {
    lanes: Lanes,
    staging: Staging,
    modules: Modules,
    chunk_tables: ChunkTables,
    counters: CudaMemory,
    /// Of ops that run once; a program has its own.
    scratch: CudaMemory,
}

impl Cuda {
    /// Opens a card and loads the kernels for it.
    ///
    /// # Errors
    /// [`OpenError`]: no driver, one that is too old, no such card, a card that is too old, or the card's refusal.
    pub fn open(choice: &CardChoice, options: CudaOptions) -> std::result::Result<Self, OpenError> {
        let cards = cards()?;
        let card = probe::choose(&cards, choice)?;
        let device = Device::open(card.ordinal)?;
        let (target, images) = bundle::pick(card.capability)
            .map_err(|why| OpenError::Kernels { name: card.name.clone(), why })?;
        let sms = device.driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let facts = CardFacts { sms, sm_90: matches!(target, bundle::Target::Cubin(9.., _)) };
        let state = State {
            lanes: Lanes::new(&device)?,
            staging: Staging::new(&device)?,
            modules: Modules::load(&device.driver, images)?,
            chunk_tables: ChunkTables::default(),
            counters: recorder::counters(&device)?,
            scratch: device.alloc(0)?,
        };
        let caps = caps(card, &facts, &device, options)?;
        // WDDM may hold work back until the host calls again, which a host that spins on a bell does not.
        let is_wddm =
            cfg!(windows) && device.driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_TCC_DRIVER)? == 0;
        let submission = options.submission;
        let rings = submission == Submission::Graph && caps.reads_host && !is_wddm;
        let state = Mutex::new(state);
        Ok(Cuda(Arc::new(Inner { caps, facts, submission, rings, device, state })))
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.0.device
    }

    pub(crate) fn precision(&self) -> Precision {
        self.0.caps.precision
    }

    pub(crate) fn facts(&self) -> &CardFacts {
        &self.0.facts
    }

    pub(crate) fn submission(&self) -> Submission {
        self.0.submission
    }

    pub(crate) fn rings(&self) -> bool {
        self.0.rings
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Each field is whole between two calls: a panic loses work that was queued, never a handle.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn caps(card: &Card, facts: &CardFacts, device: &Device, options: CudaOptions) -> Result<Caps> {
    let (major, minor) = card.capability;
    let how = match options.submission {
        Submission::Graph => "graphs",
        Submission::Staged => "staged",
    };
    Ok(Caps {
        backend: "cuda",
        device: card.name.clone(),
        detail: format!(
            "card {}, GPU-{}, compute capability {major}.{minor}, {} SMs, {how}",
            card.ordinal, card.uuid, facts.sms
        ),
        precision: options.precision,
        total_bytes: Some(card.total_bytes),
        max_binding_bytes: usize::MAX,
        max_storage_buffers: u32::MAX,
        prefill_rows: 4096,
        host_memory: false,
        unified_memory: device.driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? == 1,
        reads_host: device.driver.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)? == 1,
    })
}

impl Backend for Cuda {
    fn caps(&self) -> &Caps {
        &self.0.caps
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        let _turn = self.lock();
        self.device().wait_idle()?;
        self.device().empty_graveyard()?;
        Ok(Some(self.device().driver.memory()?.0 as u64))
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        let _turn = self.lock();
        self.device().alloc(bytes).map(Buffer::new)
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        let _turn = self.lock();
        self.device().pin(bytes).map(HostBuffer::new)
    }

    fn import(&self, _bytes: &HostBytes) -> Result<Buffer> {
        let why = "the memory of the card is not the host's".into();
        Err(Error::Unsupported { backend: "cuda", op: "import", why })
    }

    fn write(&self, dst: &View, bytes: &[u8]) -> Result<()> {
        self.lock().staging.write(self.device(), memory::span(dst), bytes)
    }

    fn read(&self, src: &View, out: &mut [u8]) -> Result<()> {
        self.lock().staging.read(self.device(), memory::span(src), out)
    }

    fn upload(&self, lane: Lane, src: &Arc<HostBuffer>, start: usize, dst: &View) -> Result<Event> {
        let mut state = self.lock();
        let (dst, src) = (memory::span(dst), memory::host_span(self.device(), src));
        let src = src.slice(start..start + dst.bytes());
        self.device().driver.copy(&state.lanes.stream(lane), dst, src)?;
        state.lanes.event(self.device(), lane)
    }

    fn copy(&self, copies: &[ViewCopy]) -> Result<()> {
        let _turn = self.lock();
        let Device { driver, compute, .. } = &**self.device();
        copies.iter().try_for_each(|copy| {
            copy.check();
            driver.copy(compute, memory::span(&copy.dst), memory::span(&copy.src))
        })
    }

    fn event(&self, lane: Lane) -> Result<Event> {
        self.lock().lanes.event(self.device(), lane)
    }

    fn after(&self, lane: Lane, event: Event) -> Result<()> {
        self.lock().lanes.after(self.device(), lane, event)
    }

    fn reached(&self, event: Event) -> Result<bool> {
        self.lock().lanes.reached(self.device(), event)
    }

    fn wait(&self, event: Event) -> Result<()> {
        self.lock().lanes.wait(self.device(), event)
    }

    fn supports(&self, op: &Op) -> Result<()> {
        recorder::plan(self, op).map(drop)
    }

    fn run(&self, ops: &[Op]) -> Result<()> {
        recorder::run(self, &mut self.lock(), ops)
    }

    fn time(&self, ops: &[Op]) -> Result<Vec<f64>> {
        timing::time(self, &mut self.lock(), ops)
    }

    fn time_read(&self, view: &View) -> Result<f64> {
        timing::time_read(self, &mut self.lock(), view)
    }

    fn kernel_costs(&self, ops: &[Op]) -> Result<Option<KernelCosts>> {
        timing::kernel_costs(self, &mut self.lock(), ops).map(Some)
    }

    fn product_rate(&self) -> Result<Option<f64>> {
        timing::product_rate(self, &mut self.lock()).map(Some)
    }

    fn record(&self, stages: &[Stage], outputs: &[View]) -> Result<Box<dyn Program>> {
        let program = recorder::record(self, &mut self.lock(), stages, outputs)?;
        Ok(Box::new(program))
    }
}
