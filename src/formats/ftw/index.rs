//! `freetoken_weight.json`: which bytes of the region are which entry, and which shard holds which bytes.
//!
//! Text in, checked numbers out. It opens no shard, and what the bytes of an entry mean is not its matter.

use std::{collections::BTreeSet, ops::Range};

use ::safetensors::Dtype;
use freetoken_backend::{ExpertRecord, Format, record};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    super::{
        checkpoint::is_plain_file_name,
        error::{FormatError, shorten},
        json,
        safetensors::{byte_len, shown},
    },
    fault::{EntryFault, IndexFault},
};

/// The `format` of an index.
pub(super) const FORMAT: &str = "freetoken_weight";
/// The `version` of an index.
pub(super) const VERSION: u64 = 1;
/// Entries and shards begin at a multiple of this many bytes of the region.
pub const ALIGN: u64 = 4096;
/// Most experts that an index may name, over all layers.
pub(super) const MAX_EXPERTS: u64 = 1 << 17;
/// Widest expert.
const MAX_WIDTH: usize = 1 << 20;
/// Formats that a record may have.
const RECORD_FORMATS: [Format; 6] =
    [Format::F32, Format::Bf16, Format::F16, Format::Fp8, Format::Nvfp4, Format::Mxfp4];

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A tensor that is no expert.
    Weight,
    /// One part of all experts of a layer, or of all layers, as the seed system writes them.
    ExpertsBank,
    /// All experts of a layer, each a record, as this program writes them.
    ExpertRecords {
        /// What is in a record.
        record: ExpertRecord,
        /// The module that they are in a Hugging Face checkpoint.
        module: String,
    },
}

/// A run of bytes of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the index.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Its bytes in the region, without the padding behind them.
    pub range: Range<u64>,
}

/// A file that holds a part of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardPlace {
    /// Its name, beside the index.
    pub file: String,
    /// The part of the region that it is.
    pub range: Range<u64>,
    /// Of the whole file, in hexadecimal digits, where its writer took it.
    pub sha256: Option<String>,
}

/// An index, checked: shards follow each other from byte 0 on, entries are aligned, sized as their shapes say, disjoint and inside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Index {
    /// In the order of the region.
    pub entries: Vec<Entry>,
    /// In the order of the region.
    pub shards: Vec<ShardPlace>,
    /// How the seed system's banks are stored.
    pub quant_format: Option<String>,
    /// Whether the seed system's layers differ in that.
    pub is_mixed: bool,
    /// MoE layers of the seed system's banks.
    pub n_bank_layers: Option<u64>,
}

/// The file as it is written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct IndexFile {
    pub(super) format: String,
    pub(super) version: u64,
    pub(super) align: u64,
    #[serde(default)]
    pub(super) shard_limit: u64,
    pub(super) total_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) quant_format: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) layer_quant_formats: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) expert_bank_num_layers: Option<u64>,
    pub(super) tensors: Vec<EntryFile>,
    pub(super) shards: Vec<ShardFile>,
}

/// An entry as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct EntryFile {
    pub(super) name: String,
    pub(super) kind: String,
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    pub(super) global_off: u64,
    pub(super) nbytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) record: Option<RecordFile>,
}

/// What is in a record, as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RecordFile {
    pub(super) format: String,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) module: String,
}

/// A shard as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ShardFile {
    pub(super) file: String,
    pub(super) global_off: u64,
    pub(super) nbytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) sha256: Option<String>,
}

/// Checks the index whose content is `bytes`; `label` names it in errors. What it allocates is bounded by the length of `bytes`.
///
/// # Errors
/// [`FormatError`] naming `label` and the entry that breaks a rule.
pub fn parse(label: &str, bytes: &[u8]) -> Result<Index, FormatError> {
    let wrong = |fault| FormatError::Index { file: label.to_string(), fault };
    let file: IndexFile = json::parse(label, bytes)?;
    if file.format != FORMAT {
        return Err(wrong(IndexFault::Format { found: shorten(&file.format) }));
    }
    if file.version != VERSION {
        return Err(wrong(IndexFault::Version { found: file.version }));
    }
    if file.align != ALIGN {
        return Err(wrong(IndexFault::Align { found: file.align }));
    }
    let total = file.total_bytes;
    let shards = shards(file.shards, total).map_err(wrong)?;
    let mut entries = Vec::with_capacity(file.tensors.len());
    let mut names = BTreeSet::new();
    for tensor in file.tensors {
        let name = tensor.name.clone();
        let wrong = |fault| FormatError::entry(label, &name, fault);
        if !names.insert(name.clone()) {
            return Err(wrong(EntryFault::Twice));
        }
        entries.push(entry(tensor, total).map_err(wrong)?);
    }
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    for (before, entry) in entries.iter().zip(entries.iter().skip(1)) {
        let (offset, end) = (entry.range.start, before.range.end);
        if offset < end {
            let fault = EntryFault::Overlap { offset, other: shorten(&before.name), end };
            return Err(FormatError::entry(label, &entry.name, fault));
        }
    }
    Ok(Index {
        entries,
        shards,
        quant_format: file.quant_format,
        is_mixed: file.layer_quant_formats.is_some_and(|formats| !formats.is_null()),
        n_bank_layers: file.expert_bank_num_layers,
    })
}

fn shards(files: Vec<ShardFile>, total: u64) -> Result<Vec<ShardPlace>, IndexFault> {
    let (mut names, mut end) = (BTreeSet::new(), 0_u64);
    let mut shards = Vec::with_capacity(files.len());
    for ShardFile { file, global_off: start, nbytes: bytes, sha256 } in files {
        let shard = shorten(&file);
        if !is_plain_file_name(&file) {
            return Err(IndexFault::ShardName { shard });
        }
        if !names.insert(file.clone()) {
            return Err(IndexFault::ShardTwice { shard });
        }
        if start != end {
            return Err(IndexFault::ShardPlace { shard, found: start, expected: end });
        }
        // The sum is compared with the total below, so it need not be right when it overflows.
        if bytes == 0 || !bytes.is_multiple_of(ALIGN) || end.checked_add(bytes).is_none() {
            return Err(IndexFault::ShardBytes { shard, bytes });
        }
        end += bytes;
        shards.push(ShardPlace { file, range: start..end, sha256 });
    }
    if end != total {
        return Err(IndexFault::Total { total, shards: end });
    }
    Ok(shards)
}

fn entry(file: EntryFile, total: u64) -> Result<Entry, EntryFault> {
    let EntryFile { name, kind, dtype, shape, global_off: offset, nbytes: bytes, record } = file;
    let dtype = dtype_of(&dtype).ok_or_else(|| EntryFault::DtypeName { dtype: shorten(&dtype) })?;
    let expected = byte_len(dtype, &shape).map_err(|_| EntryFault::Shape { shape: shown(&shape) })? as u64;
    if bytes != expected {
        return Err(EntryFault::Bytes { bytes, expected, dtype, shape: shown(&shape) });
    }
    if !offset.is_multiple_of(ALIGN) {
        return Err(EntryFault::Misaligned { offset });
    }
    let end = offset.saturating_add(bytes);
    if end > total {
        return Err(EntryFault::Beyond { end, total });
    }
    let kind = match kind.as_str() {
        "weight" => Kind::Weight,
        "experts_bank" => Kind::ExpertsBank,
        "expert_records" => records(record, dtype, &shape)?,
        _ => return Err(EntryFault::Kind { kind: shorten(&kind) }),
    };
    Ok(Entry { name, kind, dtype, shape, range: offset..end })
}

/// What is in the records of an entry, if they are as long as that.
fn records(file: Option<RecordFile>, dtype: Dtype, shape: &[usize]) -> Result<Kind, EntryFault> {
    let wrong = |what: String| Err(EntryFault::Record { what });
    let Some(RecordFile { format, hidden, intermediate, module }) = file else {
        return wrong("no stated format".into());
    };
    let Some(format) = RECORD_FORMATS.into_iter().find(|known| known.to_string() == format) else {
        return wrong(format!("the format `{}`, which this program does not know", shorten(&format)));
    };
    let widths = [hidden, intermediate];
    if widths.iter().any(|&width| width == 0 || width > MAX_WIDTH || !format.takes_cols(width)) {
        return wrong(format!("{hidden} x {intermediate}, which {format} weights cannot have"));
    }
    if !module.ends_with(".experts") {
        return wrong(format!("the module `{}`, which is none of experts", shorten(&module)));
    }
    let record = record(format, hidden, intermediate);
    match *shape {
        [n_experts, bytes] if dtype == Dtype::U8 && n_experts > 0 && bytes == record.bytes => {
            Ok(Kind::ExpertRecords { record, module })
        }
        _ => wrong(format!(
            "{dtype} of shape {}, where {format} {hidden} x {intermediate} takes {} bytes each",
            shown(shape),
            record.bytes
        )),
    }
}

/// Element types and the names that PyTorch has for them.
const DTYPES: [(&str, Dtype); 16] = [
    ("bool", Dtype::BOOL),
    ("uint8", Dtype::U8),
    ("int8", Dtype::I8),
    ("uint16", Dtype::U16),
    ("int16", Dtype::I16),
    ("uint32", Dtype::U32),
    ("int32", Dtype::I32),
    ("uint64", Dtype::U64),
    ("int64", Dtype::I64),
    ("float8_e4m3fn", Dtype::F8_E4M3),
    ("float8_e5m2", Dtype::F8_E5M2),
    ("float8_e8m0fnu", Dtype::F8_E8M0),
    ("float16", Dtype::F16),
    ("bfloat16", Dtype::BF16),
    ("float32", Dtype::F32),
    ("float64", Dtype::F64),
];

fn dtype_of(name: &str) -> Option<Dtype> {
    DTYPES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
}

/// The name of an element type in an index; `None` for those that it cannot hold.
pub(super) fn dtype_name(dtype: Dtype) -> Option<&'static str> {
    DTYPES.iter().find(|(_, known)| *known == dtype).map(|(name, _)| *name)
}
