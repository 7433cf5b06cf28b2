//! What can be wrong with an FTW directory, one sentence each; [`FormatError`](super::super::FormatError) names the file and the
//! entry.

use ::safetensors::Dtype;

/// What is wrong with an index as a whole, or with what it says of its shards.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IndexFault {
    /// Another file of this name.
    #[error("says that it is a `{found}`, not a `freetoken_weight`; it is not the file it claims to be")]
    Format {
        /// Its `format`, shortened.
        found: String,
    },
    /// A version that is not known here.
    #[error("is of version {found}, and this program reads version 1: use a newer one, or convert again")]
    Version {
        /// Its `version`.
        found: u64,
    },
    /// Another alignment.
    #[error("aligns its entries to {found} bytes, and this program reads 4096: convert again")]
    Align {
        /// Its `align`.
        found: u64,
    },
    /// A path instead of a file beside the index.
    #[error("lists the shard `{shard}`, which is not a plain file name; a shard must lie beside its index")]
    ShardName {
        /// The name, shortened.
        shard: String,
    },
    /// One file is two shards.
    #[error("lists the shard `{shard}` twice; convert again")]
    ShardTwice {
        /// The name, shortened.
        shard: String,
    },
    /// Shards do not follow each other.
    #[error(
        "places the shard `{shard}` at byte {found} of the region, where {expected} is next; convert again"
    )]
    ShardPlace {
        /// The shard.
        shard: String,
        /// Its `global_off`.
        found: u64,
        /// End of the shard before it.
        expected: u64,
    },
    /// A shard of no pages, or of parts of them.
    #[error("gives the shard `{shard}` {bytes} bytes, which are no multiple of 4096; convert again")]
    ShardBytes {
        /// The shard.
        shard: String,
        /// Its `nbytes`.
        bytes: u64,
    },
    /// The shards are not the region.
    #[error("has a region of {total} bytes and shards of {shards}; convert again")]
    Total {
        /// Its `total_bytes`.
        total: u64,
        /// Bytes of all shards.
        shards: u64,
    },
    /// A shard's file has another length.
    #[error(
        "gives the shard `{shard}` {expected} bytes, and the file has {found}: copy it again, or convert again"
    )]
    ShardLength {
        /// The shard.
        shard: String,
        /// By the index.
        expected: u64,
        /// By the file system.
        found: u64,
    },
    /// A shard's bytes are not those that were written.
    #[error("says that the SHA-256 of `{shard}` is {expected}, and it is {found}: copy the shard again")]
    Checksum {
        /// The shard.
        shard: String,
        /// By the index.
        expected: String,
        /// Of the file.
        found: String,
    },
    /// Banks in a layout that nothing here multiplies with.
    #[error(
        "stores its experts as `{layout}`, which this program does not read; it reads bf16, fp8_block, nvfp4 and ds_fp4 banks in \
         rows: convert the original checkpoint with `freetoken convert`"
    )]
    Layout {
        /// Its `quant_format`, shortened.
        layout: String,
    },
    /// The experts' layers are not the model's.
    #[error("has experts of {experts} layers and routers of {routers}; convert again")]
    Layers {
        /// Layers with experts.
        experts: u64,
        /// Layers with a router.
        routers: usize,
    },
    /// More experts than any model has.
    #[error(
        "names {found} experts, more than the {limit} that are allowed; it is not the file it claims to be"
    )]
    Experts {
        /// Over all layers.
        found: u64,
        /// Allowed.
        limit: u64,
    },
    /// Banks as the seed system and as this program writes them.
    #[error("has both banks and records of experts; convert again")]
    BothKinds,
    /// A bank that the format asks for.
    #[error("lacks the bank `{bank}`, which {layout} experts have; convert again")]
    MissingBank {
        /// Its name.
        bank: String,
        /// The `quant_format`.
        layout: String,
    },
}

/// What is wrong with one entry of an index.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EntryFault {
    /// Two entries of one name, or that are the same tensor.
    #[error("is there twice, perhaps once as a part of another entry; convert again")]
    Twice,
    /// A kind that is not known here.
    #[error("is a `{kind}`, which this program does not know: use a newer one, or convert again")]
    Kind {
        /// Its `kind`, shortened.
        kind: String,
    },
    /// An element type that is not known here.
    #[error("holds `{dtype}`, which this program does not know: use a newer one, or convert again")]
    DtypeName {
        /// Its `dtype`, shortened.
        dtype: String,
    },
    /// A size that no number holds, or parts of bytes.
    #[error("has the shape {shape}, which has no size in bytes; convert again")]
    Shape {
        /// The shape, shortened.
        shape: String,
    },
    /// Bytes and shape disagree.
    #[error("has {bytes} bytes but {dtype} of shape {shape} takes {expected}; convert again")]
    Bytes {
        /// Its `nbytes`.
        bytes: u64,
        /// By its shape.
        expected: u64,
        /// Element type.
        dtype: Dtype,
        /// The shape, shortened.
        shape: String,
    },
    /// Not at the start of a page.
    #[error("begins at byte {offset} of the region, which is no multiple of 4096; convert again")]
    Misaligned {
        /// Its `global_off`.
        offset: u64,
    },
    /// Behind the last shard.
    #[error("ends at byte {end} of a region of {total}; convert again")]
    Beyond {
        /// One past its last byte.
        end: u64,
        /// Bytes of the region.
        total: u64,
    },
    /// Shares bytes with another.
    #[error(
        "begins at byte {offset} of the region and overlaps `{other}`, which ends at {end}; convert again"
    )]
    Overlap {
        /// Its `global_off`.
        offset: u64,
        /// The entry before it.
        other: String,
        /// One past the last byte of that.
        end: u64,
    },
    /// A name that does not say the layer.
    #[error("is no bank of a layer: its name must end in #L and the layer's number; convert again")]
    BankName,
    /// A layer that is not there, or not next.
    #[error("is of layer {layer}, and the index has {n_layers} layers of experts; convert again")]
    Layer {
        /// By its name.
        layer: usize,
        /// By the index.
        n_layers: usize,
    },
    /// A bank of another type than its format has.
    #[error("holds {found}, and this bank of {layout} experts is {expected}; convert again")]
    BankDtype {
        /// Its type.
        found: Dtype,
        /// The type that is read.
        expected: Dtype,
        /// The `quant_format`.
        layout: String,
    },
    /// A bank of another shape than those beside it.
    #[error("has the shape {found}, and the banks beside it ask for {expected}; convert again")]
    BankShape {
        /// Its shape, shortened.
        found: String,
        /// What would fit.
        expected: String,
    },
    /// Records that say nothing of what is in them, or nothing that can be.
    #[error("has records of {what}; convert again")]
    Record {
        /// What is wrong with them.
        what: String,
    },
}
