//! Quantised weights in checkpoints: which tensors make one, what may be in them, and how they become the rows of [`Format`].
//!
//! | codes | scales | global | read as | written by |
//! |---|---|---|---|---|
//! | `.weight` F8_E4M3 `[rows, cols]` | `.weight_scale_inv`, one for 128 x 128 | | fp8 | DeepSeek V3, Qwen3 |
//! | the same | `.scale`, one for 128 x 128 | | fp8 | DeepSeek V4 |
//! | the same | `.weight_scale`, one, or one a row | | fp8 | ModelOpt, compressed-tensors |
//! | `.weight` U8 `[rows, cols / 2]` | `.weight_scale` F8_E4M3 | `.weight_scale_2` | nvfp4 | ModelOpt |
//! | `.weight_packed` U8 | `.weight_scale` F8_E4M3 | 1 / `.weight_global_scale` | nvfp4 | compressed-tensors |
//! | `.weight_packed` U8 | `.weight_scale` U8 | | mxfp4 | compressed-tensors |
//! | `.weight` I8 | `.scale` F8_E8M0 | | mxfp4 | DeepSeek V4 |
//!
//! A global is one number, or one for each row, as the seed system has it.
//! Codes, and scales of 4-bit codes, are used as they lie in the file. Scales of fp8 are spread: each row gets its own.

use std::{fmt, ops::Range, sync::Arc};

use freetoken_backend::{ExpertRecord, Format, HostBytes, e8m0};
use half::{bf16, f16};

use super::{Dtype, write::TensorSpec};

/// Rows and columns of a block that has one scale.
pub const FP8_BLOCK: usize = 128;

/// A matrix in host memory, its parts where they happen to lie.
#[derive(Debug, Clone)]
pub struct HostMatrix {
    /// How it is stored.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// `[rows, format.row_bytes(cols)]`
    pub codes: HostBytes,
    /// `[rows, format.scale_row_bytes(cols)]`, where the format has groups.
    pub scales: Option<HostBytes>,
    /// f32 `[rows]`, where the format has a global factor.
    pub globals: Option<HostBytes>,
}

impl HostMatrix {
    /// Its rows in another order, copied.
    pub fn reordered(&self, order: &[Range<usize>]) -> Self {
        let copied = |from: &HostBytes, row_bytes: usize| {
            let mut copy = Vec::with_capacity(from.len());
            for rows in order {
                copy.extend_from_slice(&from.as_slice()[rows.start * row_bytes..rows.end * row_bytes]);
            }
            copy.into_host()
        };
        let (format, cols) = (self.format, self.cols);
        HostMatrix {
            format,
            rows: order.iter().map(ExactSizeIterator::len).sum(),
            cols,
            codes: copied(&self.codes, format.row_bytes(cols)),
            scales: self.scales.as_ref().map(|scales| copied(scales, format.scale_row_bytes(cols))),
            globals: self.globals.as_ref().map(|globals| copied(globals, size_of::<f32>())),
        }
    }
}

/// What is wrong with a quantised weight.
#[derive(Debug, thiserror::Error)]
pub enum QuantisedError {
    /// A width that no group divides.
    #[error(
        "tensor `{name}` has rows of {cols} columns, and {format} takes whole groups of {group}: config.json and the weights \
         do not belong together"
    )]
    Columns {
        /// Name of the codes.
        name: String,
        /// By the configuration.
        cols: usize,
        /// Format of the codes.
        format: Format,
        /// Its group.
        group: usize,
    },
    /// Scales of a type that no scheme has.
    #[error(
        "tensor `{name}` holds {found}, and scales of {format} weights are {expected}: export the checkpoint again"
    )]
    Dtype {
        /// Name of the scales.
        name: String,
        /// Type in the file.
        found: Dtype,
        /// Format of the weight.
        format: Format,
        /// Types that are read.
        expected: &'static str,
    },
    /// A scale that is no positive number.
    #[error(
        "tensor `{name}` holds {value} at place {place}, and scales are positive numbers: download the file again"
    )]
    Value {
        /// Name of the scales.
        name: String,
        /// The value.
        value: f32,
        /// Its place among the elements.
        place: usize,
    },
}

/// How a checkpoint stores one quantised weight: endings of its tensors' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scheme {
    /// What it is read as.
    pub format: Format,
    codes: &'static str,
    scales: &'static str,
    global: Option<Global>,
}

/// One number for the whole tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Global {
    /// Multiplies.
    Factor(&'static str),
    /// Divides.
    Divisor(&'static str),
}

impl Scheme {
    /// How the weight of a module is stored, by the types of the tensors there are; `None` where `.weight` is all there is to it.
    pub fn find(module: &str, dtype: impl Fn(&str) -> Option<Dtype>) -> Option<Self> {
        let dtype = |end: &str| dtype(&format!("{module}{end}"));
        let scheme = |format, codes, scales, global| Some(Scheme { format, codes, scales, global });
        if dtype(".weight_packed").is_some() {
            let mxfp4 = matches!(dtype(".weight_scale"), Some(Dtype::U8 | Dtype::F8_E8M0));
            return match mxfp4 {
                true => scheme(Format::Mxfp4, ".weight_packed", ".weight_scale", None),
                false => {
                    let global = Some(Global::Divisor(".weight_global_scale"));
                    scheme(Format::Nvfp4, ".weight_packed", ".weight_scale", global)
                }
            };
        }
        match dtype(".weight")? {
            Dtype::U8 => {
                scheme(Format::Nvfp4, ".weight", ".weight_scale", Some(Global::Factor(".weight_scale_2")))
            }
            Dtype::I8 => scheme(Format::Mxfp4, ".weight", ".scale", None),
            Dtype::F8_E4M3 => {
                let known = [".scale", ".weight_scale"].into_iter().find(|end| dtype(end).is_some());
                scheme(Format::Fp8, ".weight", known.unwrap_or(".weight_scale_inv"), None)
            }
            _ => None,
        }
    }

    /// Brings the tensors of a module together. `fetch` gives the tensor of a name in the first of the shapes that it has there;
    /// `blank` says that it gives zeros in place of all values, which are then not looked at.
    ///
    /// # Errors
    /// What `fetch` answers, and [`QuantisedError`].
    pub fn matrix<E: From<QuantisedError>>(
        self,
        module: &str,
        [rows, cols]: [usize; 2],
        blank: bool,
        mut fetch: impl FnMut(&str, &[Vec<usize>]) -> Result<(TensorSpec, HostBytes), E>,
    ) -> Result<HostMatrix, E> {
        let format = self.format;
        let name = |end: &str| format!("{module}{end}");
        let group = format.group().expect("a format with scales");
        if !format.takes_cols(cols) {
            return Err(QuantisedError::Columns { name: name(self.codes), cols, format, group }.into());
        }
        let (_, codes) = fetch(&name(self.codes), &[vec![rows, format.row_bytes(cols)]])?;
        let groups = cols.div_ceil(group);
        let whole = [vec![], vec![1]];
        let shapes = match format {
            Format::Fp8 => {
                let blocks = vec![rows.div_ceil(FP8_BLOCK), groups];
                [&[blocks][..], &whole, &[vec![rows], vec![rows, 1]]].concat()
            }
            _ => vec![vec![rows, groups]],
        };
        let (spec, scales) = fetch(&name(self.scales), &shapes)?;
        let scales = match format {
            Format::Fp8 if blank => vec![0; rows * format.scale_row_bytes(cols)].into_host(),
            Format::Fp8 => {
                spread(&spec.shape, rows, groups, &factors(&spec, scales.as_slice(), format)?).into_host()
            }
            _ => {
                check_scale_codes(&spec, scales.as_slice(), format, blank)?;
                scales
            }
        };
        let globals = match self.global {
            None => None,
            Some(Global::Factor(end) | Global::Divisor(end)) => {
                let (spec, values) = fetch(&name(end), &[&whole[..], &[vec![rows]]].concat())?;
                let mut globals = if blank { vec![1.0] } else { factors(&spec, values.as_slice(), format)? };
                if self.global == Some(Global::Divisor(end)) {
                    globals.iter_mut().for_each(|value| *value = 1.0 / *value);
                }
                if globals.len() == 1 {
                    globals = vec![globals[0]; rows];
                }
                Some(globals.into_host())
            }
        };
        Ok(HostMatrix { format, rows, cols, codes, scales: Some(scales), globals })
    }
}

/// The tensors that a matrix is in a checkpoint.
pub fn tensors(format: Format, module: &str, [rows, cols]: [usize; 2]) -> Vec<TensorSpec> {
    let spec = |end: &str, dtype: Dtype, shape: &[usize]| TensorSpec {
        name: format!("{module}{end}"),
        dtype,
        shape: shape.to_vec(),
    };
    let groups = cols.div_ceil(format.group().unwrap_or(1));
    match format {
        Format::F32 => vec![spec(".weight", Dtype::F32, &[rows, cols])],
        Format::Bf16 => vec![spec(".weight", Dtype::BF16, &[rows, cols])],
        Format::F16 => vec![spec(".weight", Dtype::F16, &[rows, cols])],
        Format::Fp8 => vec![
            spec(".weight", Dtype::F8_E4M3, &[rows, cols]),
            spec(".weight_scale_inv", Dtype::F32, &[rows.div_ceil(FP8_BLOCK), groups]),
        ],
        Format::Nvfp4 => vec![
            spec(".weight", Dtype::U8, &[rows, cols / 2]),
            spec(".weight_scale", Dtype::F8_E4M3, &[rows, groups]),
            spec(".weight_scale_2", Dtype::F32, &[]),
        ],
        Format::Mxfp4 => vec![
            spec(".weight_packed", Dtype::U8, &[rows, cols / 2]),
            spec(".weight_scale", Dtype::U8, &[rows, groups]),
        ],
    }
}

/// Refuses the record of an expert, `module` in a checkpoint, whose scales are wrong. Allocates for one that is wrong alone.
///
/// # Errors
/// [`QuantisedError::Value`].
pub fn check_record(
    record: &ExpertRecord,
    bytes: &[u8],
    module: &dyn fmt::Display,
) -> Result<(), QuantisedError> {
    let format = record.format;
    for (projection, banks) in
        [("gate_proj", record.gate()), ("up_proj", record.up()), ("down_proj", record.down.clone())]
    {
        let (scales, globals) = (&bytes[banks.scales], &bytes[banks.globals]);
        if are_right(format, scales, globals) {
            continue;
        }
        let spec = |end: &str, dtype| TensorSpec {
            name: format!("{module}.{projection}{end}"),
            dtype,
            shape: Vec::new(),
        };
        match format {
            Format::F32 | Format::Bf16 | Format::F16 => {}
            Format::Fp8 => drop(factors(&spec(".weight_scale", Dtype::F32), scales, format)?),
            Format::Nvfp4 => {
                check_scale_codes(&spec(".weight_scale", Dtype::F8_E4M3), scales, format, false)?;
                factors(&spec(".weight_scale_2", Dtype::F32), globals, format)?;
            }
            Format::Mxfp4 => check_scale_codes(&spec(".weight_scale", Dtype::U8), scales, format, false)?,
        }
    }
    Ok(())
}

/// Whether scales and globals of a record are what they may be.
fn are_right(format: Format, scales: &[u8], globals: &[u8]) -> bool {
    let are_factors = |bytes: &[u8]| {
        let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        values.all(is_factor)
    };
    match format {
        Format::F32 | Format::Bf16 | Format::F16 => true,
        Format::Fp8 => are_factors(scales),
        Format::Nvfp4 | Format::Mxfp4 => {
            scales.iter().all(|&code| code <= largest_scale(format)) && are_factors(globals)
        }
    }
}

fn is_factor(value: f32) -> bool {
    value.is_finite() && value > 0.0
}

/// The codes above are negative or no number.
fn largest_scale(format: Format) -> u8 {
    if format == Format::Nvfp4 { 0x7e } else { 0xfe }
}

/// Numbers that an allocation holds, as bytes.
struct Owned<T>(Vec<T>);

impl<T: bytemuck::NoUninit> AsRef<[u8]> for Owned<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

trait IntoHost {
    fn into_host(self) -> HostBytes;
}

impl<T: bytemuck::NoUninit + Send + Sync> IntoHost for Vec<T> {
    fn into_host(self) -> HostBytes {
        HostBytes::new(Arc::new(Owned(self)))
    }
}

/// Each element as a number, which must be finite and positive.
fn factors(spec: &TensorSpec, bytes: &[u8], format: Format) -> Result<Vec<f32>, QuantisedError> {
    let words = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    let values: Vec<f32> = match spec.dtype {
        Dtype::F32 => bytemuck::allocation::pod_collect_to_vec(bytes),
        Dtype::BF16 => words().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => words().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F8_E8M0 => bytes.iter().map(|&code| e8m0(code)).collect(),
        found => {
            let expected = "F32, BF16, F16 or F8_E8M0";
            return Err(QuantisedError::Dtype { name: spec.name.clone(), found, format, expected });
        }
    };
    match values.iter().position(|value| !is_factor(*value)) {
        Some(place) => Err(QuantisedError::Value { name: spec.name.clone(), value: values[place], place }),
        None => Ok(values),
    }
}

/// Refuses scales that are no number or negative. Zero is one: writers round the scale of a group of very small weights to it.
fn check_scale_codes(
    spec: &TensorSpec,
    bytes: &[u8],
    format: Format,
    blank: bool,
) -> Result<(), QuantisedError> {
    let name = || spec.name.clone();
    let (is_known, expected) = match format {
        Format::Nvfp4 => (spec.dtype == Dtype::F8_E4M3, "F8_E4M3"),
        _ => (matches!(spec.dtype, Dtype::U8 | Dtype::F8_E8M0), "U8 or F8_E8M0"),
    };
    if !is_known {
        return Err(QuantisedError::Dtype { name: name(), found: spec.dtype, format, expected });
    }
    match bytes.iter().position(|&code| code > largest_scale(format)) {
        Some(place) if !blank => {
            let value = format.scale(bytes, place);
            Err(QuantisedError::Value { name: name(), value, place })
        }
        _ => Ok(()),
    }
}

/// f32 `[rows, groups]` from scales of blocks, of rows, or of the whole matrix.
fn spread(shape: &[usize], rows: usize, groups: usize, scales: &[f32]) -> Vec<f32> {
    let n_down = shape.first().copied().unwrap_or(1);
    let n_across = scales.len() / n_down.max(1);
    let rows_of_one = if n_down == rows {
        1
    } else if n_down == 1 {
        rows
    } else {
        FP8_BLOCK
    };
    let across = |row: usize| &scales[row / rows_of_one * n_across..][..n_across];
    (0..rows)
        .flat_map(|row| (0..groups).map(move |group| across(row)[if n_across == 1 { 0 } else { group }]))
        .collect()
}

/// Weights that a tensor stands for: two a byte of 4-bit codes, none in what belongs to another tensor.
pub fn n_weights(tensor: &TensorSpec) -> u64 {
    let elements = tensor.shape.iter().map(|&n| n as u64).product();
    match tensor.dtype {
        _ if is_scale(&tensor.name) => 0,
        Dtype::U8 | Dtype::I8 => 2 * elements,
        _ => elements,
    }
}

fn is_scale(name: &str) -> bool {
    [".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".scale"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// Whether a tensor is for activations or caches of 8 or 4 bits, which nothing here has.
pub fn is_left_aside(name: &str) -> bool {
    [".input_scale", ".input_global_scale", ".q_scale", ".k_scale", ".v_scale", ".prob_scale"]
        .iter()
        .any(|end| name.ends_with(end))
}
