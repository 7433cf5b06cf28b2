//! The one place that knows which backends there are and picks one.

use std::{str::FromStr, sync::Arc, time::Instant};

use freetoken_backend::{Backend, Caps, Error, Precision, os};
use freetoken_cpu::{Cpu, CpuOptions, Pool, stream_read};

/// Backends built into this binary.
pub const BUILT_IN: [&str; 1] = ["cpu"];

/// Memory that a [`ReadProbe`] reads in a pass: a multiple of the largest caches.
const READ_BYTES: usize = 1 << 29;
/// What `--backend` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendChoice {
    /// The fastest device there is.
    Auto,
    /// The CPU alone.
    Cpu,
}

impl FromStr for BackendChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(BackendChoice::Auto),
            "cpu" => Ok(BackendChoice::Cpu),
            other => Err(format!("`{other}` is not a backend of this binary: auto, {}", BUILT_IN.join(", "))),
        }
    }
}

/// Opens a device.
///
/// # Errors
/// What the device answers.
pub fn open(
    choice: &BackendChoice,
    precision: Precision,
    threads: Option<usize>,
) -> Result<Arc<dyn Backend>, Error> {
    match choice {
        BackendChoice::Auto | BackendChoice::Cpu => {
            Ok(Arc::new(Cpu::new(CpuOptions { threads, precision })?))
        }
    }
}

/// The device that conformance is measured against: the scalar CPU.
pub fn reference() -> Arc<dyn Backend> {
    Arc::new(Cpu::reference())
}

/// Measures how fast this machine reads memory: the roof above everything that is bound by bytes. A machine's rate changes
/// with its neighbours' work, so a ratio takes passes and what it compares in turns.
pub struct ReadProbe {
    pool: Pool,
    memory: os::AnonymousMemory,
}

impl ReadProbe {
    /// Takes memory and starts threads, one for each physical core by default.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn new(threads: Option<usize>) -> Result<Self, Error> {
        let free =
            os::available_memory().and_then(|free| usize::try_from(free / 4).ok()).unwrap_or(usize::MAX);
        let mut memory = os::anonymous(free.clamp(1 << 20, READ_BYTES))
            .map_err(|source| Error::Os { what: "taking memory to read", source })?;
        // Pages that nobody wrote are one and the same page.
        memory.as_mut().fill(1);
        let pool =
            Pool::new(threads).map_err(|source| Error::Os { what: "starting worker threads", source })?;
        Ok(ReadProbe { pool, memory })
    }

    /// Reads all of it once; bytes a second.
    pub fn pass(&self) -> f64 {
        let start = Instant::now();
        std::hint::black_box(stream_read(&self.pool, self.memory.as_ref()));
        self.memory.as_ref().len() as f64 / start.elapsed().as_secs_f64()
    }

    /// The best of `n` passes.
    pub fn best_of(&self, n: usize) -> f64 {
        (0..n).map(|_| self.pass()).fold(0.0, f64::max)
    }
}

/// Every device that can be opened, as it would be opened.
///
/// # Errors
/// What a device answers.
pub fn list() -> Result<Vec<Caps>, Error> {
    let cpu = Cpu::new(CpuOptions { threads: None, precision: Precision::Auto })?;
    Ok(vec![cpu.caps().clone()])
}
