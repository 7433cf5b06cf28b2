//! Handles of memory: what a device holds, and what the host holds for it. Nothing here dereferences device memory.

use std::{any::Any, fmt, ops::Range, sync::Arc};

/// What a backend keeps behind a [`Buffer`].
pub trait DeviceMemory: Any + Send + Sync {
    /// Size in bytes.
    fn bytes(&self) -> usize;
}

/// A range of device memory: a handle, cheap to clone. The memory is freed with its last handle.
#[derive(Clone)]
pub struct Buffer(Arc<dyn DeviceMemory>);

impl Buffer {
    /// Wraps a backend's own memory.
    pub fn new(memory: impl DeviceMemory) -> Self {
        Buffer(Arc::new(memory))
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// The backend's own memory, or `None` if another backend made this buffer.
    pub fn downcast<M: DeviceMemory>(&self) -> Option<&M> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }

    /// Whether both handles stand for the same memory.
    pub fn same(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The whole buffer.
    pub fn whole(&self) -> View {
        View { buffer: self.clone(), bytes: 0..self.bytes() }
    }

    /// Part of the buffer. Asserts that it lies inside.
    pub fn view(&self, bytes: Range<usize>) -> View {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.bytes(),
            "view {bytes:?} of {} bytes",
            self.bytes()
        );
        View { buffer: self.clone(), bytes }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.bytes())
    }
}

/// Part of a [`Buffer`]: what an op binds.
#[derive(Debug, Clone)]
pub struct View {
    buffer: Buffer,
    bytes: Range<usize>,
}

impl View {
    /// The buffer it lies in.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Its place in the buffer, in bytes.
    pub fn range(&self) -> Range<usize> {
        self.bytes.clone()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Part of the view; `bytes` counts from its start. Asserts that it lies inside.
    pub fn slice(&self, bytes: Range<usize>) -> View {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.bytes(),
            "slice {bytes:?} of {} bytes",
            self.bytes()
        );
        let start = self.bytes.start;
        View { buffer: self.buffer.clone(), bytes: start + bytes.start..start + bytes.end }
    }

    /// Whether the two share a byte.
    pub fn overlaps(&self, other: &View) -> bool {
        self.buffer.same(&other.buffer)
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// A copy of a view to another of its size. Both are whole 32-bit words of two buffers.
#[derive(Debug, Clone)]
pub struct ViewCopy {
    /// What is read.
    pub src: View,
    /// What is written.
    pub dst: View,
}

impl ViewCopy {
    /// Asserts what every device can do: WebGPU copies whole words, and never within a buffer.
    pub fn check(&self) {
        let (src, dst) = (self.src.range(), self.dst.range());
        assert_eq!(src.len(), dst.len(), "a copy has one size");
        let edges = [src.start, src.end, dst.start, dst.end];
        assert!(edges.iter().all(|edge| edge.is_multiple_of(4)), "{src:?} to {dst:?} are no whole words");
        assert!(!self.src.buffer().same(self.dst.buffer()), "a copy within a buffer");
    }
}

/// Read-only bytes in host memory that someone keeps alive: a mapped file, a static, a vector. Cheap to clone.
#[derive(Clone)]
pub struct HostBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl HostBytes {
    /// All bytes of `owner`, which must answer `as_ref` with the same bytes for as long as it lives.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let range = 0..(*owner).as_ref().len();
        HostBytes { owner, range }
    }

    /// Bytes of the program itself.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        HostBytes::new(Arc::new(bytes))
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// Part of them. Asserts that it lies inside.
    pub fn slice(&self, bytes: Range<usize>) -> HostBytes {
        assert!(
            bytes.start <= bytes.end && bytes.end <= self.len(),
            "slice {bytes:?} of {} bytes",
            self.len()
        );
        let start = self.range.start;
        HostBytes { owner: self.owner.clone(), range: start + bytes.start..start + bytes.end }
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBytes({} bytes)", self.len())
    }
}

/// What a backend keeps behind a [`HostBuffer`].
pub trait HostMemory: Any + Send + Sync {
    /// The bytes.
    fn bytes(&self) -> &[u8];
    /// The bytes, to fill them.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Host memory made by a backend, read by the CPU at full speed and by the device as fast as it can: where expert
/// records live. Filled while it has one owner, shared behind an `Arc` afterwards.
pub struct HostBuffer(Box<dyn HostMemory>);

impl HostBuffer {
    /// Wraps a backend's own memory.
    pub fn new(memory: impl HostMemory) -> Self {
        HostBuffer(Box::new(memory))
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The bytes, to fill them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }

    /// The backend's own memory, or `None` if another backend made this buffer.
    pub fn downcast<M: HostMemory>(&self) -> Option<&M> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref()
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} bytes)", self.as_slice().len())
    }
}
