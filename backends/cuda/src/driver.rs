//! The CUDA driver: the one file that calls it beyond what cudarc's safe layer covers. Memory, host registration,
//! copies, modules, launches, capture and queries, each with its reason; nothing here knows an op or a program.
//!
//! Invariant: a [`Span`] names memory that this process got from the driver. Its owner (`memory`) frees it only once
//! both streams are idle, so work that was queued with a span never meets freed memory.

#![allow(unsafe_code, reason = "the driver is a C library; every call has its reason beside it")]

use std::{
    ffi::{CString, c_void},
    hint, io,
    ops::Range,
    ptr,
    sync::{Arc, OnceLock, atomic::AtomicU64},
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result, sys};
use freetoken_backend::{Error, Result, os::AnonymousMemory};
use sys::CUresult as Code;

/// How long a waiting thread spins before it lets others run.
const SPIN: Duration = Duration::from_millis(2);
/// How long it yields before it sleeps between two looks.
const YIELD: Duration = Duration::from_millis(100);
/// Sleep between two looks of a long wait.
const NAP: Duration = Duration::from_micros(200);
/// Parameters of a kernel at most.
pub(crate) const MAX_ARGS: usize = 32;

/// Whether the driver's library can be loaded.
pub(crate) fn is_present() -> bool {
    // SAFETY: opens and closes the library of the driver, whose initialisers are safe to run at any time.
    unsafe { sys::is_culib_present() }
}

/// CUDA version of the driver, `1000 * major + 10 * minor`. Only after [`is_present`].
pub(crate) fn version() -> std::result::Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: writes one int; needs no context and no initialisation.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// Bytes of memory of a card, without a context on it.
pub(crate) fn total_bytes(card: sys::CUdevice) -> std::result::Result<usize, DriverError> {
    // SAFETY: `card` was given by the driver.
    unsafe { result::device::total_mem(card) }
}

/// An attribute of a card, without a context on it.
pub(crate) fn attribute(
    card: sys::CUdevice,
    attribute: sys::CUdevice_attribute,
) -> std::result::Result<i32, DriverError> {
    // SAFETY: `card` was given by the driver.
    unsafe { result::device::get_attribute(card, attribute) }
}

/// Name and sentence of an error of the driver.
pub(crate) fn describe(error: DriverError) -> String {
    let text = |answer: std::result::Result<&std::ffi::CStr, DriverError>| {
        answer
            .map_or_else(|_| format!("error {}", error.0 as u32), |text| text.to_string_lossy().into_owned())
    };
    format!("{}: {}", text(error.error_name()), text(error.error_string()))
}

/// Whether a context is dead after this error: every later call on it fails as well.
fn is_fatal(code: Code) -> bool {
    matches!(
        code,
        Code::CUDA_ERROR_DEINITIALIZED
            | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
            | Code::CUDA_ERROR_NO_DEVICE
            | Code::CUDA_ERROR_INVALID_DEVICE
            | Code::CUDA_ERROR_INVALID_CONTEXT
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
            | Code::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | Code::CUDA_ERROR_CONTAINED
            | Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_SYSTEM_NOT_READY
            | Code::CUDA_ERROR_EXTERNAL_DEVICE
            | Code::CUDA_ERROR_UNKNOWN
    )
}

/// A range of memory as the device addresses it: its own, or registered memory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    address: u64,
    bytes: usize,
}

impl Span {
    /// Of an address that the driver gave.
    pub(crate) const fn new(address: u64, bytes: usize) -> Self {
        Span { address, bytes }
    }

    /// Where it starts, as kernels take it.
    pub(crate) fn address(self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub(crate) fn bytes(self) -> usize {
        self.bytes
    }

    /// Part of it. Asserts that it lies inside.
    pub(crate) fn slice(self, range: Range<usize>) -> Span {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        Span { address: self.address + range.start as u64, bytes: range.len() }
    }
}

/// Host memory that the device reads and writes, registered and never write-combined: the CPU reads it at full speed.
pub(crate) struct Pinned {
    memory: AnonymousMemory,
    /// Where the host has it, exposed.
    start: usize,
    span: Span,
}

impl Pinned {
    /// As the device addresses it.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// As the host reads it. Nothing that is queued may write what the caller reads.
    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.memory.as_ref()[..self.span.bytes]
    }

    /// As the host writes it. Nothing that is queued may read what the caller writes.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut()[..self.span.bytes]
    }

    /// A word that host and device write while work is under way. Asserts that it lies inside.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        let bytes = size_of::<u64>();
        assert!((index + 1) * bytes <= self.span.bytes, "word {index} of {} bytes", self.span.bytes);
        let word = ptr::with_exposed_provenance_mut(self.start + index * bytes);
        // SAFETY: aligned, since memory starts at a page, and inside of it. Memory with such words holds nothing else, so the
        // host reads and writes it by atomics alone; the device does so by loads and stores of the same size.
        unsafe { AtomicU64::from_ptr(word) }
    }
}

/// A loaded cubin or PTX text.
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a handle that the driver lets any thread use; it is unloaded once, by its last owner.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // SAFETY: loaded by `Driver::module`, and no kernel of it is left: each holds its module.
        self.context.record_err(unsafe { result::module::unload(self.raw) });
    }
}

/// A function of a module, resident on the device.
#[derive(Clone)]
pub(crate) struct Kernel {
    raw: sys::CUfunction,
    _module: Arc<Module>,
}

// SAFETY: a handle that the driver lets any thread use, kept valid by its module.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// A recorded list of work.
pub(crate) struct Graph(CudaGraph);

// SAFETY: the driver lets one thread at a time use a graph; only the owner of a program or the graveyard has it.
unsafe impl Send for Graph {}

/// Blocks, threads and shared memory of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Blocks in x, y, z.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// A context on one card. The first error that kills it is kept and answers every later call.
pub(crate) struct Driver {
    context: Arc<CudaContext>,
    lost: OnceLock<String>,
}

impl Driver {
    /// Opens a card that `probe` found.
    pub(crate) fn open(ordinal: usize) -> Result<Self> {
        let refused =
            |error| Error::Os { what: "opening the card", source: io::Error::other(describe(error)) };
        let context = CudaContext::new(ordinal).map_err(refused)?;
        // SAFETY: no `CudaSlice` is ever made; this crate orders its streams by events of its own.
        unsafe { context.disable_event_tracking() };
        Ok(Driver { context, lost: OnceLock::new() })
    }

    /// Refuses once the device is lost.
    pub(crate) fn alive(&self) -> Result<()> {
        match self.lost.get() {
            Some(what) => Err(Error::DeviceLost { what: what.clone() }),
            None => Ok(()),
        }
    }

    /// Types the driver's answer: an error that kills the context stays.
    pub(crate) fn check<T>(
        &self,
        what: &'static str,
        answer: std::result::Result<T, DriverError>,
    ) -> Result<T> {
        answer.map_err(|error| {
            if self.lost.get().is_none() && !is_fatal(error.0) {
                return Error::Os { what, source: io::Error::other(describe(error)) };
            }
            let what = self.lost.get_or_init(|| format!("{what}: {}", describe(error)));
            Error::DeviceLost { what: what.clone() }
        })
    }

    fn bind(&self) -> Result<()> {
        self.alive()?;
        self.check("binding the device to a thread", self.context.bind_to_thread())
    }

    /// A number of the card.
    pub(crate) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<u32> {
        let answer = self.check("asking what the card can do", self.context.attribute(attribute))?;
        Ok(answer.unsigned_abs())
    }

    /// Bytes free and bytes in all.
    pub(crate) fn memory(&self) -> Result<(usize, usize)> {
        self.alive()?;
        self.check("asking for free memory", self.context.mem_get_info())
    }

    /// A stream that the null stream does not order.
    pub(crate) fn stream(&self) -> Result<Arc<CudaStream>> {
        self.alive()?;
        self.check("making a stream", self.context.new_stream())
    }

    /// An event, reached until it is recorded.
    pub(crate) fn event(&self) -> Result<CudaEvent> {
        self.alive()?;
        self.check("making an event", self.context.new_event(None))
    }

    /// An event that keeps the time at which it is reached.
    pub(crate) fn timing_event(&self) -> Result<CudaEvent> {
        self.alive()?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        self.check("making an event", self.context.new_event(Some(flags)))
    }

    /// Puts a time stamp into the graph that is being recorded.
    pub(crate) fn stamp(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: event and stream are alive and belong to the bound context.
        let answer =
            unsafe { sys::cuEventRecordWithFlags(event.cu_event(), stream.cu_stream(), flags) }.result();
        self.check("recording an event", answer)
    }

    /// Seconds from one reached timing event to another.
    pub(crate) fn seconds(&self, start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
        let milliseconds = self.check("reading a time stamp", start.elapsed_ms(end))?;
        Ok(f64::from(milliseconds) / 1e3)
    }

    /// Puts the event behind everything queued in the stream.
    pub(crate) fn record(&self, event: &CudaEvent, stream: &CudaStream) -> Result<()> {
        self.check("recording an event", event.record(stream))
    }

    /// Makes what is queued in the stream from now on wait for the event.
    pub(crate) fn after(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        self.check("ordering two streams", stream.wait(event))
    }

    /// Whether the event is reached.
    pub(crate) fn reached(&self, event: &CudaEvent) -> Result<bool> {
        self.bind()?;
        self.check("waiting for the device", event.try_is_complete())
    }

    /// Whether everything queued in the stream is done.
    pub(crate) fn is_idle(&self, stream: &CudaStream) -> Result<bool> {
        self.bind()?;
        // SAFETY: the stream is alive and belongs to the bound context.
        match unsafe { sys::cuStreamQuery(stream.cu_stream()) }.result() {
            Err(DriverError(Code::CUDA_ERROR_NOT_READY)) => Ok(false),
            answer => self.check("waiting for the device", answer).map(|()| true),
        }
    }

    /// Looks until `done` or until `limit` has passed, which it answers with false.
    pub(crate) fn wait(&self, limit: Duration, done: impl Fn() -> Result<bool>) -> Result<bool> {
        let start = Instant::now();
        while !done()? {
            let waited = start.elapsed();
            if waited >= limit {
                return Ok(false);
            }
            match waited {
                _ if waited < SPIN => hint::spin_loop(),
                _ if waited < YIELD => thread::yield_now(),
                _ => thread::sleep(NAP),
            }
        }
        Ok(true)
    }

    /// Device memory, not cleared.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Span> {
        self.bind()?;
        // SAFETY: the context is bound; the driver checks the size.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Err(DriverError(Code::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, _) = self.memory()?;
                Err(Error::OutOfMemory { wanted: bytes, free })
            }
            answer => Ok(Span::new(self.check("allocating device memory", answer)?, bytes)),
        }
    }

    /// Frees device memory that nothing queued uses.
    pub(crate) fn free(&self, span: Span) -> Result<()> {
        self.bind()?;
        // SAFETY: from `alloc`, and its only owner gave it up.
        self.check("freeing device memory", unsafe { result::free_sync(span.address) })
    }

    /// Registers host memory of at least one byte, all in one piece: a copy may not cross two registrations.
    pub(crate) fn pin(&self, mut memory: AnonymousMemory, bytes: usize) -> Result<Pinned> {
        self.bind()?;
        let start: *mut c_void = memory.as_mut().as_mut_ptr().cast();
        let registered = memory.as_ref().len();
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the pages belong to `memory`, which lives in the returned value and is unregistered before it is dropped.
        let answer = unsafe { sys::cuMemHostRegister_v2(start, registered, flags) }.result();
        self.check("pinning host memory for the device (use fewer experts in RAM, or raise the limit on locked memory)", answer)?;
        let mut address = 0;
        // SAFETY: registered above with DEVICEMAP.
        let answer = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut address, start, 0) }.result();
        if answer.is_err() {
            // SAFETY: registered above; nothing was queued with it.
            self.check("releasing pinned memory", unsafe { sys::cuMemHostUnregister(start) }.result())?;
        }
        self.check("mapping pinned memory for the device", answer)?;
        Ok(Pinned { memory, start: start.expose_provenance(), span: Span::new(address, bytes) })
    }

    /// Takes pinned memory back that nothing queued uses. Where the driver refuses, the pages are leaked, not unmapped.
    pub(crate) fn unpin(&self, mut pinned: Pinned) -> Result<()> {
        let start: *mut c_void = pinned.memory.as_mut().as_mut_ptr().cast();
        let unregister = || {
            self.bind()?;
            // SAFETY: registered by `pin`, once.
            self.check("releasing pinned memory", unsafe { sys::cuMemHostUnregister(start) }.result())
        };
        unregister().inspect_err(|_| std::mem::forget(pinned))
    }

    /// Queues zeroing.
    pub(crate) fn zero(&self, stream: &CudaStream, span: Span) -> Result<()> {
        self.bind()?;
        // SAFETY: the span is alive by the invariant of this module.
        let answer = unsafe { result::memset_d8_async(span.address, 0, span.bytes, stream.cu_stream()) };
        self.check("clearing device memory", answer)
    }

    /// Queues writing one aligned 32-bit word, which travels with the call.
    pub(crate) fn write_word(&self, stream: &CudaStream, span: Span, word: u32) -> Result<()> {
        assert!(span.bytes == 4 && span.address.is_multiple_of(4), "one aligned word");
        self.bind()?;
        // SAFETY: the span is alive by the invariant of this module.
        let answer = unsafe { sys::cuMemsetD32Async(span.address, word, 1, stream.cu_stream()) }.result();
        self.check("writing a word of device memory", answer)
    }

    /// Queues a copy between spans of one size, in either direction.
    pub(crate) fn copy(&self, stream: &CudaStream, dst: Span, src: Span) -> Result<()> {
        assert_eq!(dst.bytes, src.bytes, "a copy has one size");
        if dst.bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: both spans are alive by the invariant of this module; addresses are unified, and host memory is registered.
        let answer =
            unsafe { sys::cuMemcpyAsync(dst.address, src.address, dst.bytes, stream.cu_stream()) }.result();
        self.check("copying memory", answer)
    }

    /// Loads a cubin, or compiles PTX text.
    pub(crate) fn module(&self, image: &[u8]) -> Result<Arc<Module>> {
        self.bind()?;
        // Aligned as an ELF file asks, and with the zero byte that ends a PTX text.
        let mut aligned = vec![0_u64; image.len() / 8 + 1];
        bytemuck::cast_slice_mut(&mut aligned)[..image.len()].copy_from_slice(image);
        // SAFETY: the image comes from the bundle in this binary, ends in a zero byte, and lives for the call.
        let answer = unsafe { result::module::load_data(aligned.as_ptr().cast()) };
        let raw = self.check("loading kernels", answer)?;
        Ok(Arc::new(Module { raw, context: self.context.clone() }))
    }

    /// Finds a function and brings it onto the device at once: loading later could wait for a step in flight.
    pub(crate) fn kernel(&self, module: &Arc<Module>, name: &str) -> Result<Option<Kernel>> {
        self.bind()?;
        let name = CString::new(name).expect("names of kernels hold no zero byte");
        // SAFETY: the module is loaded and stays so as long as the kernel holds it.
        let raw = match unsafe { result::module::get_function(module.raw, name) } {
            Err(DriverError(Code::CUDA_ERROR_NOT_FOUND)) => return Ok(None),
            answer => self.check("finding a kernel", answer)?,
        };
        // SAFETY: the function belongs to a loaded module.
        self.check("loading a kernel", unsafe { sys::cuFuncLoad(raw) }.result())?;
        Ok(Some(Kernel { raw, _module: module.clone() }))
    }

    /// Sets how much dynamic shared memory launches of a kernel may ask for.
    pub(crate) fn allow_shared(&self, kernel: &Kernel, shared_bytes: u32) -> Result<()> {
        self.bind()?;
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function belongs to a loaded module; the driver checks the size.
        let answer =
            unsafe { result::function::set_function_attribute(kernel.raw, attribute, shared_bytes as i32) };
        self.check("giving a kernel its shared memory", answer)
    }

    /// Size in bytes of a kernel's parameter; `None` behind the last one.
    pub(crate) fn param_bytes(&self, kernel: &Kernel, index: usize) -> Result<Option<usize>> {
        self.bind()?;
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function belongs to a loaded module; two numbers are written.
        let answer = unsafe { sys::cuFuncGetParamInfo(kernel.raw, index, &mut offset, &mut bytes) }.result();
        match answer {
            Err(DriverError(Code::CUDA_ERROR_INVALID_VALUE)) => Ok(None),
            answer => self.check("asking for a kernel's parameters", answer).map(|()| Some(bytes)),
        }
    }

    /// Queues a kernel; `args` are its parameters in order, each as many bytes as the kernel declares. With `early` it may come onto
    /// the device while the kernel queued just before it still runs; it must wait for that one by itself.
    pub(crate) fn launch<'a>(
        &self,
        stream: &CudaStream,
        kernel: &Kernel,
        shape: Shape,
        args: impl Iterator<Item = &'a [u8]>,
        early: bool,
    ) -> Result<()> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (pointer, arg) in pointers.iter_mut().zip(args) {
            *pointer = arg.as_ptr().cast_mut().cast();
        }
        self.bind()?;
        let Shape { grid: [gx, gy, gz], block: [bx, by, bz], shared_bytes } = shape;
        let mut attribute = sys::CUlaunchAttribute_st {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue_union { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig_st {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: shared_bytes,
            hStream: stream.cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        // SAFETY: the driver copies the parameters before it returns and only reads them; what they point to is alive by the
        // invariant of this module, and `Op::check` has compared its size with what the op declares.
        let answer = unsafe {
            sys::cuLaunchKernelEx(&config, kernel.raw, pointers.as_mut_ptr(), std::ptr::null_mut())
        }
        .result();
        self.check("launching a kernel", answer)
    }

    /// Records what `queue` queues in the stream, makes it launchable and brings it onto the device. Nothing runs.
    pub(crate) fn capture(
        &self,
        stream: &Arc<CudaStream>,
        queue: impl FnOnce() -> Result<()>,
    ) -> Result<Graph> {
        self.alive()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.check("recording a graph", stream.begin_capture(mode))?;
        let queued = queue();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        queued?;
        let graph = self.check("making a graph", graph)?.expect("a graph that was captured without an error");
        self.check("bringing a graph onto the device", graph.upload())?;
        Ok(Graph(graph))
    }

    /// Queues a graph in the stream that it was captured in.
    pub(crate) fn launch_graph(&self, graph: &Graph) -> Result<()> {
        self.alive()?;
        self.check("launching a graph", graph.0.launch())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_sliced_inside_their_bounds() {
        let span = Span::new(0x1000, 64);
        assert_eq!(span.slice(16..64), Span::new(0x1010, 48));
        assert_eq!(span.slice(64..64).bytes(), 0);
        assert!(std::panic::catch_unwind(|| span.slice(16..65)).is_err());
    }

    #[test]
    fn only_errors_that_kill_a_context_are_fatal() {
        for code in
            [Code::CUDA_ERROR_ILLEGAL_ADDRESS, Code::CUDA_ERROR_LAUNCH_FAILED, Code::CUDA_ERROR_UNKNOWN]
        {
            assert!(is_fatal(code), "{code:?}");
        }
        for code in
            [Code::CUDA_ERROR_INVALID_VALUE, Code::CUDA_ERROR_OUT_OF_MEMORY, Code::CUDA_ERROR_NOT_FOUND]
        {
            assert!(!is_fatal(code), "{code:?}");
        }
    }
}
