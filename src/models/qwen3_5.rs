//! Qwen3.5, dense, and the frame of its family: gated delta nets in most layers, attention with an output gate in every fourth, norms
//! whose weights are stored less one. Text only: the image tower and the layers that predict further tokens are left aside.
//!
//! Source: `Qwen3_5ForConditionalGeneration` of Hugging Face transformers.

use super::{
    ConfigError, ConfigFile, ModelError, Rope, Sizes, Weights,
    blocks::{self, AttentionStyle, Ends, Mlp, SelfAttention},
    decoder::{Decoder, FeedForward, Mixer},
    delta_net::{self, DeltaNet, InProjections},
    weights::Spelling,
};

/// A layer has attention where its number, counted from one, is a multiple of this, unless `layer_types` says otherwise.
const ATTENTION_INTERVAL: usize = 4;

pub(super) fn load(config: &ConfigFile<'_>, weights: &mut Weights<'_>) -> Result<Decoder, ModelError> {
    let text = text(config)?;
    let hidden = text.count("hidden_size", 1..=blocks::MAX_WIDTH)?;
    load_family(config, blocks::sizes(&text)?, InProjections::Apart, weights, |layer, weights| {
        Ok(FeedForward::Dense(Mlp::load(&text, hidden, false, layer, weights)?))
    })
}

/// The fields of the language model: those of `text_config` where there is one.
pub(super) fn text<'a>(config: &ConfigFile<'a>) -> Result<ConfigFile<'a>, ConfigError> {
    Ok(config.object("text_config", "text_config.")?.unwrap_or(*config))
}

/// A model of the family, with delta nets `stored` in one way or the other; `feed_forward` loads what follows attention and delta nets.
pub(super) fn load_family(
    config: &ConfigFile<'_>,
    sizes: Sizes,
    stored: InProjections,
    weights: &mut Weights<'_>,
    feed_forward: impl Fn(usize, &mut Weights<'_>) -> Result<FeedForward, ModelError>,
) -> Result<Decoder, ModelError> {
    let text = text(config)?;
    text.silu()?;
    let is_attention = attention_layers(&text, sizes.n_layers)?;
    let place = |layer: usize| is_attention[..layer].iter().filter(|&&is| is == is_attention[layer]).count();
    let n_recurrent = is_attention.iter().filter(|&&is| !is).count();
    let sizes = Sizes {
        gated_attention: text.flag("attn_output_gate", true)?,
        recurrent: match n_recurrent {
            0 => None,
            n => Some(delta_net::sizes(&text, n)?),
        },
        ..sizes
    };
    let attention = AttentionStyle { qk_norm: true, bias: text.flag("attention_bias", false)? };
    let rope = Rope::from_config(&text, rotary_dim(&text, sizes.head_dim)?)?;

    // A checkpoint with an image tower keeps the language model one name deeper.
    let is_flat = weights.contains("model.embed_tokens.weight");
    let nested = config.has("text_config") && !is_flat;
    weights.spell(Spelling { nested, norms_less_one: true });
    let tied = text.flag("tie_word_embeddings", config.flag("tie_word_embeddings", false)?)?;
    let ends = Ends::load(&text, &sizes, tied, weights)?;
    Decoder::of_layers(sizes, rope, ends, weights, |layer, sizes, weights| {
        let places = [layer, place(layer)];
        let mixer = match is_attention[layer] {
            true => Mixer::Attention(SelfAttention::load(&text, sizes, &attention, places, weights)?),
            false => Mixer::Delta(DeltaNet::load(&text, sizes, stored, places, weights)?),
        };
        Ok((mixer, feed_forward(layer, weights)?))
    })
}

/// Which layers have attention.
fn attention_layers(text: &ConfigFile<'_>, n_layers: usize) -> Result<Vec<bool>, ConfigError> {
    let Some(types) = text.words("layer_types", n_layers)? else {
        let interval =
            text.optional_count("full_attention_interval", 1..=4096)?.unwrap_or(ATTENTION_INTERVAL);
        return Ok((1..=n_layers).map(|layer| layer.is_multiple_of(interval)).collect());
    };
    let is_attention = |kind: &str| match kind {
        "full_attention" => Ok(true),
        "linear_attention" => Ok(false),
        _ => Err(text.error("layer_types", "must hold full_attention and linear_attention alone")),
    };
    types.into_iter().map(is_attention).collect()
}

/// Rotated width of a head: the share `partial_rotary_factor`, a quarter by default.
fn rotary_dim(text: &ConfigFile<'_>, head_dim: usize) -> Result<usize, ConfigError> {
    let parameters = text.object("rope_parameters", "rope_parameters.")?.unwrap_or(*text);
    let factor = match parameters.optional_number("partial_rotary_factor", 0.0..=1.0)? {
        Some(factor) => factor,
        None => text.optional_number("partial_rotary_factor", 0.0..=1.0)?.unwrap_or(0.25),
    };
    let rotary_dim = (head_dim as f64 * factor) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        let problem = format!("rotates {rotary_dim} of {head_dim} dimensions; it must be pairs of them");
        return Err(parameters.error("partial_rotary_factor", problem));
    }
    Ok(rotary_dim)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::{Inventory, published_config};
    use super::*;
    use crate::devices;

    fn sizes(field: &str, value: Value) -> Result<Sizes, String> {
        let mut fields = published_config("qwen3.6-35b-a3b").unwrap();
        let text = fields["text_config"].as_object_mut().unwrap();
        text.insert("num_hidden_layers".into(), 4.into());
        text.insert(field.into(), value);
        let config = ConfigFile::new("config.json", &fields);
        Inventory::new(&config, &*devices::reference()).map(|i| i.sizes).map_err(|e| e.to_string())
    }

    #[test]
    fn layers_have_attention_where_the_configuration_says() {
        let n_kv_layers = |field, value| sizes(field, value).unwrap().n_kv_layers();
        assert_eq!(n_kv_layers("full_attention_interval", json!(4)), 1);
        assert_eq!(n_kv_layers("full_attention_interval", json!(2)), 2);
        assert_eq!(n_kv_layers("full_attention_interval", json!(5)), 0);
        let (full, linear) = ("full_attention", "linear_attention");
        assert_eq!(n_kv_layers("layer_types", json!([full, linear, full, full])), 3);
        assert_eq!(sizes("layer_types", json!([full, full, full, full])).unwrap().recurrent, None);
    }

    #[test]
    fn what_cannot_be_is_said() {
        for (field, value, part) in [
            ("layer_types", json!(["full_attention"]), "`text_config.layer_types` must be a list of 4 words"),
            ("layer_types", json!(["s", "s", "s", "s"]), "must hold full_attention and linear_attention"),
            ("linear_num_value_heads", json!(24), "is 24, which 16 heads of keys do not divide"),
            ("linear_conv_kernel_dim", json!(9), "`text_config.linear_conv_kernel_dim` is 9"),
            ("linear_key_head_dim", json!(0), "`text_config.linear_key_head_dim` is 0"),
            ("rope_parameters", json!({ "partial_rotary_factor": 0.001 }), "rotates 0 of 256 dimensions"),
            ("hidden_act", json!("gelu"), "`text_config.hidden_act`"),
            ("mlp_only_layers", json!([1]), "`text_config.mlp_only_layers` must be empty"),
            ("shared_expert_intermediate_size", json!(null), "shared_expert_intermediate_size` is missing"),
        ] {
            let sentence = sizes(field, value).unwrap_err();
            assert!(sentence.contains(part), "{sentence}");
        }
    }
}
