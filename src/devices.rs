//! The one place that knows which backends there are and picks one.

use std::{str::FromStr, sync::Arc};

use freetoken_backend::{Backend, Caps, Error, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

/// Backends built into this binary.
pub const BUILT_IN: [&str; 1] = ["cpu"];

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

/// Every device that can be opened, as it would be opened.
///
/// # Errors
/// What a device answers.
pub fn list() -> Result<Vec<Caps>, Error> {
    let cpu = Cpu::new(CpuOptions { threads: None, precision: Precision::Auto })?;
    Ok(vec![cpu.caps().clone()])
}
