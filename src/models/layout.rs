//! How published checkpoints of a format store a model: which of its matrices are quantised, and the tensors that these become.
//! Goes by the names of modules, which the families share, and knows no architecture.
//!
//! | | routed experts | shared expert, dense MLP | attention, delta net | output head |
//! |---|---|---|---|---|
//! | fp8, as Qwen publishes it | fp8 | fp8 | fp8 | |
//! | nvfp4, as NVIDIA publishes Qwen3.6 | nvfp4 | nvfp4 | fp8 | nvfp4 |
//! | mxfp4, as OpenAI publishes gpt-oss | mxfp4 | | | |
//!
//! What has no word stays as it is, and so do the gates, the embedding, and what decides how fast a delta net forgets. Experts that
//! share a tensor get one each: all of these publishers write quantised ones so.

use freetoken_backend::Format;
use serde_json::{Value, json};

use crate::formats::{
    quantised::{self, FP8_BLOCK},
    write::TensorSpec,
};

/// A matrix that codes of a format cannot be written for.
#[derive(Debug, thiserror::Error)]
#[error("`{module}` has rows of {cols} columns, and {format} takes whole groups of {group}: give another --format")]
pub struct Ungrouped {
    module: String,
    cols: usize,
    format: Format,
    group: usize,
}

/// The tensors of a model whose matrices are BF16 as a checkpoint in `format` has them, in the same order.
///
/// # Errors
/// [`Ungrouped`].
pub(super) fn stored_as(tensors: &[TensorSpec], format: Format) -> Result<Vec<TensorSpec>, Ungrouped> {
    let mut stored = Vec::new();
    for tensor in tensors {
        let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
        let own = format_of(module, format);
        let matrices = match (own.group(), &tensor.shape[..]) {
            (None, _) => {
                stored.push(tensor.clone());
                continue;
            }
            (_, &[n, rows, cols]) => of_each_expert(module, n, rows, cols),
            _ => vec![(module.to_owned(), [tensor.shape[0], tensor.shape[1]])],
        };
        for (module, [rows, cols]) in matrices {
            if let Some(group) = own.group().filter(|_| !own.takes_cols(cols)) {
                return Err(Ungrouped { module, cols, format: own, group });
            }
            stored.extend(quantised::tensors(own, &module, [rows, cols]));
        }
    }
    Ok(stored)
}

/// What a `config.json` says of such a checkpoint, where there is something to say.
pub fn quantization_config(format: Format) -> Option<Value> {
    match format {
        Format::Fp8 => Some(json!({
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK]
        })),
        Format::Nvfp4 => Some(json!({ "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" })),
        Format::Mxfp4 => Some(json!({ "quant_method": "mxfp4" })),
        Format::Bf16 | Format::F16 | Format::F32 => None,
    }
}

/// The format of a module in a checkpoint of a format.
fn format_of(module: &str, format: Format) -> Format {
    let (parent, name) = module.rsplit_once('.').unwrap_or(("", module));
    let is_projection = name.ends_with("_proj") || name.starts_with("in_proj_");
    let is_rate = ["in_proj_a", "in_proj_b"].contains(&name);
    let is_mixer = parent.ends_with(".self_attn") || parent.ends_with(".linear_attn");
    match format {
        Format::Mxfp4 if parent.contains(".experts") => format,
        Format::Fp8 if is_projection && !is_rate => format,
        Format::Nvfp4 if is_projection && is_mixer && !is_rate => Format::Fp8,
        Format::Nvfp4 if is_projection && !is_mixer || module == "lm_head" => format,
        _ => Format::Bf16,
    }
}

/// The matrices of experts that share the tensor `module` `[n, rows, cols]`: gate over up, or down.
fn of_each_expert(module: &str, n: usize, rows: usize, cols: usize) -> Vec<(String, [usize; 2])> {
    let (experts, name) = module.rsplit_once('.').expect("experts have a module");
    let pieces = match name {
        "gate_up_proj" => vec![("gate_proj", rows / 2), ("up_proj", rows / 2)],
        name => vec![(name, rows)],
    };
    let matrices = |e: usize| {
        let named = move |&(name, rows): &(&str, usize)| (format!("{experts}.{e}.{name}"), [rows, cols]);
        pieces.iter().map(named).collect::<Vec<_>>()
    };
    (0..n).flat_map(matrices).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        devices,
        formats::Dtype,
        model_files::ModelFiles,
        models::{ConfigFile, Inventory, published_config},
    };
    use std::{collections::BTreeMap, path::Path};

    fn published(name: &str) -> Inventory {
        let fields = published_config(name).unwrap();
        Inventory::new(&ConfigFile::new(name, &fields), &*devices::reference()).unwrap()
    }

    /// Types of the tensors of a module, by the ends of their names.
    fn types(tensors: &[TensorSpec], module: &str) -> BTreeMap<String, Dtype> {
        let end = |t: &TensorSpec| Some((t.name.strip_prefix(module)?.to_owned(), t.dtype));
        tensors.iter().filter_map(end).collect()
    }

    /// The golden checkpoints were written with the names and types that the publishers use.
    #[test]
    fn modules_are_stored_as_their_publishers_store_them() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let of_golden = |name: &str| {
            let files = ModelFiles::open(Some(&golden.join(name))).unwrap();
            Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference()).unwrap()
        };
        let made = published("qwen3.6-35b-a3b");
        for (name, format, [delta, attention]) in [
            ("qwen3_5_moe-fp8-block", Format::Fp8, [0, 1]),
            ("qwen3_5_moe-nvfp4-modelopt", Format::Nvfp4, [0, 3]),
        ] {
            let (golden, made) = (of_golden(name).tensors, made.clone().stored_as(format).unwrap().tensors);
            let layer = |n: usize, what: &str| format!("model.language_model.layers.{n}.{what}");
            let mut pairs = vec![["lm_head".into(), "lm_head".into()]];
            for what in ["mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.down_proj"] {
                pairs.push([layer(delta, what), layer(0, what)]);
            }
            for what in ["mlp.experts.1.gate_proj", "mlp.experts.3.down_proj", "mlp.shared_expert.up_proj"] {
                pairs.push([layer(attention, what), layer(3, what)]);
            }
            for what in ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "out_proj"] {
                let what = format!("linear_attn.{what}");
                pairs.push([layer(delta, &what), layer(0, &what)]);
            }
            for what in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                let what = format!("self_attn.{what}");
                pairs.push([layer(attention, &what), layer(3, &what)]);
            }
            for [theirs, ours] in pairs {
                // A scale of the whole matrix, or scales in BF16, are read as blocks in F32 are.
                let plain = |tensors: &[TensorSpec], module: &str| {
                    let scale = |(end, dtype): (String, Dtype)| match (&end[..], dtype) {
                        (".weight_scale_inv", _) | (".weight_scale", Dtype::F32) => (".scale".into(), Dtype::F32),
                        _ => (end, dtype),
                    };
                    types(tensors, module).into_iter().map(scale).collect::<BTreeMap<_, _>>()
                };
                let (theirs, of_ours) = (plain(&golden, &theirs), plain(&made, &ours));
                assert!(!theirs.is_empty() && theirs == of_ours, "{ours} in {format}: {theirs:?}, {of_ours:?}");
            }
        }
    }

    /// Codes, scales and globals of Qwen3.6's experts; and no weight is lost.
    #[test]
    fn a_published_shape_has_the_bytes_of_its_format() {
        let plain = published("qwen3.6-35b-a3b");
        let weights = 3 * 2048 * 512;
        for (format, expert_bytes) in [
            (Format::Bf16, 2 * weights),
            (Format::Fp8, weights + 3 * 16 * 4 * 4),
            (Format::Nvfp4, weights / 2 + weights / 16 + 3 * 4),
            (Format::Mxfp4, weights / 2 + weights / 32),
        ] {
            let stored = plain.clone().stored_as(format).unwrap();
            assert_eq!(stored.n_params(), plain.n_params(), "{format}");
            assert_eq!(stored.n_active_params(), plain.n_active_params(), "{format}");
            assert_eq!((stored.expert_bytes(), stored.expert_format), (Some(expert_bytes), Some(format)));
        }
        // NVIDIA's files have 23.4 GB, of which the image tower and the prediction of further tokens are 2.6.
        let nvfp4 = plain.stored_as(Format::Nvfp4).unwrap().bytes();
        assert!((20.0e9..21.5e9).contains(&(nvfp4 as f64)), "{nvfp4}");
        let dense = published("qwen3-8b").stored_as(Format::Fp8).unwrap();
        assert_eq!((dense.expert_format, dense.n_params()), (None, 8_190_735_360));
    }

    #[test]
    fn a_width_that_no_group_divides_is_said() {
        let mut fields = published_config("qwen3-30b-a3b").unwrap();
        fields.insert("moe_intermediate_size".into(), 40.into());
        let inventory = Inventory::new(&ConfigFile::new("c", &fields), &*devices::reference()).unwrap();
        let refused = inventory.clone().stored_as(Format::Nvfp4).unwrap_err().to_string();
        assert!(refused.contains(".mlp.experts.0.down_proj` has rows of 40 columns, and nvfp4 takes"), "{refused}");
        inventory.stored_as(Format::Fp8).unwrap();
    }
}
