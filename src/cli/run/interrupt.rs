//! Ctrl-C while an answer is made: the first ends the answer, a second one the program.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};

/// The status with which a shell reports a program that Ctrl-C ended.
const ENDED_BY_CTRL_C: i32 = 130;

/// Whether the user pressed Ctrl-C.
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes over Ctrl-C, once in a process. Until then it ends the program, as it should while a model loads.
    pub(super) fn listen() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        let seen = asked.clone();
        ctrlc::set_handler(move || {
            if seen.swap(true, Ordering::Relaxed) {
                process::exit(ENDED_BY_CTRL_C);
            }
        })
        .context("cannot listen to Ctrl-C")?;
        Ok(Interrupt(asked))
    }

    /// Whether Ctrl-C was pressed since the last [`Interrupt::forget`].
    pub(super) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Begins anew.
    pub(super) fn forget(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}
