//! [`FormatError`]: everything that can be wrong with a file, one sentence each.
//!
//! A `file` is a path, or the label of an embedded file. Text that comes out of a file (tensor names, parser
//! messages) passes through `shorten` first, so that a hostile name can neither flood nor control a terminal.

use std::io;
use std::path::Path;

use ::safetensors::Dtype;

use super::ftw::fault::{EntryFault, IndexFault};

/// Why a file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FormatError {
    /// No such path.
    #[error("{file} does not exist; check the path, or download the file")]
    NotFound {
        /// The path.
        file: String,
    },
    /// A checkpoint was asked for and the path is a file.
    #[error("{file} is a file; give the directory that holds config.json and the .safetensors files")]
    NotADirectory {
        /// The path.
        file: String,
    },
    /// A file was expected and the path is a directory.
    #[error("{file} is a directory where a file is expected; remove it and download the file again")]
    IsADirectory {
        /// The path.
        file: String,
    },
    /// A pipe, a socket or a device.
    #[error("{file} is neither a file nor a directory; put a regular file there")]
    NotAFile {
        /// The path.
        file: String,
    },
    /// The operating system refused to open, list, map or read.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The path.
        file: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A read at a place failed, or found the file's end.
    #[error("cannot read {file} at byte {offset}: {source}; check the disk, or copy the file again")]
    ReadAt {
        /// The path.
        file: String,
        /// Where the read began.
        offset: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// A file of zero bytes.
    #[error("{file} is empty; download it again")]
    Empty {
        /// The path or label.
        file: String,
    },
    /// More bytes than a file of this kind may have.
    #[error("{file} is larger than the {limit} bytes allowed for it; it is not the file it claims to be")]
    TooLarge {
        /// The path or label.
        file: String,
        /// Bytes allowed.
        limit: u64,
    },
    /// Text that is not UTF-8.
    #[error("{file} is not UTF-8 text (byte {offset}); download it again")]
    NotUtf8 {
        /// The path or label.
        file: String,
        /// Offset of the first bad byte.
        offset: usize,
    },
    /// Text that is not JSON.
    #[error("{file} is not valid JSON: {detail}; correct it or download it again")]
    NotJson {
        /// The path or label.
        file: String,
        /// The parser's reason with line and column.
        detail: String,
    },
    /// JSON nested deeper than the parser follows.
    #[error(
        "{file} nests arrays or objects too deep (line {line}, column {column}); flatten it to at most 127 levels"
    )]
    TooDeep {
        /// The path or label.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// JSON with a missing, repeated or wrongly typed field.
    #[error("{file} does not have the expected content: {detail}; correct it or download it again")]
    WrongJson {
        /// The path or label.
        file: String,
        /// The parser's reason with line and column.
        detail: String,
    },
    /// A safetensors file with a bad frame around its tensors.
    #[error("{file} {fault}; download it again")]
    Header {
        /// The path or label.
        file: String,
        /// What is wrong.
        fault: HeaderFault,
    },
    /// One tensor of a safetensors file contradicts the file or itself.
    #[error("{file}: tensor `{tensor}` {fault}")]
    Tensor {
        /// The path or label.
        file: String,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        fault: TensorFault,
    },
    /// An FTW index that contradicts itself or its shards.
    #[error("{file} {fault}")]
    Index {
        /// The index.
        file: String,
        /// What is wrong.
        fault: IndexFault,
    },
    /// One entry of an FTW index contradicts the index or itself.
    #[error("{file}: entry `{entry}` {fault}")]
    Entry {
        /// The index.
        file: String,
        /// The entry.
        entry: String,
        /// What is wrong.
        fault: EntryFault,
    },
    /// An FTW directory that is not complete yet.
    #[error(
        "{dir} holds a conversion that was not finished; run the same `freetoken convert` again: it goes on"
    )]
    Unfinished {
        /// The directory.
        dir: String,
    },
    /// A directory without weights.
    #[error(
        "{dir} holds none of model.safetensors, model.safetensors.index.json and freetoken_weight.json; give the directory of \
         a Hugging Face checkpoint in safetensors format, or of one that `freetoken convert` wrote"
    )]
    NoWeights {
        /// The directory or label.
        dir: String,
    },
    /// The index names files that are not there.
    #[error("{dir} lacks {missing} of the {total} shards that its index lists, first {first}; download them")]
    MissingShards {
        /// The directory or label.
        dir: String,
        /// Shards absent.
        missing: usize,
        /// Shards listed.
        total: usize,
        /// The first absent shard.
        first: String,
    },
    /// The index names a path instead of a file beside itself.
    #[error(
        "{file} places tensor `{tensor}` in `{shard}`, which is not a plain file name; a shard must lie beside \
         its index"
    )]
    ShardOutside {
        /// The index.
        file: String,
        /// The tensor.
        tensor: String,
        /// The path that the index gives.
        shard: String,
    },
    /// The index places a tensor in a shard that does not hold it.
    #[error("{file} places tensor `{tensor}` in {shard}, which does not hold it; download both again")]
    NotInShard {
        /// The index.
        file: String,
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// Two shards hold one tensor.
    #[error("tensor `{tensor}` lies in both {first} and {second}; remove the shard that does not belong")]
    InTwoShards {
        /// The tensor.
        tensor: String,
        /// The first shard.
        first: String,
        /// The second shard.
        second: String,
    },
    /// A tensor that the model needs is absent.
    #[error(
        "{dir} has no tensor `{tensor}` among its {n_tensors} tensors{}; check that config.json and the weights \
         belong together", nearest.as_ref().map(|name| format!(" (nearest: `{name}`)")).unwrap_or_default()
    )]
    MissingTensor {
        /// The directory or label.
        dir: String,
        /// The tensor asked for.
        tensor: String,
        /// Tensors in the checkpoint.
        n_tensors: usize,
        /// The most similar name, none in an empty checkpoint.
        nearest: Option<String>,
    },
    /// The operating system refused to create, write, flush or rename.
    #[error("cannot write {file}: {source}")]
    Write {
        /// The path.
        file: String,
        /// The system's reason.
        source: io::Error,
    },
    /// No space left.
    #[error("the disk is full: {file} needs {bytes} bytes; free that much or choose another disk")]
    DiskFull {
        /// The path.
        file: String,
        /// Bytes of the whole file.
        bytes: u64,
    },
}

/// What is wrong with the frame of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderFault {
    /// No room for the length.
    #[error("has {bytes} bytes, fewer than the 8 that give its header's length")]
    Short {
        /// Bytes in the file.
        bytes: usize,
    },
    /// A length of zero.
    #[error("declares a header of 0 bytes")]
    Zero,
    /// A length above the format's limit (which a negative number, read as unsigned, always is).
    #[error("declares a header of {bytes} bytes, more than the format's 100000000")]
    TooLong {
        /// Bytes declared.
        bytes: u64,
    },
    /// A length that the file does not have.
    #[error("declares a header of {bytes} bytes but only {left} follow: it is truncated")]
    Beyond {
        /// Bytes declared.
        bytes: usize,
        /// Bytes that follow the length.
        left: usize,
    },
    /// Bytes behind the last tensor.
    #[error("ends in {bytes} bytes that belong to no tensor")]
    Trailing {
        /// Bytes left over.
        bytes: usize,
    },
}

/// What is wrong with one tensor; offsets count from the first byte behind the header unless said otherwise.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TensorFault {
    /// The element count or the byte count overflows.
    #[error("has a size that overflows: shape {shape}; download the file again")]
    Overflow {
        /// The shape, shortened.
        shape: String,
    },
    /// A whole number of 4-bit or 6-bit elements that is no whole number of bytes.
    #[error("ends inside a byte: {dtype} of shape {shape}; export it with a padded last dimension")]
    PartByte {
        /// Element type.
        dtype: Dtype,
        /// The shape, shortened.
        shape: String,
    },
    /// End before begin.
    #[error("ends at byte {end}, before it begins at byte {begin}; download the file again")]
    Reversed {
        /// First byte.
        begin: usize,
        /// One past the last byte.
        end: usize,
    },
    /// End behind the file.
    #[error("ends at byte {end} of {data_bytes}: the file is truncated; download it again")]
    Beyond {
        /// One past the last byte.
        end: usize,
        /// Bytes of data in the file.
        data_bytes: usize,
    },
    /// Range and shape disagree.
    #[error("has {bytes} bytes but {dtype} of shape {shape} takes {expected}; download the file again")]
    Size {
        /// Bytes in the range, or bytes produced.
        bytes: u64,
        /// Bytes that the shape takes.
        expected: usize,
        /// Element type.
        dtype: Dtype,
        /// The shape, shortened.
        shape: String,
    },
    /// Shares bytes with the tensor before it.
    #[error(
        "begins at byte {begin} and overlaps the tensor that ends at byte {previous_end}; download the file again"
    )]
    Overlap {
        /// First byte.
        begin: usize,
        /// One past the last byte of the tensor before it.
        previous_end: usize,
    },
    /// Bytes that belong to no tensor lie before it.
    #[error("begins at byte {begin} and leaves a gap after byte {previous_end}; download the file again")]
    Gap {
        /// First byte.
        begin: usize,
        /// One past the last byte of the tensor before it.
        previous_end: usize,
    },
    /// An address that its elements cannot have.
    #[error(
        "begins at byte {offset} of the file, misaligned for its {element_bytes}-byte elements; save it again with \
         a current safetensors"
    )]
    Misaligned {
        /// First byte, counted from the start of the file.
        offset: usize,
        /// Bytes of one element.
        element_bytes: usize,
    },
    /// A writer was given a name twice, or the name that the format reserves.
    #[error("cannot be written under this name: it is taken or reserved; rename it")]
    Name,
}

impl FormatError {
    /// The sentence for a failed open, list, map or read of `path`.
    pub(super) fn read(path: &Path, source: io::Error) -> Self {
        let file = path.display().to_string();
        match source.kind() {
            io::ErrorKind::NotFound => Self::NotFound { file },
            _ => Self::Read { file, source },
        }
    }

    /// The sentence for a failed write of `path`, which has `bytes` when complete.
    pub(super) fn write(path: &Path, bytes: u64, source: io::Error) -> Self {
        let file = path.display().to_string();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { file, bytes },
            _ => Self::Write { file, source },
        }
    }

    /// Names the entry of an FTW index that `fault` is about.
    pub(super) fn entry(file: &str, entry: &str, fault: EntryFault) -> Self {
        Self::Entry { file: file.to_string(), entry: shorten(entry), fault }
    }

    /// Names the tensor that `fault` is about.
    pub(super) fn tensor(file: &str, tensor: &str, fault: TensorFault) -> Self {
        Self::Tensor { file: file.to_string(), tensor: shorten(tensor), fault }
    }
}

/// Foreign text made fit for a sentence: control characters escaped, and of a long text the first 160 and the last
/// 60 characters (a parser's message ends with the line and column).
pub(super) fn shorten(text: &str) -> String {
    const HEAD: usize = 160;
    const TAIL: usize = 60;
    let clean = |part: &str| -> String {
        let escape = |c: char| if c.is_control() { c.escape_unicode().to_string() } else { c.to_string() };
        part.chars().map(escape).collect()
    };
    let head_end = text.char_indices().nth(HEAD).map_or(text.len(), |(at, _)| at);
    let tail_start = text.char_indices().rev().nth(TAIL - 1).map_or(0, |(at, _)| at);
    if head_end >= tail_start {
        return clean(text);
    }
    format!("{} ... {}", clean(&text[..head_end]), clean(&text[tail_start..]))
}
