//! What a device can do, read once at load.

use std::fmt;

/// How exactly a backend computes. Residual stream, norms, softmax, router and expert sums are f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// The backend's fast mode: matmul inputs and the KV cache may be bf16.
    Auto,
    /// Activations, accumulators and the KV cache in f32: the mode in which golden outputs are compared.
    F32,
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Precision::Auto => "auto",
            Precision::F32 => "f32",
        })
    }
}

/// What the device can do and how much it may bind at once.
#[derive(Debug, Clone)]
pub struct Caps {
    /// Name of the backend as `--backend` takes it: `cpu`.
    pub backend: &'static str,
    /// Name of the device, for people.
    pub device: String,
    /// The path chosen on it, for people: instruction set, driver, features.
    pub detail: String,
    /// The mode it was opened in.
    pub precision: Precision,
    /// Memory of the device in bytes; `None` where the system does not tell.
    pub total_bytes: Option<u64>,
    /// Largest range that one op may bind, in bytes.
    pub max_binding_bytes: usize,
    /// Largest number of buffers that one op may bind.
    pub max_storage_buffers: u32,
    /// Rows of a prefill step that keep it busy: larger steps gain little.
    pub prefill_rows: usize,
    /// Device memory is host memory: [`crate::Backend::import`] costs nothing and weights stay where they are mapped.
    pub host_memory: bool,
    /// Device and host have one memory: what lies in a [`crate::HostBuffer`] is read in place as fast as anything else.
    pub unified_memory: bool,
    /// The device can read a [`crate::HostBuffer`] in place.
    pub reads_host: bool,
}
