//! What the seed system stacked, by the names that a Hugging Face checkpoint has: rows of fused projections, and the experts in
//! its banks.
//!
//! | `quant_format` | banks `[n_experts, rows, ..]` | read as |
//! |---|---|---|
//! | `bf16` | `gate_up`, `down` | `.weight` |
//! | `fp8_block` | the same, `_scale` for 128 x 128 | `.weight`, `.weight_scale_inv` |
//! | `nvfp4` | `_packed`, `_scale` for 16 columns, `_global` for each row | `.weight`, `.weight_scale`, `.weight_scale_2` |
//! | `ds_fp4` | `_packed`, `_scale` for 32 columns | `.weight`, `.scale` |
//!
//! Rows of `gate_up` are those of gate, then those of up. A bank is one entry a layer, `gate_up#L00000`, or one for all layers.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use ::safetensors::Dtype;

use super::{
    super::{
        error::{FormatError, shorten},
        quantised::FP8_BLOCK,
        safetensors::{byte_len, shown},
    },
    fault::{EntryFault, IndexFault},
    index::{Entry, Index, Kind, MAX_EXPERTS},
};

/// A tensor as a checkpoint has it: bytes of the region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<u64>,
}

/// A part of a matrix that has a bank of its own.
struct Part {
    /// Behind `gate_up` and `down`.
    bank: &'static str,
    /// Behind the name of a module.
    tensor: &'static str,
    /// In the index.
    stored: Dtype,
    /// In a checkpoint.
    dtype: Dtype,
    /// Rows of the matrix that share a row of the bank.
    rows: usize,
    /// Whether a row is one number, and the bank has no dimension for it.
    is_scalar: bool,
}

const fn part(bank: &'static str, tensor: &'static str, dtype: Dtype) -> Part {
    Part { bank, tensor, stored: dtype, dtype, rows: 1, is_scalar: false }
}

const BF16: &[Part] = &[part("", ".weight", Dtype::BF16)];
const FP8_BLOCKS: &[Part] = &[
    part("", ".weight", Dtype::F8_E4M3),
    Part { rows: FP8_BLOCK, ..part("_scale", ".weight_scale_inv", Dtype::BF16) },
];
const NVFP4: &[Part] = &[
    part("_packed", ".weight", Dtype::U8),
    part("_scale", ".weight_scale", Dtype::F8_E4M3),
    Part { is_scalar: true, ..part("_global", ".weight_scale_2", Dtype::F32) },
];
/// A checkpoint tells these codes from those of NVFP4 by their type.
const DS_FP4: &[Part] = &[
    Part { dtype: Dtype::I8, ..part("_packed", ".weight", Dtype::U8) },
    part("_scale", ".scale", Dtype::F8_E8M0),
];

/// The tensors of an index by the names that a Hugging Face checkpoint has for them. `label` is the index, for errors.
///
/// # Errors
/// [`FormatError`] for banks in a layout that is not read, that are incomplete, or that contradict each other.
pub(super) fn views(label: &str, index: &Index) -> Result<BTreeMap<String, View>, FormatError> {
    let wrong = |fault| FormatError::Index { file: label.to_string(), fault };
    let weights = || index.entries.iter().filter(|entry| entry.kind == Kind::Weight);
    let by_name: BTreeMap<&str, &Entry> = weights().map(|entry| (entry.name.as_str(), entry)).collect();
    let mut views = BTreeMap::new();
    for entry in weights() {
        // A source of ours may have tensors of these names by itself.
        let pieces = index.quant_format.as_ref().and_then(|_| fused(entry, &by_name));
        let pieces = pieces.unwrap_or_else(|| vec![(entry.name.clone(), rows(entry))]);
        let mut top = 0;
        for (name, rows) in pieces {
            if views.insert(name, rows_of(entry, top..top + rows)).is_some() {
                return Err(FormatError::entry(label, &entry.name, EntryFault::Twice));
            }
            top += rows;
        }
    }
    let banks: BTreeMap<&str, &Entry> = index
        .entries
        .iter()
        .filter(|entry| entry.kind == Kind::ExpertsBank)
        .map(|entry| (entry.name.as_str(), entry))
        .collect();
    if banks.is_empty() {
        return Ok(views);
    }
    let layout = index.quant_format.as_deref().unwrap_or("");
    let parts = match layout {
        _ if index.is_mixed => return Err(wrong(IndexFault::Layout { layout: "one format a layer".into() })),
        "bf16" => BF16,
        "fp8_block" => FP8_BLOCKS,
        "nvfp4" => NVFP4,
        "ds_fp4" => DS_FP4,
        other => return Err(wrong(IndexFault::Layout { layout: shorten(other) })),
    };
    let modules = expert_modules(by_name.keys().copied());
    let (n_layers, experts) = (modules.len(), index.n_bank_layers.unwrap_or(0));
    if n_layers as u64 != experts {
        return Err(wrong(IndexFault::Layers { experts, routers: n_layers }));
    }
    let banks = Banks { label, layout, parts, n_layers, entries: &banks };
    banks.check_names()?;
    let mut left = MAX_EXPERTS;
    for (layer, module) in modules.iter().enumerate() {
        banks.layer(layer, module, &mut left, &mut views)?;
    }
    Ok(views)
}

/// Rows of an entry: its first dimension, or one.
fn rows(entry: &Entry) -> usize {
    entry.shape.first().copied().unwrap_or(1)
}

/// Some rows of an entry as a tensor; all of them as it is.
fn rows_of(entry: &Entry, part: Range<usize>) -> View {
    let mut shape = entry.shape.clone();
    if let Some(first) = shape.first_mut() {
        *first = part.len();
    }
    let row_bytes = (entry.range.end - entry.range.start) / rows(entry).max(1) as u64;
    let at = |row: usize| entry.range.start + row as u64 * row_bytes;
    View { dtype: entry.dtype, shape, range: at(part.start)..at(part.end) }
}

/// The tensors that lie on top of each other in an entry and their rows, where it is one of those that the seed system fuses. That
/// q has as many rows as `o_proj` has columns tells where k begins.
fn fused(entry: &Entry, weights: &BTreeMap<&str, &Entry>) -> Option<Vec<(String, usize)>> {
    let (module, end) = entry.name.rsplit_once('.').filter(|(_, end)| matches!(*end, "weight" | "bias"))?;
    let named = |parts: &[(&str, usize)]| {
        let (stem, _) = module.rsplit_once('.').expect("the module below ends in a name of its own");
        parts.iter().map(|(part, rows)| (format!("{stem}.{part}.{end}"), *rows)).collect()
    };
    if module.ends_with(".gate_up_proj") {
        let half = rows(entry) / 2;
        return rows(entry).is_multiple_of(2).then(|| named(&[("gate_proj", half), ("up_proj", half)]));
    }
    let stem = module.strip_suffix(".qkv_proj")?;
    let q = *weights.get(format!("{stem}.o_proj.weight").as_str())?.shape.get(1)?;
    let kv = rows(entry).checked_sub(q).filter(|rows| rows.is_multiple_of(2))? / 2;
    Some(named(&[("q_proj", q), ("k_proj", kv), ("v_proj", kv)]))
}

/// Names of the modules that hold the experts of each MoE layer, in order: those beside a router.
fn expert_modules<'n>(names: impl Iterator<Item = &'n str>) -> Vec<String> {
    let layer = |name: &str| name.split_once(".layers.")?.1.split('.').next()?.parse::<u32>().ok();
    let routers = names.filter_map(|name| Some((layer(name)?, name.strip_suffix(".mlp.gate.weight")?)));
    let sorted: BTreeSet<(u32, &str)> = routers.collect();
    sorted.into_iter().map(|(_, stem)| format!("{stem}.mlp.experts")).collect()
}

/// The banks of an index.
struct Banks<'a> {
    label: &'a str,
    layout: &'a str,
    parts: &'static [Part],
    n_layers: usize,
    entries: &'a BTreeMap<&'a str, &'a Entry>,
}

impl Banks<'_> {
    fn wrong(&self, entry: &Entry, fault: EntryFault) -> FormatError {
        FormatError::entry(self.label, &entry.name, fault)
    }

    /// Refuses banks that no layer would ask for.
    fn check_names(&self) -> Result<(), FormatError> {
        let stems = ["gate_up", "down"];
        let known = |bank: &str| {
            stems.iter().any(|stem| self.parts.iter().any(|part| bank.strip_prefix(stem) == Some(part.bank)))
        };
        for entry in self.entries.values() {
            let (bank, layer) = match entry.name.split_once("#L") {
                Some((bank, digits)) => {
                    let is_number = digits.len() >= 5 && digits.bytes().all(|b| b.is_ascii_digit());
                    let layer = digits.parse().ok().filter(|_| is_number);
                    (bank, Some(layer.ok_or_else(|| self.wrong(entry, EntryFault::BankName))?))
                }
                None => (entry.name.as_str(), None),
            };
            if !known(bank) || (layer.is_some() && self.entries.contains_key(bank)) {
                return Err(self.wrong(entry, EntryFault::BankName));
            }
            if let Some(layer) = layer.filter(|&layer| layer >= self.n_layers) {
                return Err(self.wrong(entry, EntryFault::Layer { layer, n_layers: self.n_layers }));
            }
        }
        Ok(())
    }

    /// The bank of a layer: its shape without the layers, `[n_experts, ..]`, and its bytes.
    fn bank(
        &self,
        bank: &str,
        layer: usize,
        part: &Part,
    ) -> Result<(&Entry, Vec<usize>, Range<u64>), FormatError> {
        let name = format!("{bank}{}#L{layer:05}", part.bank);
        let flat = format!("{bank}{}", part.bank);
        let (entry, of) = match (self.entries.get(name.as_str()), self.entries.get(flat.as_str())) {
            (Some(entry), _) => (*entry, 1),
            (None, Some(entry)) => (*entry, self.n_layers),
            (None, None) => {
                let fault = IndexFault::MissingBank { bank: name, layout: self.layout.to_string() };
                return Err(FormatError::Index { file: self.label.to_string(), fault });
            }
        };
        if entry.dtype != part.stored {
            let layout = self.layout.to_string();
            let fault = EntryFault::BankDtype { found: entry.dtype, expected: part.stored, layout };
            return Err(self.wrong(entry, fault));
        }
        let n_dims = if part.is_scalar { 2 } else { 3 };
        let is_good = entry.shape.len() == n_dims && !entry.shape.contains(&0);
        if !is_good || !entry.shape[0].is_multiple_of(of) {
            let expected = format!("{n_dims} dimensions, the first of them a multiple of {of}");
            return Err(self.shape(entry, expected));
        }
        let n_experts = entry.shape[0] / of;
        let place = if of == 1 { 0 } else { layer };
        let mut shape = entry.shape.clone();
        shape[0] = n_experts;
        Ok((entry, shape, rows_of(entry, place * n_experts..(place + 1) * n_experts).range))
    }

    fn shape(&self, entry: &Entry, expected: String) -> FormatError {
        self.wrong(entry, EntryFault::BankShape { found: shown(&entry.shape), expected })
    }

    /// Adds the experts of a layer.
    fn layer(
        &self,
        layer: usize,
        module: &str,
        left: &mut u64,
        views: &mut BTreeMap<String, View>,
    ) -> Result<(), FormatError> {
        let mut n_experts = None;
        for (bank, projections) in [("gate_up", &["gate_proj", "up_proj"][..]), ("down", &["down_proj"])] {
            let (_, codes, _) = self.bank(bank, layer, &self.parts[0])?;
            let matrix_rows = codes[1] / projections.len();
            for part in self.parts {
                let (entry, shape, range) = self.bank(bank, layer, part)?;
                let experts = *n_experts.get_or_insert(shape[0]);
                let expected_rows = projections.len() * matrix_rows.div_ceil(part.rows);
                // A block of rows that is half gate and half up has one scale for both, which no cut gives back.
                let is_cut = projections.len() > 1 && !matrix_rows.is_multiple_of(part.rows);
                if shape[0] != experts
                    || shape[1] != expected_rows
                    || codes[1] != matrix_rows * projections.len()
                    || is_cut
                {
                    return Err(self.shape(entry, format!("[{experts}, {expected_rows}, ..]")));
                }
                if bank == "gate_up" && part.bank == self.parts[0].bank {
                    *left = left.checked_sub(experts as u64).ok_or_else(|| FormatError::Index {
                        file: self.label.to_string(),
                        fault: IndexFault::Experts { found: MAX_EXPERTS + 1, limit: MAX_EXPERTS },
                    })?;
                }
                let piece_rows = expected_rows / projections.len();
                let mut piece = vec![piece_rows];
                piece.extend(&shape[2..]);
                let bytes =
                    byte_len(part.dtype, &piece).expect("a part of a shape whose size is known") as u64;
                let names =
                    (0..experts).flat_map(|e| projections.iter().map(move |projection| (e, projection)));
                for (i, (e, projection)) in names.enumerate() {
                    let start = range.start + i as u64 * bytes;
                    let view = View { dtype: part.dtype, shape: piece.clone(), range: start..start + bytes };
                    if views.insert(format!("{module}.{e}.{projection}{}", part.tensor), view).is_some() {
                        return Err(self.wrong(entry, EntryFault::Twice));
                    }
                }
            }
        }
        Ok(())
    }
}
