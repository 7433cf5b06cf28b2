//! What an engine is made for.

use freetoken_backend::Caps;

use super::batch::{self, Limits};
use crate::{
    models::Sizes,
    moe::{CacheSize, ElasticOptions},
};

/// How much room an engine makes, and how.
#[derive(Clone)]
pub struct EngineOptions {
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Sequences that are in the cache at a time, at most 16.
    pub max_sequences: usize,
    /// Tokens that the key-value cache holds, of all sequences together and never less than one of them may have; as many as all
    /// may have by default.
    pub kv_tokens: Option<usize>,
    /// States of recurrent layers that stay on the device for later sequences to go on from.
    pub state_slots: usize,
    /// Bytes of host memory for those that have no slot there.
    pub state_cache: usize,
    /// Rows of a prefill step; as many as keep the device busy by default.
    pub max_chunk: Option<usize>,
    /// Bytes of device memory that all of it may take; what is free by default.
    pub vram: Option<u64>,
    /// Device memory for experts; all of them, or what is left, by default.
    pub expert_cache: Option<CacheSize>,
    /// How experts that have no place on the device are treated.
    pub elastic: ElasticOptions,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            context: 4096,
            max_sequences: 1,
            kv_tokens: None,
            state_slots: 0,
            state_cache: 1 << 30,
            max_chunk: None,
            vram: None,
            expert_cache: None,
            elastic: ElasticOptions::default(),
        }
    }
}

/// Bytes of caches and activations that an engine will take. `memory`: what the device has for all of it, where that is known;
/// `streamed`: whether experts stay in host memory.
pub fn step_bytes(
    sizes: &Sizes,
    caps: &Caps,
    options: &EngineOptions,
    memory: Option<u64>,
    streamed: bool,
) -> u64 {
    let context = options.context.clamp(1, sizes.max_positions);
    let limits = Limits::new(sizes, caps, options, context, memory, streamed);
    batch::bytes(sizes, &limits, caps.precision)
}
