//! Arguments that describe a made-up model: a published shape or a configuration, how much of it, and its experts' law.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Result, ensure};
use clap::{Args, builder::PossibleValuesParser};
use freetoken_backend::{Backend, Format, os};
use indicatif::BinaryBytes;
use serde_json::{Map, Value};

use super::super::terminal::Progress;
use crate::{
    devices,
    engine::{Engine, EngineOptions},
    formats::json,
    loading,
    models::{self, ConfigFile, Inventory, RoutingLaw, Synthetic, SyntheticCheckpoint},
};

/// Experts of all layers that a configuration may ask for, ten times as many as the largest published model has.
const MAX_EXPERTS: u64 = 1 << 18;

/// Which model to make up.
#[derive(Debug, Clone, Args)]
pub(in crate::cli) struct ShapeArgs {
    /// Random weights in a published shape.
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(models::PUBLISHED))]
    like: Option<String>,
    /// Random weights in the shape that a config.json describes.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Make so many layers instead of all.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    layers: Option<u32>,
    /// What the weights depend on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(in crate::cli) seed: u64,
    /// How popular experts are: uniform, or zipf:S, where the r-th most popular one is chosen in proportion to r^-S.
    #[arg(long, value_name = "LAW", default_value = "uniform")]
    pub(in crate::cli) routing: RoutingLaw,
    /// How they are stored, the rest of a model as published checkpoints of the format have it [default: bf16].
    #[arg(long, value_name = "bf16|fp8|nvfp4|mxfp4", value_parser = format)]
    pub(in crate::cli) format: Option<Format>,
}

/// A format that weights are made in.
fn format(text: &str) -> Result<Format, String> {
    let known = [Format::Bf16, Format::Fp8, Format::Nvfp4, Format::Mxfp4];
    let found = known.into_iter().find(|format| format.to_string() == text);
    found.ok_or_else(|| "weights are made in bf16, fp8, nvfp4 or mxfp4".into())
}

impl ShapeArgs {
    /// The shape, where one is asked for.
    pub(in crate::cli) fn read(&self) -> Result<Option<Shape>> {
        let (name, mut fields) = match (&self.like, &self.config) {
            (Some(name), _) => {
                (name.clone(), models::published_config(name).expect("the parser knows the names"))
            }
            (None, Some(path)) => {
                (path.display().to_string(), json::read::<Map<String, Value>>(path, json::CONFIG_LIMIT)?)
            }
            (None, None) => {
                ensure!(
                    self.layers.is_none(),
                    "--layers changes a made-up model: give --like NAME or --config FILE"
                );
                return Ok(None);
            }
        };
        if let Some(layers) = self.layers {
            keep_layers(text(&mut fields), layers.into());
        }
        fields.insert("torch_dtype".into(), "bfloat16".into());
        fields.remove("quantization_config");
        let format = self.format.unwrap_or(Format::Bf16);
        fields
            .extend(models::quantization_config(format).map(|config| ("quantization_config".into(), config)));
        let text = text(&mut fields);
        let count = |field: &str| text.get(field).and_then(Value::as_u64).unwrap_or(1);
        let n_experts = count("num_hidden_layers").saturating_mul(count("num_experts"));
        ensure!(
            n_experts <= MAX_EXPERTS,
            "{name}: {n_experts} experts in all are more than the {MAX_EXPERTS} that run"
        );
        Ok(Some(Shape { name, fields, format }))
    }
}

/// The fields of the language model, where others stand beside them.
fn text(fields: &mut Map<String, Value>) -> &mut Map<String, Value> {
    match fields.get("text_config").is_some_and(Value::is_object) {
        true => fields["text_config"].as_object_mut().expect("looked at above"),
        false => fields,
    }
}

/// Cuts a configuration to its first layers.
fn keep_layers(fields: &mut Map<String, Value>, layers: u64) {
    fields.insert("num_hidden_layers".into(), layers.into());
    if let Some(Value::Array(dense)) = fields.get_mut("mlp_only_layers") {
        dense.retain(|layer| layer.as_u64().is_some_and(|layer| layer < layers));
    }
    if let Some(Value::Array(types)) = fields.get_mut("layer_types") {
        types.truncate(layers as usize);
    }
}

/// A configuration whose weights are to be made up.
pub(in crate::cli) struct Shape {
    /// The published name, or the path of the configuration.
    pub(in crate::cli) name: String,
    /// Of its config.json.
    pub(in crate::cli) fields: Map<String, Value>,
    format: Format,
}

impl Shape {
    /// For reports.
    pub(in crate::cli) fn title(&self) -> String {
        format!("{} in {}", self.name, self.format)
    }

    fn config(&self) -> ConfigFile<'_> {
        ConfigFile::new(&self.name, &self.fields)
    }

    /// All tensors of the model.
    pub(in crate::cli) fn inventory(&self) -> Result<Inventory> {
        Ok(Inventory::new(&self.config(), &*devices::reference())?.stored_as(self.format)?)
    }

    /// Makes the weights in memory, with a bar on a terminal.
    pub(in crate::cli) fn weights(&self, args: &ShapeArgs) -> Result<SyntheticCheckpoint> {
        let inventory = self.inventory()?;
        if let Some(free) = os::available_memory().filter(|&free| free < inventory.bytes()) {
            let layer = inventory.layer_bytes().into_iter().max().unwrap_or(0);
            let ends = inventory.bytes() - inventory.layer_bytes().iter().sum::<u64>();
            let fits = free.saturating_sub(ends) * 9 / 10 / layer.max(1);
            anyhow::bail!(
                "the weights of {} take {} and {} of memory are free: try --layers {}",
                self.name,
                BinaryBytes(inventory.bytes()),
                BinaryBytes(free),
                fits.max(1)
            );
        }
        let progress = Progress::bytes("making", inventory.bytes());
        let synthetic = Synthetic::new(args.seed).with_routing(args.routing, &inventory.sizes);
        let weights =
            SyntheticCheckpoint::generate(&synthetic, &inventory.tensors, &mut |n| progress.add(n))?;
        progress.finish();
        Ok(weights)
    }

    /// An engine with such weights.
    pub(in crate::cli) fn engine(
        &self,
        weights: &SyntheticCheckpoint,
        backend: Arc<dyn Backend>,
        options: &EngineOptions,
    ) -> Result<Engine> {
        Ok(loading::load(&self.config(), weights, backend, options, &mut |_| ())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_layers_leave_no_word_about_the_others() {
        let mut fields = models::published_config("qwen3-30b-a3b").unwrap();
        fields.insert("mlp_only_layers".into(), serde_json::json!([0, 1, 40]));
        fields.insert("layer_types".into(), serde_json::json!(["a", "b", "c"]));
        keep_layers(&mut fields, 2);
        assert_eq!(fields["num_hidden_layers"], 2);
        assert_eq!(fields["mlp_only_layers"], serde_json::json!([0, 1]));
        assert_eq!(fields["layer_types"], serde_json::json!(["a", "b"]));
        let shape = Shape { name: "cut".into(), fields, format: Format::Bf16 };
        assert_eq!(shape.inventory().unwrap().sizes.moe.unwrap().n_layers, 0);
        let mut fields = models::published_config("qwen3.6-35b-a3b").unwrap();
        keep_layers(text(&mut fields), 5);
        let sizes = Shape { fields, ..shape }.inventory().unwrap().sizes;
        assert_eq!((sizes.n_layers, sizes.n_kv_layers()), (5, 1));
    }
}
