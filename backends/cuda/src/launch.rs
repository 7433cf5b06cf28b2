//! What an op is on this device: kernels, their grids and what they are given. Data only: nothing here calls the driver.

use std::sync::Arc;

use freetoken_backend::{ExpertPool, View};

/// Words behind [`Arg::Counters`].
pub(crate) const N_COUNTERS: usize = 4096;

/// What the choice of kernels depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CardFacts {
    /// Streaming multiprocessors.
    pub(crate) sms: u32,
    /// Whether it runs machine code of compute capability 9.0 or later: kernels wait by themselves for the one before, and blocks reach
    /// the shared memory of others. PTX does neither.
    pub(crate) sm_90: bool,
}

/// One kernel and all it needs. Launches of an op run in order, each behind the one before.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// Name of the function; names are unique over all modules of the bundle.
    pub(crate) kernel: &'static str,
    /// Blocks in x, y and z.
    pub(crate) grid: [u32; 3],
    /// Threads in x, y and z.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory. Above 48 KiB the function's limit has to be raised before the first launch.
    pub(crate) shared_bytes: u32,
    /// Arguments, in the order of the kernel's parameters.
    pub(crate) args: Vec<Arg>,
    /// Whether the kernel waits by itself for the one before (`begin_kernel`), and so may come onto the device ahead of its turn.
    pub(crate) early: bool,
}

impl Launch {
    /// The same of a kernel that waits by itself.
    pub(crate) fn early(self) -> Self {
        Launch { early: true, ..self }
    }
}

/// One argument of a kernel.
#[derive(Debug, Clone)]
pub(crate) enum Arg {
    /// A parameter struct, by value.
    Params(Vec<u8>),
    /// Device address of a view.
    View(View),
    /// A null pointer.
    Null,
    /// Device address of an array of u64: the device addresses of the pool's chunks, then those of the layer's bank, cut at
    /// as many records as a chunk has.
    ChunkTable(Arc<ExpertPool>, u32),
    /// Device address of the scratch memory plus this many bytes. Scratch belongs to one op at a time; its start is
    /// aligned to 256 bytes and holds anything when an op begins.
    Scratch(usize),
    /// Device address of [`N_COUNTERS`] u32 words that are zero between kernels: kernels that count leave them at zero.
    Counters,
    /// A 32-bit number, by value.
    U32(u32),
}

/// Why an op has no kernel here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unsupported(pub(crate) String);
