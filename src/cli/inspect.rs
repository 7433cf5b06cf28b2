//! `freetoken inspect`: what a model is made of and whether it fits here, from its headers alone.

use std::{collections::HashSet, path::PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use freetoken_backend::{Format, KvCache, PAGE_TOKENS, os};
use indicatif::{BinaryBytes, HumanCount};
use serde_json::{Map, Value, json};

use super::{
    memory::MemoryArgs,
    model::DeviceArgs,
    plan::Said,
    terminal::{Progress, print_line},
};
use crate::{
    devices,
    engine::EngineOptions,
    formats::{Checkpoint, quantised::is_left_aside},
    model_files::ModelFiles,
    models::{self, Inventory, Sizes},
};

/// Show what a model is made of and whether it fits on this machine. Reads no weights, unless they are to be verified.
///
/// Parameters active a token are all but the experts that a token is not routed to.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  freetoken inspect\n  freetoken inspect DIR --json")]
pub(super) struct InspectArgs {
    /// A directory with config.json and *.safetensors or FTW shards, or ORG/NAME of a model that is on this machine
    /// [default: the demo model].
    model: Option<PathBuf>,
    /// Read the shards of an FTW directory and compare their checksums.
    #[arg(long)]
    verify: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
}

pub(super) fn run(args: InspectArgs) -> Result<()> {
    let files = ModelFiles::open(args.model.as_deref())?;
    let n_verified = if args.verify { Some(verify(files.checkpoint())?) } else { None };
    let inventory = Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference())?;
    let plan = Some(Plan::of(&files, &args)?);
    let report = Report { n_verified, plan, ..Report::new(&files, &inventory, os::available_memory())? };
    print_line(&if args.json { report.json().to_string() } else { report.text() })
}

/// Where each part of the model would live, or why it cannot run so.
struct Plan {
    device: String,
    text: String,
    json: Value,
}

impl Plan {
    fn of(files: &ModelFiles, args: &InspectArgs) -> Result<Self> {
        let backend = args.device.open()?;
        let options = args.memory.options(EngineOptions::default(), &*backend, &args.device)?;
        let device = format!("on {} ({})", backend.caps().backend, backend.caps().device);
        Ok(match files.plan(&*backend, &options) {
            Ok(plan) => {
                let said = Said::new(&plan, &*backend, &options);
                Plan { device, text: said.text(), json: said.json() }
            }
            Err(refused) => {
                let text = format!("cannot run: {refused}");
                Plan { device, json: json!({ "refused": refused.to_string() }), text }
            }
        })
    }
}

/// Compares the checksums of a checkpoint that has any; gives how many.
fn verify(checkpoint: &Checkpoint) -> Result<usize> {
    let Some(tensors) = checkpoint.ftw() else {
        bail!("{} is no FTW directory: safetensors files have no checksums", checkpoint.dir().display());
    };
    let progress = Progress::bytes("verifying", tensors.ftw().region_bytes());
    let n_verified = tensors.ftw().verify(&mut |bytes| progress.add(bytes))?;
    progress.finish();
    Ok(n_verified)
}

/// Everything that is shown.
struct Report<'a> {
    name: String,
    /// The architecture, as `config.json` names it.
    model_type: String,
    inventory: &'a Inventory,
    has_template: bool,
    /// What else is in the checkpoint and is known.
    left_aside: Option<String>,
    /// What holds the weights.
    container: String,
    /// Shards whose checksums were compared, if they were.
    n_verified: Option<usize>,
    /// Tensors of the checkpoint that the model does not ask for.
    unused: Vec<String>,
    room: Room,
    /// On a device, with the memory that it may have.
    plan: Option<Plan>,
}

impl<'a> Report<'a> {
    fn new(files: &ModelFiles, inventory: &'a Inventory, free_bytes: Option<u64>) -> Result<Self> {
        let used: HashSet<&str> = inventory.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let names = files.checkpoint().tensor_names();
        Ok(Report {
            name: files.name(),
            model_type: files.config().text("model_type")?,
            inventory,
            has_template: files.template().is_some(),
            left_aside: models::left_aside(files.checkpoint().tensor_names()),
            container: container(files.checkpoint()),
            n_verified: None,
            unused: names
                .filter(|name| !used.contains(name) && !is_left_aside(name) && !models::is_left_aside(name))
                .map(str::to_owned)
                .collect(),
            room: Room::new(inventory.bytes(), &inventory.sizes, free_bytes),
            plan: None,
        })
    }

    fn json(&self) -> Value {
        let Inventory { sizes, .. } = self.inventory;
        let formats: Map<String, Value> = self
            .inventory
            .formats()
            .into_iter()
            .map(|(dtype, bytes)| (dtype.to_string(), bytes.into()))
            .collect();
        json!({
            "model": self.name,
            "model_type": self.model_type,
            "container": self.container,
            "verified_shards": self.n_verified,
            "parameters": self.inventory.n_params(),
            "active_parameters": self.inventory.n_active_params(),
            "tensors": self.inventory.tensors.len(),
            "left_aside": self.left_aside,
            "unused_tensors": self.unused.len(),
            "first_unused_tensor": self.unused.first(),
            "bytes": self.inventory.bytes(),
            "bytes_by_format": formats,
            "layer_bytes": self.inventory.layer_bytes(),
            "expert_bytes": self.inventory.expert_bytes(),
            "moe_layers": sizes.moe.map(|moe| moe.n_layers),
            "experts": sizes.moe.map(|moe| moe.n_experts),
            "experts_per_token": sizes.moe.map(|moe| moe.top_k),
            "context": sizes.max_positions,
            "kv_bytes_per_token": self.room.kv_token_bytes,
            "state_bytes": self.room.state_bytes,
            "chat_template": self.has_template,
            "available_bytes": self.room.free_bytes,
            "fits": self.room.fits(),
            "largest_context": self.room.largest_context(),
            "plan": self.plan.as_ref().map(|plan| &plan.json),
        })
    }

    fn text(&self) -> String {
        let Inventory { sizes, .. } = self.inventory;
        let mut lines = vec![self.name.clone()];
        let mut line = |name: &str, value: String| lines.push(format!("{name:<14} {value}"));
        line("architecture", self.model_type.clone());
        line("container", self.container.clone());
        if let Some(n) = self.n_verified {
            line("checksums", format!("those of {n} shards are right"));
        }
        let (all, active) = (self.inventory.n_params(), self.inventory.n_active_params());
        line("parameters", format!("{} in all, {} active a token", HumanCount(all), HumanCount(active)));
        let formats = self
            .inventory
            .formats()
            .into_iter()
            .map(|(dtype, bytes)| format!("{} {dtype}", BinaryBytes(bytes)));
        line("weights", formats.collect::<Vec<_>>().join(", "));
        line("layers", layers(&self.inventory.layer_bytes()));
        if let (Some(moe), Some(bytes)) = (sizes.moe, self.inventory.expert_bytes()) {
            let (n, k, layers) = (moe.n_experts, moe.top_k, moe.n_layers);
            line(
                "experts",
                format!("{n} in each of {layers} layers, {k} a token, {} each", BinaryBytes(bytes)),
            );
        }
        line("context", format!("{} tokens", HumanCount(sizes.max_positions as u64)));
        line("KV cache", format!("{} a token in bf16", BinaryBytes(self.room.kv_token_bytes)));
        if self.room.state_bytes > 0 {
            line("state", format!("{} a sequence", BinaryBytes(self.room.state_bytes)));
        }
        line("chat template", if self.has_template { "yes" } else { "no" }.into());
        if let Some(parts) = &self.left_aside {
            line("left aside", parts.clone());
        }
        if let Some(first) = self.unused.first() {
            line("unused", format!("{} tensors, first {first}", HumanCount(self.unused.len() as u64)));
        }
        lines.push(self.room.sentence());
        lines.extend(self.plan.iter().map(|plan| format!("{}: {}", plan.device, plan.text)));
        lines.join("\n")
    }
}

/// What holds the weights of a checkpoint.
fn container(checkpoint: &Checkpoint) -> String {
    let Some(tensors) = checkpoint.ftw() else { return "safetensors".into() };
    let index = tensors.ftw().index();
    let experts = match (tensors.records(0), &index.quant_format) {
        (Some(records), _) => {
            format!(", an expert is a record of {}", BinaryBytes(records.record().bytes as u64))
        }
        (None, Some(layout)) => format!(", experts in banks of {layout}"),
        (None, None) => String::new(),
    };
    format!("FTW in {} shards{experts}", index.shards.len())
}

/// How many layers of what size.
fn layers(bytes: &[u64]) -> String {
    let (least, most) = (bytes.iter().min().unwrap_or(&0), bytes.iter().max().unwrap_or(&0));
    match least == most {
        true => format!("{} of {}", bytes.len(), BinaryBytes(*most)),
        false => format!("{} of {} to {}", bytes.len(), BinaryBytes(*least), BinaryBytes(*most)),
    }
}

/// The model beside the memory that is free.
struct Room {
    weight_bytes: u64,
    /// Of all layers, in bf16.
    kv_token_bytes: u64,
    /// What recurrent layers keep of a sequence.
    state_bytes: u64,
    /// Longest context the model was made for.
    context: u64,
    /// `None` where the system does not tell.
    free_bytes: Option<u64>,
}

impl Room {
    fn new(weight_bytes: u64, sizes: &Sizes, free_bytes: Option<u64>) -> Self {
        let page = KvCache::page_bytes(Format::Bf16, sizes.n_kv_heads, sizes.head_dim);
        let kv_token_bytes = (page / PAGE_TOKENS * sizes.n_kv_layers()) as u64;
        let state_bytes = sizes.recurrent.map_or(0, |recurrent| recurrent.state_bytes()) as u64;
        Room { weight_bytes, kv_token_bytes, state_bytes, context: sizes.max_positions as u64, free_bytes }
    }

    fn fits(&self) -> Option<bool> {
        Some(self.weight_bytes <= self.free_bytes?)
    }

    /// Tokens whose cache fits beside the weights, at most the model's context.
    fn largest_context(&self) -> Option<u64> {
        let left = self.free_bytes?.saturating_sub(self.weight_bytes + self.state_bytes);
        Some(self.context.min(left / self.kv_token_bytes.max(1)))
    }

    fn sentence(&self) -> String {
        let weights = BinaryBytes(self.weight_bytes);
        let (Some(free), Some(largest)) = (self.free_bytes, self.largest_context()) else {
            return format!("The weights take {weights}; this system does not tell how much memory is free.");
        };
        let free = BinaryBytes(free);
        if self.fits() == Some(false) {
            return format!(
                "The weights ({weights}) are larger than the {free} of memory that are free: they will be read from disk \
                 again and again."
            );
        }
        let cache = BinaryBytes(largest * self.kv_token_bytes);
        let tokens = HumanCount(largest);
        let context = match largest == self.context {
            true => format!("the cache of the whole context, {tokens} tokens ({cache})"),
            false => format!("a cache of {tokens} tokens ({cache})"),
        };
        format!("The weights ({weights}) and {context} fit into the {free} of memory that are free.")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(free_bytes: Option<u64>) -> Room {
        Room { weight_bytes: 1000, kv_token_bytes: 10, state_bytes: 0, context: 64, free_bytes }
    }

    #[test]
    fn what_fits_is_said() {
        for (free, fits, largest, part) in [
            (None, None, None, "does not tell"),
            (Some(999), Some(false), Some(0), "are larger than the 999 B"),
            (Some(1000), Some(true), Some(0), "a cache of 0 tokens"),
            (Some(1105), Some(true), Some(10), "a cache of 10 tokens (100 B)"),
            (Some(5000), Some(true), Some(64), "the whole context, 64 tokens (640 B)"),
        ] {
            let room = room(free);
            assert_eq!((room.fits(), room.largest_context()), (fits, largest));
            assert!(room.sentence().contains(part), "{}", room.sentence());
        }
    }

    #[test]
    fn layers_of_one_size_are_said_once() {
        assert_eq!(layers(&[2048, 2048]), "2 of 2.00 KiB");
        assert_eq!(layers(&[1024, 2048]), "2 of 1.00 KiB to 2.00 KiB");
    }

    #[test]
    fn the_demo_model_is_described() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let inventory =
            Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference()).unwrap();
        let report = Report::new(&files, &inventory, Some(1 << 30)).unwrap();
        let text = report.text();
        for part in [
            "architecture   qwen3_moe",
            "9,280,320 in all, 3,087,168 active a token",
            "32 in each of 6 layers, 4 a token, 72.00 KiB each",
            "1,024 tokens",
            "1.50 KiB a token",
            "chat template  yes",
            "fit into the 1.00 GiB",
        ] {
            assert!(text.contains(part), "no `{part}` in:\n{text}");
        }
        assert!(!text.contains("unused"));
        let json = report.json();
        assert_eq!((&json["parameters"], &json["active_parameters"]), (&9_280_320.into(), &3_087_168.into()));
        assert_eq!((&json["kv_bytes_per_token"], &json["largest_context"]), (&1536.into(), &1024.into()));
        assert_eq!((&json["unused_tensors"], &json["first_unused_tensor"]), (&0.into(), &Value::Null));
    }

    #[test]
    fn a_recurrent_model_is_described() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_5_moe-bf16");
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let inventory =
            Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference()).unwrap();
        let text = Report::new(&files, &inventory, Some(1 << 30)).unwrap().text();
        for part in [
            "8 in each of 4 layers, 2 a token, 12.00 KiB each",
            "KV cache       256 B a token in bf16",
            // Three layers of 3 x 128 inputs and 4 heads of 16 x 16.
            "state          16.50 KiB a sequence",
            "left aside     the image tower (21 tensors) and the prediction of further tokens (2 tensors)",
        ] {
            assert!(text.contains(part), "no `{part}` in:\n{text}");
        }
        assert!(!text.contains("unused"), "{text}");
    }
}
