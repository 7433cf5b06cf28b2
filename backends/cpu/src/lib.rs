//! The CPU backend: [`Cpu::reference`] runs the scalar reference of every op, [`Cpu::new`] the fast paths beside it.
//!
//! Device memory is host memory here: weights are used where a checkpoint is mapped, and a route point is a call.

mod experts;
mod fast;
mod isa;
mod memory;
mod parallel;
mod pool;
mod program;
mod reference;
mod stored;
mod stream;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use fast::{Fast, Scratch};
use freetoken_backend::{
    Backend, Buffer, Caps, Error, Event, Experts, Format, HostBuffer, HostBytes, Lane, Op, Precision,
    Program, Result, Stage, View, ViewCopy, os,
};
use isa::Isa;
use pool::Pool;
use stream::stream_read;

use crate::memory::{CpuHostMemory, CpuMemory, slice, slice_mut};

/// How the CPU is used.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Worker threads; one for each physical core by default.
    pub threads: Option<usize>,
    /// How exactly.
    pub precision: Precision,
}

/// The CPU as a device.
#[derive(Clone)]
pub struct Cpu(Arc<Inner>);

struct Inner {
    caps: Caps,
    /// `None`: the scalar reference.
    fast: Option<Fast>,
    /// Held by whoever runs something; see the invariant in `memory`.
    scratch: Mutex<Scratch>,
}

impl Cpu {
    /// The fast paths.
    ///
    /// # Errors
    /// The system's refusal to start a thread.
    pub fn new(options: CpuOptions) -> Result<Self> {
        Self::open(Isa::detect(), options)
    }

    /// One instance for each instruction set that this CPU has: what the conformance tests run.
    ///
    /// # Errors
    /// The system's refusal to start a thread.
    pub fn every_isa(options: CpuOptions) -> Result<Vec<Self>> {
        Isa::available().into_iter().map(|isa| Self::open(isa, options)).collect()
    }

    fn open(isa: Isa, CpuOptions { threads, precision }: CpuOptions) -> Result<Self> {
        let pool =
            Pool::new(threads).map_err(|source| Error::Os { what: "starting worker threads", source })?;
        let detail = format!("{} threads, {}", pool.n_workers(), isa.name());
        let auto = precision == Precision::Auto;
        let (bf16, nibbles) = (auto && isa.multiplies_bf16(), auto && isa.multiplies_nibbles());
        Ok(Self::with(detail, precision, Some(Fast { pool, isa, bf16, nibbles })))
    }

    /// The scalar reference: one thread, f32.
    pub fn reference() -> Self {
        Self::with("scalar reference".into(), Precision::F32, None)
    }

    fn with(detail: String, precision: Precision, fast: Option<Fast>) -> Self {
        let caps = Caps {
            backend: "cpu",
            device: os::cpu_name(),
            detail,
            precision,
            total_bytes: os::total_memory(),
            max_binding_bytes: usize::MAX,
            max_storage_buffers: u32::MAX,
            prefill_rows: 512,
            host_memory: true,
            unified_memory: true,
            reads_host: true,
        };
        Cpu(Arc::new(Inner { caps, fast, scratch: Mutex::default() }))
    }

    fn lock(&self) -> MutexGuard<'_, Scratch> {
        // A panic leaves nothing in the scratch that a later op relies on.
        self.0.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve(&self, op: &Op, scratch: &mut Scratch) -> Result<()> {
        op.check();
        self.supports(op)?;
        if let Some(fast) = &self.0.fast {
            scratch.reserve(op, fast.pool.n_workers());
        }
        Ok(())
    }
}

impl Inner {
    fn run(&self, op: &Op, scratch: &mut Scratch) {
        match &self.fast {
            Some(fast) => fast.run(op, scratch),
            None => reference::run(op),
        }
    }
}

impl Backend for Cpu {
    fn caps(&self) -> &Caps {
        &self.0.caps
    }

    fn free_bytes(&self) -> Result<Option<u64>> {
        Ok(os::available_memory())
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer> {
        CpuMemory::zeroed(bytes).map(Buffer::new).map_err(|_| out_of_memory(bytes))
    }

    fn alloc_host(&self, bytes: usize) -> Result<HostBuffer> {
        let memory = os::anonymous(bytes.max(1)).map_err(|_| out_of_memory(bytes))?;
        Ok(HostBuffer::new(CpuHostMemory { memory, bytes }))
    }

    fn import(&self, bytes: &HostBytes) -> Result<Buffer> {
        if bytes.as_slice().as_ptr().cast::<f32>().is_aligned() {
            return Ok(Buffer::new(CpuMemory::Imported(bytes.clone())));
        }
        let copy = self.alloc(bytes.len())?;
        self.write(&copy.whole(), bytes.as_slice())?;
        Ok(copy)
    }

    fn write(&self, dst: &View, bytes: &[u8]) -> Result<()> {
        let _turn = self.lock();
        slice_mut::<u8>(dst)[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, src: &View, out: &mut [u8]) -> Result<()> {
        let _turn = self.lock();
        out.copy_from_slice(&slice::<u8>(src)[..out.len()]);
        Ok(())
    }

    fn upload(&self, lane: Lane, src: &Arc<HostBuffer>, start: usize, dst: &View) -> Result<Event> {
        self.write(dst, &src.as_slice()[start..start + dst.bytes()])?;
        self.event(lane)
    }

    fn copy(&self, copies: &[ViewCopy]) -> Result<()> {
        let _turn = self.lock();
        for copy in copies {
            copy.check();
            slice_mut::<u8>(&copy.dst).copy_from_slice(slice(&copy.src));
        }
        Ok(())
    }

    /// Everything is done when its call returns, so every event is reached when it is made.
    fn event(&self, lane: Lane) -> Result<Event> {
        Ok(Event { lane, seq: 0 })
    }

    fn after(&self, _lane: Lane, _event: Event) -> Result<()> {
        Ok(())
    }

    fn reached(&self, _event: Event) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self, _event: Event) -> Result<()> {
        Ok(())
    }

    fn supports(&self, op: &Op) -> Result<()> {
        let kv = match op {
            Op::RopeCache(op) => Some(op.kv.format),
            Op::Attention(op) => Some(op.kv.format),
            _ => None,
        };
        if kv.is_some_and(|kv| !matches!(kv, Format::F32 | Format::Bf16)) {
            let why = "the cache is f32 or bf16".into();
            return Err(Error::Unsupported { backend: "cpu", op: op.name(), why });
        }
        Ok(())
    }

    fn run(&self, ops: &[Op]) -> Result<()> {
        let mut scratch = self.lock();
        for op in ops {
            self.reserve(op, &mut scratch)?;
            self.0.run(op, &mut scratch);
        }
        Ok(())
    }

    fn time_read(&self, view: &View) -> Result<f64> {
        let _turn = self.lock();
        let start = Instant::now();
        match &self.0.fast {
            Some(fast) => std::hint::black_box(stream_read(&fast.pool, slice(view))),
            None => std::hint::black_box(slice::<u64>(view).iter().fold(0, |seen, word| seen ^ word)),
        };
        Ok(start.elapsed().as_secs_f64())
    }

    fn record(&self, stages: &[Stage], outputs: &[View]) -> Result<Box<dyn Program>> {
        let mut scratch = self.lock();
        for stage in stages {
            match stage {
                Stage::Ops(ops) => ops.iter().try_for_each(|op| self.reserve(op, &mut scratch))?,
                Stage::Route(_) if self.0.fast.is_none() => {
                    let why = "the scalar reference runs ops only".into();
                    return Err(Error::Unsupported { backend: "cpu", op: "route_point", why });
                }
                Stage::Route(point) => {
                    assert!(matches!(point.mlp.experts, Experts::Pool { .. }), "a route point has a pool");
                    self.reserve(&point.mlp.clone().into(), &mut scratch)?;
                }
            }
        }
        Ok(Box::new(program::CpuProgram::new(self.clone(), stages, outputs)))
    }
}

fn out_of_memory(wanted: usize) -> Error {
    let free = os::available_memory().and_then(|free| usize::try_from(free).ok()).unwrap_or(0);
    Error::OutOfMemory { wanted, free }
}
