//! Where measurements go: text for people, JSON and CSV for programs; and what stands above those of a device.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use freetoken_backend::{Backend, Caps};
use serde_json::{Value, json};

use super::{
    super::{
        synth::{ExpertUse, N_TOKENS},
        terminal::print_line,
    },
    table::Table,
};
use crate::devices::ReadProbe;

/// Memory is read again and again until this time has brought nothing better.
const READ_PATIENCE: Duration = Duration::from_millis(500);

/// Where measurements go.
#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// Also write the table as CSV, in seconds and bytes.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl ReportArgs {
    /// Writes the table, and prints the text or the object.
    pub(super) fn print(
        &self,
        table: &Table,
        text: impl FnOnce() -> String,
        json: impl FnOnce() -> Value,
    ) -> Result<()> {
        if let Some(path) = &self.csv {
            write(path, &table.csv())?;
        }
        if self.json { print_line(&json().to_string()) } else { print_line(&text()) }
    }
}

/// Writes a file whole.
pub(super) fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Bytes a second at which the device reads its own memory.
pub(super) fn read_bandwidth(backend: &dyn Backend) -> Result<f64> {
    Ok(ReadProbe::new(backend)?.best(READ_PATIENCE)?)
}

/// What was measured, and beside what it must be read.
pub(super) struct Report<'a> {
    pub(super) subject: String,
    pub(super) caps: &'a Caps,
    /// Bytes a second.
    pub(super) read_bandwidth: f64,
    /// Of each layer, for random tokens.
    pub(super) expert_use: &'a [ExpertUse],
    pub(super) table: Table,
}

impl Report<'_> {
    /// Prints all of it, and writes the rows.
    pub(super) fn print(&self, to: &ReportArgs) -> Result<()> {
        to.print(&self.table, || self.text(), || self.json())
    }

    fn json(&self) -> Value {
        let layer = |u: &ExpertUse| json!({ "experts_in_use": u.n_in_use, "top_quarter": u.top_quarter, "entropy_bits": u.entropy });
        json!({
            "model": self.subject,
            "backend": self.caps.backend,
            "device": self.caps.device,
            "detail": self.caps.detail,
            "precision": self.caps.precision.to_string(),
            "read_bytes_per_second": self.read_bandwidth,
            "expert_use": self.expert_use.iter().map(layer).collect::<Vec<_>>(),
            "rows": self.table.json(),
        })
    }

    fn text(&self) -> String {
        let Caps { backend, device, detail, precision, .. } = self.caps;
        let mut text = format!(
            "{}\n{backend}: {device}, {detail}, precision {precision}\nmemory is read at {:.1} GB/s\n",
            self.subject,
            self.read_bandwidth / 1e9
        );
        if !self.expert_use.is_empty() {
            let mean = |of: fn(&ExpertUse) -> f64| {
                self.expert_use.iter().map(of).sum::<f64>() / self.expert_use.len() as f64
            };
            text += &format!(
                "{N_TOKENS} random tokens use {:.1} experts of a layer, the top quarter takes {:.1}% of the routes, \
                 entropy {:.2} bits\n",
                mean(|u| u.n_in_use as f64),
                100.0 * mean(|u| u.top_quarter),
                mean(|u| u.entropy)
            );
        }
        text + "\n" + &self.table.text()
    }
}
