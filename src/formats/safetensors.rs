//! One safetensors file: its header is checked as a whole before any tensor is handed out.
//!
//! Source of the layout: <https://github.com/huggingface/safetensors#format>. Element types and header entries are
//! the `safetensors` crate's; the checks are ours, since the crate accepts a repeated tensor name, does not look at
//! alignment, and mostly does not say which tensor is wrong. This file knows no checkpoint and no architecture.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use ::safetensors::Dtype;
use ::safetensors::tensor::TensorInfo;
use freetoken_backend::HostBytes;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::error::{FormatError, HeaderFault, TensorFault, shorten};
use super::json::{self, UniqueMap};
use super::mapped::MappedFile;
use super::read::{LazyFile, place_in};

/// The longest header that the format allows, in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Bytes of the little-endian header length that opens the file.
const LENGTH_BYTES: usize = 8;
/// The header key that is not a tensor.
pub(super) const METADATA_KEY: &str = "__metadata__";

/// One tensor: what it is and where its bytes lie in host memory.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Its name in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first; the product of the non-zero ones does not overflow.
    pub shape: Vec<usize>,
    /// Little-endian elements in row-major order, exactly as many as `dtype` and `shape` say, at an address that is a
    /// multiple of the element size.
    pub bytes: HostBytes,
}

/// Where one tensor lies in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

/// One safetensors file in host memory, checked.
#[derive(Debug)]
pub struct Shard {
    label: String,
    bytes: HostBytes,
    entries: BTreeMap<String, Entry>,
    /// The same file for reads past the mapping; `None` where it is embedded.
    file: Option<LazyFile>,
}

impl Shard {
    /// Maps and checks the file at `path`.
    ///
    /// # Errors
    /// Those of [`MappedFile::open`] and [`parse`].
    pub fn open(path: &Path) -> Result<Self, FormatError> {
        let file = Some(LazyFile::new(path));
        Self::check(path.display().to_string(), HostBytes::new(MappedFile::open(path)?), file)
    }

    /// Checks a file embedded in the binary; `label` names it in errors.
    ///
    /// # Errors
    /// Those of [`parse`].
    ///
    /// # Panics
    /// If `bytes` does not start at a multiple of 8 bytes, which tensors promise: embed it in an aligned static.
    pub fn from_static(label: String, bytes: &'static [u8]) -> Result<Self, FormatError> {
        assert!(bytes.as_ptr().cast::<u64>().is_aligned(), "{label} is embedded at an unaligned address");
        Self::check(label, HostBytes::from_static(bytes), None)
    }

    fn check(label: String, bytes: HostBytes, file: Option<LazyFile>) -> Result<Self, FormatError> {
        let entries = parse(&label, bytes.as_slice())?;
        Ok(Self { label, bytes, entries, file })
    }

    /// The file that these bytes are mapped from and their place in it, if this is it.
    pub(super) fn locate(&self, bytes: &HostBytes) -> Option<(&LazyFile, u64)> {
        let file = self.file.as_ref()?;
        Some((file, place_in(&self.bytes, bytes)?))
    }

    /// The path or label.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Its tensors by name, in order.
    pub fn entries(&self) -> &BTreeMap<String, Entry> {
        &self.entries
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<Tensor> {
        let Entry { dtype, shape, range } = self.entries.get(name)?;
        let bytes = self.bytes.slice(range.clone());
        Some(Tensor { name: name.to_string(), dtype: *dtype, shape: shape.clone(), bytes })
    }
}

/// Checks the file whose content is `bytes` and lists its tensors by name. On success the ranges are in bounds,
/// disjoint, aligned to their elements, sized as their shapes say, and cover all that follows the header.
///
/// # Errors
/// [`FormatError`] naming `label` and the tensor that breaks a rule.
pub fn parse(label: &str, bytes: &[u8]) -> Result<BTreeMap<String, Entry>, FormatError> {
    let header_error = |fault| FormatError::Header { file: label.to_string(), fault };
    let (header, data) = split(bytes).map_err(header_error)?;
    let data_start = LENGTH_BYTES + header.len();
    let Header(mut tensors) = json::parse(&format!("the header of {label}"), header)?;
    tensors.sort_by_key(|(_, info)| info.data_offsets);

    let mut previous_end = 0;
    for (name, info) in &tensors {
        check_entry(info, previous_end, data_start, data.len())
            .map_err(|fault| FormatError::tensor(label, name, fault))?;
        previous_end = info.data_offsets.1;
    }
    if previous_end < data.len() {
        return Err(header_error(HeaderFault::Trailing { bytes: data.len() - previous_end }));
    }

    let entry = |TensorInfo { dtype, shape, data_offsets: (begin, end) }| {
        let range = data_start + begin..data_start + end;
        Entry { dtype, shape, range }
    };
    Ok(tensors.into_iter().map(|(name, info)| (name, entry(info))).collect())
}

/// Header text and tensor data.
fn split(bytes: &[u8]) -> Result<(&[u8], &[u8]), HeaderFault> {
    let (length, rest) =
        bytes.split_first_chunk::<LENGTH_BYTES>().ok_or(HeaderFault::Short { bytes: bytes.len() })?;
    let length = u64::from_le_bytes(*length);
    if length == 0 {
        return Err(HeaderFault::Zero);
    }
    if length > MAX_HEADER_BYTES {
        return Err(HeaderFault::TooLong { bytes: length });
    }
    let length = length as usize;
    rest.split_at_checked(length).ok_or(HeaderFault::Beyond { bytes: length, left: rest.len() })
}

fn check_entry(
    info: &TensorInfo,
    previous_end: usize,
    data_start: usize,
    data_bytes: usize,
) -> Result<(), TensorFault> {
    let TensorInfo { dtype, ref shape, data_offsets: (begin, end) } = *info;
    let expected = byte_len(dtype, shape)?;
    if end < begin {
        return Err(TensorFault::Reversed { begin, end });
    }
    if end > data_bytes {
        return Err(TensorFault::Beyond { end, data_bytes });
    }
    if end - begin != expected {
        let bytes = (end - begin) as u64;
        return Err(TensorFault::Size { bytes, expected, dtype, shape: shown(shape) });
    }
    if begin < previous_end {
        return Err(TensorFault::Overlap { begin, previous_end });
    }
    if begin > previous_end {
        return Err(TensorFault::Gap { begin, previous_end });
    }
    let (offset, element_bytes) = (data_start + begin, (dtype.bitsize() / 8).max(1));
    if !offset.is_multiple_of(element_bytes) {
        return Err(TensorFault::Misaligned { offset, element_bytes });
    }
    Ok(())
}

/// Bytes of a tensor. Zero dimensions count as one until the end, so that later products of a part of the shape
/// cannot overflow either.
pub(super) fn byte_len(dtype: Dtype, shape: &[usize]) -> Result<usize, TensorFault> {
    let bits = shape
        .iter()
        .try_fold(dtype.bitsize(), |bits, &n| bits.checked_mul(n.max(1)))
        .ok_or_else(|| TensorFault::Overflow { shape: shown(shape) })?;
    if shape.contains(&0) {
        return Ok(0);
    }
    if !bits.is_multiple_of(8) {
        return Err(TensorFault::PartByte { dtype, shape: shown(shape) });
    }
    Ok(bits / 8)
}

/// A shape for a sentence; at most its first eight dimensions.
pub(super) fn shown(shape: &[usize]) -> String {
    match shape.get(..8) {
        Some(first) if shape.len() > 8 => format!("{first:?} and {} more", shape.len() - 8),
        _ => format!("{shape:?}"),
    }
}

/// The header's tensors in file order; names are unique, nothing else is checked yet.
struct Header(Vec<(String, TensorInfo)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Header, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut has_metadata = false;
        while let Some(name) = object.next_key::<String>()? {
            if tensors.contains_key(&name) || (has_metadata && name == METADATA_KEY) {
                return Err(json::repeated_key(&shorten(&name)));
            }
            if name == METADATA_KEY {
                has_metadata = true;
                object.next_value::<UniqueMap<String>>()?;
                continue;
            }
            let info = object
                .next_value::<TensorInfo>()
                .map_err(|error| de::Error::custom(format_args!("tensor `{}`: {error}", shorten(&name))))?;
            tensors.insert(name, info);
        }
        Ok(Header(tensors.into_iter().collect()))
    }
}
