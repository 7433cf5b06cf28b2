//! The one place that knows which backends there are and picks one.

use std::{str::FromStr, sync::Arc, time::Instant};

use freetoken_backend::{Backend, Caps, Error, Precision, os};
use freetoken_cpu::{Cpu, CpuOptions, Pool, stream_read};

/// Backends built into this binary.
pub const BUILT_IN: [&str; 1] = ["cpu"];

/// Memory that [`read_bandwidth`] reads: a multiple of the largest caches.
const READ_BYTES: usize = 1 << 30;
/// How often it does.
const READ_PASSES: usize = 5;

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

/// Bytes a second that CPU threads, by default one for each physical core, read from memory in order: the best of a few
/// passes over more than caches hold, as far as a quarter of the free memory allows.
///
/// # Errors
/// The system's refusal of memory or a thread.
pub fn read_bandwidth(threads: Option<usize>) -> Result<f64, Error> {
    let quarter =
        os::available_memory().map_or(usize::MAX, |free| usize::try_from(free / 4).unwrap_or(usize::MAX));
    let mut memory = os::anonymous(quarter.clamp(1 << 20, READ_BYTES))
        .map_err(|source| Error::Os { what: "taking memory to read", source })?;
    // Pages that nobody wrote are one and the same page.
    memory.as_mut().fill(1);
    let pool = Pool::new(threads).map_err(|source| Error::Os { what: "starting worker threads", source })?;
    let seconds = (0..READ_PASSES).map(|_| {
        let start = Instant::now();
        std::hint::black_box(stream_read(&pool, memory.as_ref()));
        start.elapsed().as_secs_f64()
    });
    Ok(memory.as_ref().len() as f64 / seconds.fold(f64::INFINITY, f64::min))
}

/// Every device that can be opened, as it would be opened.
///
/// # Errors
/// What a device answers.
pub fn list() -> Result<Vec<Caps>, Error> {
    let cpu = Cpu::new(CpuOptions { threads: None, precision: Precision::Auto })?;
    Ok(vec![cpu.caps().clone()])
}
