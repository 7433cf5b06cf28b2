//! The device: opening an adapter with what our kernels can use of it, and the [`Backend`] over it.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use freetoken_backend::{
    Backend, Buffer, Caps, Error, Event, Format, HostBuffer, HostBytes, KernelCosts, Lane, Op, Precision,
    Program, Result, Stage, View, ViewCopy, os,
};
use wgpu::{Device, DeviceDescriptor, Features, Limits, MemoryHints};

use crate::{
    adapter::{self, AdapterFacts, IMMEDIATE_BYTES, Select},
    commands::Commands,
    dispatch::{Dispatch, Recorder, Scratch},
    host::{HostPath, WgpuHostMemory},
    memory::{WgpuMemory, buffer, padded, storage},
    ops,
    pipelines::Pipelines,
    program::WgpuProgram,
    queue::Lanes,
    route_point::Desk,
    staging::Staging,
    timing, vulkan,
};

/// How long a wait may last: longer than any submission that we cut to size, short enough for a person.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same where a CPU plays the GPU.
const SOFTWARE_PATIENCE: Duration = Duration::from_secs(600);

/// Rows of a prefill step: of more, experts would have more rows a tile, and activations more memory.
const PREFILL_ROWS: usize = 2048;
/// The same on cooperative matrices, which are done with a weight sooner than it is read again.
const COOPERATIVE_PREFILL_ROWS: usize = 4096;
/// The same where a CPU plays the GPU.
const SOFTWARE_PREFILL_ROWS: usize = 128;

/// What it takes to bind an array of buffers.
const ARRAYS: Features = Features::BUFFER_BINDING_ARRAY
    .union(Features::STORAGE_RESOURCE_BINDING_ARRAY)
    .union(Features::SAMPLED_TEXTURE_AND_STORAGE_BUFFER_ARRAY_NON_UNIFORM_INDEXING);
/// Chunks of an expert pool in one array, at most.
const MAX_ARRAY: u32 = 1024;
/// Buffers that kernels bind beside chunks.
const BESIDE_CHUNKS: u32 = 5;

/// Largest binding of [`Options::floor`].
const FLOOR_BINDING_BYTES: u64 = 2 << 20;

/// How an adapter is opened.
#[derive(Debug, Clone)]
pub struct Options {
    /// How exactly it computes.
    pub precision: Precision,
    /// Directory of compiled pipelines, where the driver can give them out.
    pub cache: Option<PathBuf>,
    /// Use subgroups where there are some. Switched off by tests.
    pub subgroups: bool,
    /// Bind no more than a poor device can, so that matrices and pools are walked through in windows. Switched on by tests.
    pub floor: bool,
    /// Choose kernels as for a GPU where a CPU plays one. Switched on by tests.
    pub as_hardware: bool,
    /// The best way of reading host memory to use where it works. Lowered by tests.
    pub host: HostPath,
}

impl Options {
    /// Everything that the adapter has, and no cache.
    pub fn new(precision: Precision) -> Self {
        Options {
            precision,
            cache: None,
            subgroups: true,
            floor: false,
            as_hardware: false,
            host: HostPath::Imported,
        }
    }
}

/// What recording and replaying read and never change.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) limits: Limits,
    /// Lanes of the smallest subgroup, where subgroups are used.
    pub(crate) subgroups: Option<u32>,
    /// Many rows are multiplied on cooperative matrices.
    pub(crate) cooperative: bool,
    /// A CPU plays the GPU.
    pub(crate) software: bool,
    /// Threads wait for each other at little cost, and many of them hide what memory costs.
    pub(crate) is_parallel: bool,
    /// How it comes by host memory.
    pub(crate) host: HostPath,
    /// A little memory to bind where a kernel reads nothing.
    pub(crate) nothing: wgpu::Buffer,
}

impl Gpu {
    /// What the start of a binding must be a multiple of.
    pub(crate) fn align(&self) -> u32 {
        self.limits.min_storage_buffer_offset_alignment
    }

    /// Largest range that a binding may cover.
    pub(crate) fn max_binding(&self) -> usize {
        usize::try_from(self.limits.max_storage_buffer_binding_size).unwrap_or(usize::MAX)
    }

    /// Threads of a workgroup that works on a row alone: as many as there may be keep as many loads on their way.
    pub(crate) fn most_threads(&self) -> u32 {
        // Without subgroups they meet in workgroup memory, which has no room for more.
        let many = self.limits.max_compute_invocations_per_workgroup >= 1024 && self.subgroups.is_some();
        if many { 1024 } else { 256 }
    }

    /// Whether many rows of halves meet a weight of this format on cooperative matrices.
    pub(crate) fn takes_halves(&self, format: Format) -> bool {
        self.cooperative && format != Format::F32
    }

    /// Whether an array of buffers can be one binding.
    pub(crate) fn binds_arrays(&self) -> bool {
        self.device.features().contains(ARRAYS)
    }

    /// Chunks of an expert pool that one dispatch binds at most: a power of two.
    pub(crate) fn max_window(&self) -> usize {
        let most = match self.binds_arrays() {
            true => self.limits.max_binding_array_elements_per_shader_stage.min(MAX_ARRAY),
            false => (self.limits.max_storage_buffers_per_shader_stage - BESIDE_CHUNKS).min(8),
        };
        1 << most.ilog2()
    }

    /// Teams of a workgroup, at most.
    pub(crate) fn max_teams(&self, threads: u32) -> u32 {
        threads / self.subgroups.unwrap_or(32)
    }
}

/// What only one thread at a time may touch.
pub(crate) struct State {
    pub(crate) lanes: Lanes,
    pub(crate) staging: Staging,
    pub(crate) pipelines: Pipelines,
    pub(crate) scratch: Scratch,
    pub(crate) desk: Desk,
}

struct Inner {
    caps: Caps,
    facts: AdapterFacts,
    gpu: Gpu,
    state: Mutex<State>,
    /// Bytes of all buffers that were handed out and still live.
    allocated: Arc<AtomicU64>,
}

/// An opened adapter.
#[derive(Clone)]
pub struct Wgpu(Arc<Inner>);

impl Wgpu {
    /// Opens an adapter.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when there is no such adapter, when it lacks what the kernels need, or when its driver refuses.
    pub fn open(select: &Select, options: &Options) -> Result<Self> {
        let (adapter, facts) = adapter::find(select)?;
        let mut limits = Limits { max_immediate_size: IMMEDIATE_BYTES, ..adapter.limits() };
        if options.floor {
            limits.max_storage_buffers_per_shader_stage = adapter::MIN_STORAGE_BUFFERS;
            limits.max_storage_buffer_binding_size = FLOOR_BINDING_BYTES;
        }
        let mut wanted = Features::IMMEDIATES | Features::PIPELINE_CACHE | timing::STAMPS;
        let subgroups =
            facts.subgroups.filter(|&(least, most)| options.subgroups && least >= 4 && most <= 128);
        wanted.set(Features::SUBGROUP, subgroups.is_some());
        wanted.set(ARRAYS, !options.floor && adapter.features().contains(ARRAYS));
        let cooperative = facts.cooperative && subgroups.is_some() && options.precision == Precision::Auto;
        if cooperative {
            wanted |= adapter::COOPERATIVE;
        }
        let descriptor = DeviceDescriptor {
            label: Some("freetoken"),
            required_features: wanted & adapter.features(),
            required_limits: limits.clone(),
            memory_hints: MemoryHints::Performance,
            ..DeviceDescriptor::default()
        };
        let (device, queue) = vulkan::open(&adapter, &descriptor).map_err(|e| {
            let why = format!("{} cannot be opened: {e}", facts.name);
            Error::Unsupported { backend: "wgpu", op: "open", why }
        })?;
        let patience = if facts.software { SOFTWARE_PATIENCE } else { PATIENCE };
        let file = options.cache.as_ref().zip(wgpu::util::pipeline_cache_key(&adapter.get_info()));
        let mut state = State {
            lanes: Lanes::new(&device, queue, patience, facts.software),
            staging: Staging::new(&device),
            pipelines: Pipelines::new(&device, file.map(|(directory, key)| directory.join(key))),
            scratch: Scratch::default(),
            desk: Desk::default(),
        };
        let nothing = storage(&device, 1);
        let mut gpu = Gpu {
            subgroups: subgroups.map(|(least, _)| least),
            cooperative,
            software: facts.software,
            is_parallel: !facts.software || options.as_hardware,
            device,
            limits,
            host: HostPath::Copied,
            nothing,
        };
        gpu.host = HostPath::probe(options.host, &gpu, &mut state.lanes, &state.staging);
        let caps = Caps {
            backend: "wgpu",
            device: facts.name.clone(),
            detail: detail(&facts, &gpu),
            precision: options.precision,
            total_bytes: facts.memory_bytes,
            max_binding_bytes: gpu.max_binding(),
            max_storage_buffers: gpu.limits.max_storage_buffers_per_shader_stage,
            prefill_rows: match (gpu.software, gpu.cooperative) {
                (true, _) => SOFTWARE_PREFILL_ROWS,
                (false, true) => COOPERATIVE_PREFILL_ROWS,
                (false, false) => PREFILL_ROWS,
            },
            host_memory: false,
            unified_memory: matches!(facts.kind, "integrated" | "software"),
            reads_host: gpu.host != HostPath::Copied,
        };
        Ok(Wgpu(Arc::new(Inner { caps, facts, gpu, state: Mutex::new(state), allocated: Arc::default() })))
    }

    /// What the adapter says about itself.
    pub fn facts(&self) -> &AdapterFacts {
        &self.0.facts
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in the state is half changed by a panic: the next call sees what was queued.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that can still be allocated, as far as the system tells; other processes on the device are not seen.
    fn free(&self) -> Option<u64> {
        if self.0.gpu.software {
            return os::available_memory();
        }
        self.0.facts.memory_bytes.map(|total| total.saturating_sub(self.0.allocated.load(Relaxed)))
    }

    fn unsupported(&self, op: &'static str, why: String) -> Error {
        Error::Unsupported { backend: "wgpu", op, why }
    }

    /// The dispatches that `record` adds.
    pub(crate) fn dispatches(
        &self,
        state: &mut State,
        record: impl FnOnce(&mut Recorder<'_>),
    ) -> Vec<Dispatch> {
        let State { pipelines, scratch, .. } = state;
        let mut recorder = Recorder { gpu: self.gpu(), pipelines, scratch, dispatches: Vec::new(), work: 0 };
        record(&mut recorder);
        recorder.dispatches
    }

    /// Queues a write that may start or end inside a word: the words around it are read first.
    fn write_bytes(&self, state: &mut State, dst: &View, bytes: &[u8]) -> Result<()> {
        let start = dst.range().start as u64;
        let end = start + bytes.len() as u64;
        let (first, last) = (start / 4 * 4, end.next_multiple_of(4));
        let State { lanes, staging, .. } = state;
        let dst = buffer(dst.buffer());
        if (first, last) == (start, end) {
            return staging.upload(lanes, dst, start, bytes);
        }
        let mut words = vec![0; (last - first) as usize];
        staging.download(lanes, dst, first, &mut words)?;
        words[(start - first) as usize..][..bytes.len()].copy_from_slice(bytes);
        staging.upload(lanes, dst, first, &words)
    }
}

/// The path chosen on an adapter, for people.
fn detail(facts: &AdapterFacts, gpu: &Gpu) -> String {
    let subgroups = gpu.subgroups.map_or("no subgroups".into(), |n| format!("subgroups of {n}"));
    let software = if facts.software { ", software: a CPU plays the GPU" } else { "" };
    let binding = facts.max_binding_bytes >> 20;
    let host = gpu.host.name();
    let matrices = if gpu.cooperative { ", cooperative matrices" } else { "" };
    let (api, driver) = (&facts.api, &facts.driver);
    format!("{api}, {driver}, {subgroups}{matrices}, {binding} MiB a binding, {host}{software}")
}

impl Backend for Wgpu {
    fn caps(&self) -> &Caps {
        &self.0.caps
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(self.free())
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        let gpu = self.gpu();
        if padded(bytes) > gpu.limits.max_buffer_size {
            let most = gpu.limits.max_buffer_size;
            return Err(
                self.unsupported("alloc", format!("a buffer holds at most {most} bytes, not {bytes}"))
            );
        }
        let scope = gpu.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let memory = WgpuMemory::new(&gpu.device, bytes, &self.0.allocated);
        if pollster::block_on(scope.pop()).is_some() {
            drop(memory);
            let free = self.free().and_then(|free| usize::try_from(free).ok()).unwrap_or(0);
            return Err(Error::OutOfMemory { wanted: bytes, free });
        }
        self.lock().lanes.check()?;
        Ok(Buffer::new(memory))
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        Ok(HostBuffer::new(self.gpu().host.alloc(self.gpu(), bytes)?))
    }

    fn import(&self, _bytes: &HostBytes) -> Result<Buffer> {
        Err(self.unsupported("import", "its memory is not host memory".into()))
    }

    fn write(&self, dst: &View, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() <= dst.bytes(), "{} bytes into a view of {}", bytes.len(), dst.bytes());
        if bytes.is_empty() {
            return Ok(());
        }
        let mut state = self.lock();
        self.write_bytes(&mut state, dst, bytes)?;
        state.lanes.check()
    }

    fn read(&self, src: &View, out: &mut [u8]) -> Result<()> {
        assert!(out.len() <= src.bytes(), "{} bytes out of a view of {}", out.len(), src.bytes());
        if out.is_empty() {
            return Ok(());
        }
        let State { lanes, staging, .. } = &mut *self.lock();
        let start = src.range().start as u64;
        let end = start + out.len() as u64;
        let (first, last) = (start / 4 * 4, end.next_multiple_of(4));
        let src = buffer(src.buffer());
        if (first, last) == (start, end) {
            return staging.download(lanes, src, start, out);
        }
        let mut words = vec![0; (last - first) as usize];
        staging.download(lanes, src, first, &mut words)?;
        out.copy_from_slice(&words[(start - first) as usize..][..out.len()]);
        Ok(())
    }

    fn upload(&self, lane: Lane, src: &Arc<HostBuffer>, start: usize, dst: &View) -> Result<Event> {
        let bytes = start..start + dst.bytes();
        let shared = src.downcast::<WgpuHostMemory>().and_then(WgpuHostMemory::buffer);
        // A copy on the device is of whole words.
        let whole = [start, dst.range().start, dst.bytes()].iter().all(|at| at.is_multiple_of(4));
        match shared.filter(|_| whole && !bytes.is_empty()) {
            Some(shared) => {
                assert!(bytes.end <= src.as_slice().len(), "{bytes:?} of {src:?}");
                let State { lanes, .. } = &mut *self.lock();
                let mut commands = Commands::new(lanes, self.gpu());
                commands.copy(shared, start, buffer(dst.buffer()), dst.range().start, dst.bytes());
                let seq = commands.submit();
                commands.lanes.check()?;
                Ok(Event { lane, seq })
            }
            None => {
                self.write(dst, &src.as_slice()[bytes])?;
                self.event(lane)
            }
        }
    }

    fn copy(&self, copies: &[ViewCopy]) -> Result<()> {
        let State { lanes, .. } = &mut *self.lock();
        let mut commands = Commands::new(lanes, self.gpu());
        for copy in copies.iter().filter(|copy| copy.src.bytes() > 0) {
            copy.check();
            let ViewCopy { src, dst } = copy;
            let (from, to) = (src.range().start, dst.range().start);
            commands.copy(buffer(src.buffer()), from, buffer(dst.buffer()), to, src.bytes());
        }
        commands.submit();
        commands.lanes.check()
    }

    fn event(&self, lane: Lane) -> Result<Event> {
        // Small writes wait inside of wgpu for the next submission: an empty one sends them.
        let seq = self.lock().lanes.submit(None);
        Ok(Event { lane, seq })
    }

    /// Both lanes are one queue: everything queued from now on comes behind the event anyway.
    fn after(&self, _lane: Lane, _event: Event) -> Result<()> {
        Ok(())
    }

    fn reached(&self, event: Event) -> Result<bool> {
        self.lock().lanes.reached(event.seq)
    }

    fn wait(&self, event: Event) -> Result<()> {
        self.lock().lanes.wait(event.seq)
    }

    fn supports(&self, op: &Op) -> Result<()> {
        ops::supports(op, self.gpu()).map_err(|why| self.unsupported(op.name(), why))
    }

    fn run(&self, ops: &[Op]) -> Result<()> {
        for op in ops {
            op.check();
            self.supports(op)?;
        }
        let mut state = self.lock();
        let dispatches = self.dispatches(&mut state, |recorder| ops::record_all(ops, recorder));
        state.lanes.check()?;
        let mut commands = Commands::new(&mut state.lanes, self.gpu());
        commands.dispatch(&dispatches);
        commands.submit();
        commands.lanes.check()
    }

    fn time(&self, ops: &[Op]) -> Result<Vec<f64>> {
        let mut timed = Vec::new();
        for op in ops {
            op.check();
            self.supports(op)?;
            timed.push(self.dispatches(&mut self.lock(), |recorder| ops::record(op, recorder)));
        }
        timing::time(&mut self.lock().lanes, self.gpu(), &timed)
    }

    fn time_read(&self, view: &View) -> Result<f64> {
        let read = self.dispatches(&mut self.lock(), |recorder| timing::record_read(view, recorder));
        Ok(timing::time(&mut self.lock().lanes, self.gpu(), &[read])?[0])
    }

    fn product_rate(&self) -> Result<Option<f64>> {
        let state = &mut *self.lock();
        let mut flops = 0.0;
        let multiply = self.dispatches(state, |recorder| flops = timing::record_multiply(recorder));
        let [seconds] = timing::best_of(&mut state.lanes, self.gpu(), &[multiply])?;
        Ok(Some(flops / seconds))
    }

    fn kernel_costs(&self, ops: &[Op]) -> Result<Option<KernelCosts>> {
        for op in ops {
            op.check();
            self.supports(op)?;
        }
        let state = &mut *self.lock();
        let n_kernels = self.dispatches(state, |recorder| ops::record_all(ops, recorder)).len();
        let [few, many] = KernelCosts::CHAINS;
        let chains =
            [1, few, many].map(|n| self.dispatches(state, |recorder| timing::record_empty(n, recorder)));
        timing::kernel_costs(&mut state.lanes, self.gpu(), n_kernels, &chains).map(Some)
    }

    fn record(&self, stages: &[Stage], outputs: &[View]) -> Result<Box<dyn Program>> {
        for stage in stages {
            match stage {
                Stage::Ops(ops) => ops.iter().try_for_each(|op| {
                    op.check();
                    self.supports(op)
                })?,
                Stage::Route(point) => {
                    let op = Op::from(point.mlp.clone());
                    op.check();
                    self.supports(&op)?;
                }
            }
        }
        let program = WgpuProgram::record(self, stages, outputs)?;
        let mut state = self.lock();
        state.pipelines.save();
        state.lanes.check()?;
        Ok(Box::new(program))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Opens each adapter of this machine in turn.
    fn each(test: impl Fn(&dyn Fn() -> Wgpu)) {
        for facts in adapter::adapters().iter().filter(|facts| facts.refusal.is_none()) {
            test(&|| Wgpu::open(&Select::Index(facts.index), &Options::new(Precision::F32)).unwrap());
        }
    }

    #[test]
    fn a_lost_device_is_an_error_of_every_call_and_its_adapter_opens_again() {
        each(|open| {
            let device = open();
            let memory = device.alloc(1 << 20).unwrap().whole();
            device.write(&memory, &vec![1; 1 << 20]).unwrap();
            device.event(Lane::Compute).and_then(|event| device.wait(event)).unwrap();
            device.gpu().device.destroy();
            // What has happened is heard of when somebody asks.
            _ = device.gpu().device.poll(wgpu::PollType::Poll);
            let calls: [(&str, &mut dyn FnMut() -> Result<()>); 7] = [
                ("wait", &mut || device.event(Lane::Compute).and_then(|event| device.wait(event))),
                ("run", &mut || device.run(&[])),
                ("alloc", &mut || device.alloc(256).map(drop)),
                ("read", &mut || device.read(&memory, &mut [0; 256])),
                ("write", &mut || device.write(&memory, &[1; 256])),
                ("large write", &mut || device.write(&memory, &vec![1; 1 << 20])),
                ("time", &mut || device.time_read(&memory).map(drop)),
            ];
            for (name, call) in calls {
                let result = call();
                assert!(matches!(result, Err(Error::DeviceLost { .. })), "{name}: {result:?}");
            }
            let device = open();
            let memory = device.alloc(4).unwrap().whole();
            device.write(&memory, &[7; 4]).unwrap();
            let mut bytes = [0; 4];
            device.read(&memory, &mut bytes).unwrap();
            assert_eq!(bytes, [7; 4]);
        });
    }

    #[test]
    fn more_memory_than_a_buffer_holds_is_refused_and_the_device_goes_on() {
        each(|open| {
            let device = open();
            let error = device.alloc(1 << 50).unwrap_err().to_string();
            assert!(
                error.contains("a buffer holds at most") && error.contains("1125899906842624"),
                "{error}"
            );
            device.alloc(256).unwrap();
        });
    }
}
