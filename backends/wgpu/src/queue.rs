//! Submissions and waits. Both lanes are one queue, so that everything is seen in the order of the calls; an event is the number of
//! a submission. Every wait is bounded, and what goes wrong between calls is reported by the next one.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Acquire, Ordering::Release},
    },
    time::{Duration, Instant},
};

use freetoken_backend::{Error, Result};
use wgpu::{CommandBuffer, CommandEncoder, Device, MapMode, PollError, PollType, Queue, SubmissionIndex};

/// Submissions whose indices are kept; an older event waits for the oldest of them.
const KEPT: usize = 64;

/// How long the host asks for bytes again and again before it sleeps in the driver: a thread that sleeps is woken late, but one that
/// does not takes a core from those that have work.
const SPIN: Duration = Duration::from_micros(50);
/// Who knows how long bytes take sleeps for this share of the time, then asks for twice the rest of it, but not longer than this.
const SLEPT: f64 = 0.75;
const LONGEST_SPIN: Duration = Duration::from_millis(1);

/// What the driver said outside of a call.
#[derive(Default)]
struct Trouble {
    /// Why the device is gone: stays.
    lost: Option<String>,
    /// An error that no call returned: reported once.
    error: Option<String>,
}

/// The queue of a device.
pub(crate) struct Lanes {
    device: Device,
    queue: Queue,
    trouble: Arc<Mutex<Trouble>>,
    submitted: VecDeque<(u64, SubmissionIndex)>,
    /// Lists of commands that the next submission starts with.
    pub(crate) ready: Vec<CommandBuffer>,
    seq: u64,
    patience: Duration,
    spin: Duration,
}

impl Lanes {
    /// Takes the queue over. A wait that outlasts `patience` ends in an error. Where a CPU plays the GPU, nobody spins: it has other
    /// things to do.
    pub(crate) fn new(device: &Device, queue: Queue, patience: Duration, software: bool) -> Self {
        let spin = if software { Duration::ZERO } else { SPIN };
        let trouble = Arc::new(Mutex::new(Trouble::default()));
        let seen = trouble.clone();
        device.set_device_lost_callback(move |_, message| {
            lock(&seen).lost.get_or_insert(message);
        });
        let seen = trouble.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&seen).error.get_or_insert(error.to_string());
        }));
        Lanes {
            device: device.clone(),
            queue,
            trouble,
            submitted: VecDeque::new(),
            ready: Vec::new(),
            seq: 0,
            patience,
            spin,
        }
    }

    /// The error that the driver reported since the last call, if any.
    pub(crate) fn check(&self) -> Result<()> {
        let mut trouble = lock(&self.trouble);
        let what = trouble.lost.clone().or_else(|| trouble.error.take());
        what.map_or(Ok(()), |what| Err(Error::DeviceLost { what }))
    }

    /// Length of a tick of the device's clock.
    pub(crate) fn nanoseconds_a_tick(&self) -> f32 {
        self.queue.get_timestamp_period()
    }

    /// Starts a list of commands.
    pub(crate) fn encoder(&self) -> CommandEncoder {
        self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor { label: None })
    }

    /// Queues a list of commands behind everything before it.
    pub(crate) fn submit(&mut self, encoder: Option<CommandEncoder>) -> u64 {
        let last = encoder.map(CommandEncoder::finish);
        let index = self.queue.submit(self.ready.drain(..).chain(last));
        self.seq += 1;
        if self.submitted.len() == KEPT {
            self.submitted.pop_front();
        }
        self.submitted.push_back((self.seq, index));
        self.seq
    }

    /// The last submission.
    pub(crate) fn last(&self) -> u64 {
        self.seq
    }

    /// Queues a small write of whole words. The bytes may be reused when it returns.
    pub(crate) fn write(&self, buffer: &wgpu::Buffer, at: u64, bytes: &[u8]) {
        self.queue.write_buffer(buffer, at, bytes);
    }

    /// Waits for a submission.
    pub(crate) fn wait(&self, seq: u64) -> Result<()> {
        if self.reached_within(seq, self.patience)? {
            return Ok(());
        }
        let what = format!("no answer for {} seconds", self.patience.as_secs());
        Err(Error::DeviceLost { what })
    }

    /// Whether a submission is done.
    pub(crate) fn reached(&self, seq: u64) -> Result<bool> {
        self.reached_within(seq, Duration::ZERO)
    }

    fn reached_within(&self, seq: u64, timeout: Duration) -> Result<bool> {
        let index = self.submitted.iter().find(|(kept, _)| *kept >= seq).map(|(_, index)| index.clone());
        let waited = self.device.poll(PollType::Wait { submission_index: index, timeout: Some(timeout) });
        self.check()?;
        match waited {
            Ok(_) => Ok(true),
            Err(PollError::Timeout) => Ok(false),
            Err(error @ PollError::WrongSubmissionIndex(..)) => {
                Err(Error::DeviceLost { what: error.to_string() })
            }
        }
    }

    /// Waits for a submission that filled the front of a `MAP_READ` buffer, and lends the bytes. `expected`: how long that took the last
    /// time, nothing if nobody knows.
    pub(crate) fn mapped(
        &self,
        buffer: &wgpu::Buffer,
        bytes: u64,
        seq: u64,
        expected: Duration,
        use_bytes: impl FnOnce(&[u8]),
    ) -> Result<()> {
        let arrived = Arc::new(AtomicBool::new(false));
        let seen = arrived.clone();
        buffer.map_async(MapMode::Read, 0..bytes, move |_| seen.store(true, Release));
        let slept = expected.mul_f64(SLEPT);
        let spin = match self.spin {
            Duration::ZERO => Duration::ZERO,
            spin => (2 * (expected - slept)).clamp(spin, LONGEST_SPIN),
        };
        if slept > self.spin {
            self.reached_within(seq, slept)?;
        }
        let start = Instant::now();
        while !arrived.load(Acquire) && start.elapsed() < spin {
            // What is wrong with the device is found by the wait.
            _ = self.device.poll(PollType::Poll);
        }
        if arrived.load(Acquire) {
            self.check()?
        } else {
            self.wait(seq)?
        }
        let view =
            buffer.get_mapped_range(0..bytes).map_err(|e| Error::DeviceLost { what: e.to_string() })?;
        use_bytes(&view);
        drop(view);
        buffer.unmap();
        Ok(())
    }
}

fn lock(trouble: &Mutex<Trouble>) -> std::sync::MutexGuard<'_, Trouble> {
    trouble.lock().unwrap_or_else(PoisonError::into_inner)
}
