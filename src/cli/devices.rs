//! `freetoken devices`: what this machine can run models on.

use anyhow::Result;
use clap::Args;
use freetoken_backend::{Caps, os};

use super::terminal::{note, print_line};
use crate::devices;

/// List the devices that models can run on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  freetoken devices\n  freetoken devices --json")]
pub(super) struct DevicesArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: DevicesArgs) -> Result<()> {
    let list = devices::list(&mut note)?;
    if args.json {
        let devices: Vec<_> = list.iter().map(as_json).collect();
        return print_line(&serde_json::json!({ "devices": devices }).to_string());
    }
    for caps in &list {
        print_line(&format!("{:<8} {}", caps.backend, caps.device))?;
        print_line(&format!("{:<8} {}", "", caps.detail))?;
        if let Some(total) = caps.total_bytes {
            let free = os::available_memory()
                .filter(|_| caps.host_memory)
                .map_or(String::new(), |free| format!(", {} free", gib(free)));
            print_line(&format!("{:<8} {} memory{free}", "", gib(total)))?;
        }
    }
    Ok(())
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

fn as_json(caps: &Caps) -> serde_json::Value {
    serde_json::json!({
        "backend": caps.backend,
        "device": caps.device,
        "detail": caps.detail,
        "total_bytes": caps.total_bytes,
        "max_binding_bytes": caps.max_binding_bytes,
        "max_storage_buffers": caps.max_storage_buffers,
        "host_memory": caps.host_memory,
    })
}
