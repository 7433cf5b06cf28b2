//! Standard output and standard error: every write is checked, bars appear on a terminal only.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes to standard output and flushes it, so that text appears as it is made and a full disk is noticed.
pub(super) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("cannot write the output: is the disk full, or did its reader end?")
}

/// The same with a line's end.
pub(super) fn print_line(text: &str) -> Result<()> {
    print(&format!("{text}\n"))
}

/// Tells the user something beside the answer. A standard error that takes no more is no reason to stop.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Shows what is thought beside the answer, dimmed, where standard error is a terminal.
pub(super) fn whisper(text: &str) {
    let mut terminal = io::stderr().lock();
    if terminal.is_terminal() {
        let _ = write!(terminal, "\x1b[2m{text}\x1b[22m");
    }
}

/// Whether nobody reads standard output any more, as behind `| head`: an end, not a failure.
pub(super) fn reader_left(error: &anyhow::Error) -> bool {
    let causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.map(io::Error::kind).any(|kind| kind == io::ErrorKind::BrokenPipe)
}

/// Progress of long work, on a terminal only.
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Work counted in bytes.
    pub(super) fn bytes(what: &'static str, total: u64) -> Self {
        Self::with_style(what, total, "{msg:>10} {bar:30} {bytes}/{total_bytes} {bytes_per_sec}")
    }

    /// Work counted in tokens.
    pub(super) fn tokens(what: &'static str, total: u64) -> Self {
        Self::with_style(what, total, "{msg:>10} {bar:30} {pos}/{len} tokens {eta}")
    }

    fn with_style(what: &'static str, total: u64, style: &str) -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr_with_hz(10)
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_message(what);
        bar.set_style(ProgressStyle::with_template(style).expect("the templates above are valid"));
        Progress(bar)
    }

    /// More is done.
    pub(super) fn add(&self, n: u64) {
        self.0.inc(n);
    }

    /// So much is done in all.
    pub(super) fn set(&self, n: u64) {
        self.0.set_position(n);
    }

    /// Takes the bar away.
    pub(super) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
