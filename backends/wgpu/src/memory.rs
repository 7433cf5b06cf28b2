//! The device's memory: what stands behind a [`Buffer`], and how a view becomes a binding.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use freetoken_backend::{Buffer, DeviceMemory, View};
use wgpu::{BufferBinding, BufferUsages};

/// Buffers are a multiple of this many bytes, so that a binding may end behind the last odd element.
const PADDING: u64 = 256;
/// Kernels read weights and activations this many bytes at a time: bindings end at a multiple of it.
const VEC_BYTES: u64 = 16;

/// What any buffer of ours may be used for.
const USAGE: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

/// A buffer of the device.
pub(crate) struct WgpuMemory {
    pub(crate) buffer: wgpu::Buffer,
    bytes: usize,
    allocated: Arc<AtomicU64>,
}

impl WgpuMemory {
    /// Zeroed memory, counted in `allocated` while it lives.
    pub(crate) fn new(device: &wgpu::Device, bytes: usize, allocated: &Arc<AtomicU64>) -> Self {
        let buffer = storage(device, bytes);
        allocated.fetch_add(buffer.size(), Relaxed);
        WgpuMemory { buffer, bytes, allocated: allocated.clone() }
    }
}

/// A zeroed buffer that is not counted.
pub(crate) fn storage(device: &wgpu::Device, bytes: usize) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: padded(bytes),
        usage: USAGE,
        mapped_at_creation: false,
    })
}

/// Bytes that a buffer of `bytes` takes.
pub(crate) fn padded(bytes: usize) -> u64 {
    (bytes.max(1) as u64).next_multiple_of(PADDING)
}

impl Drop for WgpuMemory {
    fn drop(&mut self) {
        self.allocated.fetch_sub(self.buffer.size(), Relaxed);
    }
}

impl DeviceMemory for WgpuMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The buffer behind a handle.
pub(crate) fn buffer(handle: &Buffer) -> &wgpu::Buffer {
    &handle.downcast::<WgpuMemory>().expect("a view of this backend").buffer
}

/// A range as a dispatch binds it: the device asks for an aligned start, so what a kernel wants may begin a little behind it.
#[derive(Clone)]
pub(crate) struct Slot {
    buffer: wgpu::Buffer,
    start: u64,
    bytes: u64,
    /// Bytes between the start of the binding and what the kernel wants.
    rest: u64,
}

impl Slot {
    /// The first `bytes` of a view.
    pub(crate) fn of(view: &View, bytes: usize, align: u32) -> Self {
        let start = view.range().start as u64;
        Slot::part(buffer(view.buffer()), start, bytes as u64, align)
    }

    /// All of a buffer.
    pub(crate) fn whole(buffer: &wgpu::Buffer) -> Self {
        Slot { buffer: buffer.clone(), start: 0, bytes: buffer.size(), rest: 0 }
    }

    /// `bytes` bytes from `at` on.
    pub(crate) fn part(buffer: &wgpu::Buffer, at: u64, bytes: u64, align: u32) -> Self {
        let start = at / u64::from(align) * u64::from(align);
        let rest = at - start;
        let bytes = (rest + bytes.max(1)).next_multiple_of(VEC_BYTES);
        Slot { buffer: buffer.clone(), start, bytes, rest }
    }

    /// Where the kernel's data begins, in elements of `bytes` bytes. Asserts that it begins on one.
    pub(crate) fn at(&self, bytes: usize) -> u32 {
        assert!(self.rest.is_multiple_of(bytes as u64), "a view that starts on an element");
        (self.rest / bytes as u64) as u32
    }

    /// Whether the kernel's data begins at a multiple of 16 bytes.
    pub(crate) fn is_wide(&self) -> bool {
        self.rest.is_multiple_of(VEC_BYTES)
    }

    /// What wgpu binds.
    pub(crate) fn binding(&self) -> BufferBinding<'_> {
        BufferBinding { buffer: &self.buffer, offset: self.start, size: wgpu::BufferSize::new(self.bytes) }
    }
}
