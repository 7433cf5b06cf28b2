//! The one place that knows which backends there are and picks one.

use std::{
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use freetoken_backend::{Backend, Caps, Error, Precision, View};
use freetoken_cpu::{Cpu, CpuOptions};
#[cfg(feature = "cuda")]
use freetoken_cuda::{CardChoice, Cuda, CudaOptions, Submission};
#[cfg(feature = "wgpu")]
use freetoken_wgpu::{Options, Select, Wgpu, adapters};

/// Backends built into this binary, as `--backend` takes them.
pub const BUILT_IN: &[&str] = &[
    #[cfg(feature = "cuda")]
    "cuda[:N|:UUID]",
    #[cfg(feature = "wgpu")]
    "wgpu[:N|:NAME]",
    "cpu",
];

/// What `auto` tries, in this order.
const AUTO: &[BackendChoice] = &[
    #[cfg(feature = "cuda")]
    BackendChoice::Cuda(CardChoice::First, Submission::Graph),
    #[cfg(feature = "wgpu")]
    BackendChoice::Wgpu(Select::Hardware),
    BackendChoice::Cpu,
];

/// Memory that a [`ReadProbe`] reads in a pass: a multiple of the largest caches.
const READ_BYTES: usize = 1 << 30;
/// What a better pass of a read has more, at least.
const BETTER: f64 = 1.01;

/// What `--backend` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendChoice {
    /// The fastest device there is.
    Auto,
    /// The CPU alone.
    Cpu,
    /// An NVIDIA card, and how steps reach it.
    #[cfg(feature = "cuda")]
    Cuda(CardChoice, Submission),
    /// An adapter of a Vulkan, Metal or DX12 driver.
    #[cfg(feature = "wgpu")]
    Wgpu(Select),
}

impl FromStr for BackendChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, which) = text.split_once(':').map_or((text, None), |(name, which)| (name, Some(which)));
        match (name, which) {
            ("auto", None) => Ok(BackendChoice::Auto),
            ("cpu", None) => Ok(BackendChoice::Cpu),
            #[cfg(feature = "cuda")]
            ("cuda" | "cuda-staged", card) => {
                let card = card.map_or(Ok(CardChoice::First), str::parse)?;
                let submission = if name == "cuda" { Submission::Graph } else { Submission::Staged };
                Ok(BackendChoice::Cuda(card, submission))
            }
            #[cfg(feature = "wgpu")]
            ("wgpu", adapter) => Ok(BackendChoice::Wgpu(adapter.map_or(Ok(Select::Any), str::parse)?)),
            _ => Err(format!("`{text}` is not a backend of this binary: auto, {}", BUILT_IN.join(", "))),
        }
    }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The device's answer.
    #[error(transparent)]
    Backend(#[from] Error),
    /// No NVIDIA card that can be used.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] freetoken_cuda::OpenError),
}

/// Opens a device. `auto` takes the first that can be opened, and where that is the CPU it tells `say` why.
///
/// # Errors
/// What the device answers, or the last that `auto` tried.
pub fn open(
    choice: &BackendChoice,
    precision: Precision,
    threads: Option<usize>,
    say: &mut dyn FnMut(&str),
) -> Result<Arc<dyn Backend>, OpenError> {
    match choice {
        BackendChoice::Cpu => Ok(host(precision, threads)?),
        #[cfg(feature = "cuda")]
        BackendChoice::Cuda(card, submission) => {
            Ok(Arc::new(Cuda::open(card, CudaOptions { precision, submission: *submission })?))
        }
        #[cfg(feature = "wgpu")]
        BackendChoice::Wgpu(select) => {
            let cache = Some(crate::model_files::home().join("pipelines"));
            let device = Wgpu::open(select, &Options { cache, ..Options::new(precision) })?;
            if device.facts().software {
                say(&format!("{} is a CPU that plays a GPU: it will be slow", device.facts().name));
            }
            Ok(Arc::new(device))
        }
        BackendChoice::Auto => {
            let (cpu, gpus) = AUTO.split_last().expect("there is always the CPU");
            let mut passed_over = Vec::new();
            for choice in gpus {
                match open(choice, precision, threads, say) {
                    Err(error) => passed_over.push(error.to_string()),
                    opened => return opened,
                }
            }
            if !passed_over.is_empty() {
                say(&format!("running on the CPU: {}", passed_over.join("; ")));
            }
            open(cpu, precision, threads, say)
        }
    }
}

/// The CPU beside another device, of whose steps it computes a share.
///
/// # Errors
/// The system's refusal to start threads.
pub fn beside(precision: Precision, threads: Option<usize>) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(Cpu::beside_a_device(CpuOptions { threads, precision })?))
}

/// The CPU.
///
/// # Errors
/// The system's refusal to start threads.
pub fn host(precision: Precision, threads: Option<usize>) -> Result<Arc<dyn Backend>, Error> {
    Ok(Arc::new(Cpu::new(CpuOptions { threads, precision })?))
}

/// The device that conformance is measured against: the scalar CPU.
pub fn reference() -> Arc<dyn Backend> {
    Arc::new(Cpu::reference())
}

/// Measures how fast a device reads its own memory: the roof above everything that is bound by bytes. A machine's rate
/// changes with its neighbours' work, so a ratio takes passes and what it compares in turns.
pub struct ReadProbe<'a> {
    backend: &'a dyn Backend,
    memory: View,
}

impl<'a> ReadProbe<'a> {
    /// Takes memory of the device, more than its caches hold.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn new(backend: &'a dyn Backend) -> Result<Self, Error> {
        let free =
            backend.free_bytes()?.map_or(usize::MAX, |free| usize::try_from(free / 4).unwrap_or(usize::MAX));
        let bytes = free.min(backend.caps().max_binding_bytes).clamp(1 << 20, READ_BYTES);
        let memory = backend.alloc(bytes)?.whole();
        // Pages that nobody wrote may be one and the same page.
        let piece = vec![1; 1 << 20];
        for start in (0..bytes).step_by(piece.len()) {
            let part = memory.slice(start..bytes.min(start + piece.len()));
            backend.write(&part, &piece[..part.bytes()])?;
        }
        Ok(ReadProbe { backend, memory })
    }

    /// Reads all of it once; bytes a second.
    ///
    /// # Errors
    /// The device's answer.
    pub fn pass(&self) -> Result<f64, Error> {
        Ok(self.memory.bytes() as f64 / self.backend.time_read(&self.memory)?)
    }

    /// The best pass, once no better one came for this long: a device that was idle takes a while to come to its clock.
    ///
    /// # Errors
    /// The device's answer.
    pub fn best(&self, patience: Duration) -> Result<f64, Error> {
        let start = Instant::now();
        let (mut best, mut since) = (self.pass()?, start);
        while since.elapsed() < patience && start.elapsed() < 10 * patience {
            let rate = self.pass()?;
            if rate > best * BETTER {
                since = Instant::now();
            }
            best = best.max(rate);
        }
        Ok(best)
    }
}

/// Every device that can be opened, as it would be opened. Gives `say` a sentence about each that cannot.
///
/// # Errors
/// What the CPU answers.
pub fn list(say: &mut dyn FnMut(&str)) -> Result<Vec<Caps>, Error> {
    let mut devices = Vec::new();
    #[cfg(feature = "cuda")]
    let one = |uuid| BackendChoice::Cuda(CardChoice::Uuid(uuid), Submission::Graph);
    #[cfg(feature = "cuda")]
    match freetoken_cuda::cards() {
        Err(error) => say(&format!("cuda: {error}")),
        Ok(cards) => {
            for card in cards {
                match open(&one(card.uuid), Precision::Auto, None, say) {
                    Ok(cuda) => devices.push(cuda.caps().clone()),
                    Err(error) => say(&format!("cuda:{}: {error}", card.ordinal)),
                }
            }
        }
    }
    #[cfg(not(feature = "cuda"))]
    say("cuda: not built into this binary");
    #[cfg(feature = "wgpu")]
    for adapter in adapters() {
        match open(&BackendChoice::Wgpu(Select::Index(adapter.index)), Precision::Auto, None, &mut |_| ()) {
            Ok(wgpu) => devices.push(wgpu.caps().clone()),
            Err(error) => say(&format!("wgpu:{} ({}): {error}", adapter.index, adapter.name)),
        }
    }
    #[cfg(not(feature = "wgpu"))]
    say("wgpu: not built into this binary");
    let cpu = Cpu::new(CpuOptions { threads: None, precision: Precision::Auto })?;
    devices.push(cpu.caps().clone());
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backends_are_named() {
        assert_eq!("auto".parse(), Ok(BackendChoice::Auto));
        assert_eq!("cpu".parse(), Ok(BackendChoice::Cpu));
        for wrong in ["", "cpu:0", "auto:", "gpu"] {
            let error = wrong.parse::<BackendChoice>().unwrap_err();
            assert!(error.contains("auto") && error.contains("cpu"), "{error}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn cards_are_named_by_number_or_uuid() {
        let uuid = "01234567-89ab-cdef-0123-456789abcdef";
        let graph = |card| Ok(BackendChoice::Cuda(card, Submission::Graph));
        assert_eq!("cuda".parse(), graph(CardChoice::First));
        assert_eq!("cuda:1".parse(), graph(CardChoice::Ordinal(1)));
        let staged = Ok(BackendChoice::Cuda(CardChoice::Ordinal(0), Submission::Staged));
        assert_eq!("cuda-staged:0".parse(), staged);
        assert_eq!(format!("cuda:GPU-{uuid}").parse(), graph(CardChoice::Uuid(uuid.into())));
        assert!("cuda:".parse::<BackendChoice>().is_err());
    }

    #[test]
    fn auto_always_finds_a_device_and_says_what_it_passed_over() {
        let mut said = Vec::new();
        let device =
            open(&BackendChoice::Auto, Precision::F32, Some(1), &mut |text| said.push(text.into())).unwrap();
        let said: Vec<String> = said;
        let expected = usize::from(device.caps().backend == "cpu" && AUTO.len() > 1);
        assert_eq!(said.len(), expected, "{said:?}");
    }
}
