//! What a caller of a backend can act on. Everything else is our own bug and asserts when an op is recorded.

/// An error of a device, in words its owner can act on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The device has no room for an allocation.
    #[error(
        "the device has no room for {wanted} bytes ({free} free): use a smaller context or fewer resident experts"
    )]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// Bytes free when they were asked for.
        free: usize,
    },
    /// The backend cannot run an op in this shape or format.
    #[error("{backend} cannot run `{op}`: {why}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// Name of the op or of the operation of [`crate::Backend`].
        op: &'static str,
        /// What it lacks.
        why: String,
    },
    /// The device is gone; everything that lived on it is lost.
    #[error("the device is lost ({what}): restart, or choose another one with --backend")]
    DeviceLost {
        /// What the driver said.
        what: String,
    },
    /// The host did not answer a route point, or the device did not ask: the tokens of this step must not be used.
    #[error("the step failed at layer {layer}: {why}")]
    StepFailed {
        /// Layer of the route point.
        layer: u32,
        /// What went wrong.
        why: String,
    },
    /// The operating system refused something the backend needs.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// What the system answered.
        source: std::io::Error,
    },
}

/// Result of a backend.
pub type Result<T> = std::result::Result<T, Error>;
