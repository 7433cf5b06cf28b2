//! Files from outside: what lies on disk becomes checked names, shapes and bytes.
//!
//! Every file is hostile until checked: each length, offset, shape and count is compared with the length of the
//! file before anything is allocated or handed out, and bad input ends in a [`FormatError`], never in a panic.
//! Nothing here knows an architecture or a device.
//!
//! - [`checkpoint`]: a directory (or an embedded set) of files that makes one model
//! - [`error`]: everything that can be wrong with a file, one sentence each
//! - [`ftw`]: an index and shards, each expert one record
//! - [`generation_config`]: what a checkpoint says about how to generate from it
//! - [`json`]: JSON of bounded size, with errors that say where
//! - [`mapped`]: files opened and mapped read-only
//! - [`quantise`]: experts rounded to fewer bits
//! - [`quantised`]: weights of several tensors: codes, scales, globals
//! - [`read`]: many reads of files in flight at once
//! - [`mod@safetensors`]: one safetensors file, its header checked, its tensors slices of the mapping
//! - [`tokenizer`]: text to token ids and back
//! - [`write`](mod@write): streaming writer of safetensors files and sharded checkpoints

pub mod checkpoint;
pub mod error;
pub mod ftw;
pub mod generation_config;
pub mod json;
pub mod mapped;
pub mod quantise;
pub mod quantised;
pub mod read;
pub mod safetensors;
pub mod tokenizer;
pub mod write;

pub use ::safetensors::Dtype;
pub use checkpoint::Checkpoint;
pub use error::FormatError;
pub use safetensors::Tensor;
