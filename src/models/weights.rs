//! From names of tensors to weights on a device: shapes are checked, pieces are stacked, experts get their place.

use std::{collections::BTreeSet, sync::Arc};

use freetoken_backend::{
    Backend, ExpertPool, ExpertRecord, ExpertWeights, Experts, Format, HostBytes, Matrix, Weight, os, record,
};

use super::ModelError;
use crate::{
    formats::{Dtype, FormatError},
    moe::ExpertBanks,
};

/// Where tensors come from: a checkpoint, or nothing but their names and shapes.
pub trait WeightSource {
    /// The tensor of this name, which must have this shape.
    ///
    /// # Errors
    /// [`TensorError`] when it is missing or has another shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError>;

    /// Whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;
}

/// A tensor that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// It is not there, or its file is broken.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// It has another shape than the configuration says.
    #[error(
        "tensor `{name}` has shape {found:?}, but config.json asks for {expected:?}: they do not belong together"
    )]
    Shape {
        /// Name.
        name: String,
        /// Shape in the file.
        found: Vec<usize>,
        /// Shape by the configuration.
        expected: Vec<usize>,
    },
    /// Its elements are of a type that this model has no use for.
    #[error("tensor `{name}` holds {found}; weights are BF16, F16 or F32")]
    Dtype {
        /// Name.
        name: String,
        /// Type in the file.
        found: Dtype,
    },
    /// Weights that one op multiplies differ in format.
    #[error(
        "tensors `{first}` and `{second}` are stored in different formats, {formats}: convert them to one"
    )]
    Mixed {
        /// One of them.
        first: String,
        /// The other.
        second: String,
        /// Their formats.
        formats: String,
    },
}

/// Where the routed experts of a model are once it is loaded.
#[derive(Debug)]
pub enum LoadedExperts {
    /// All of them on the device: one place for each MoE layer.
    Placed(Vec<Experts>),
    /// All of them in host memory, behind a cache that the engine makes.
    Banked(ExpertBanks),
}

/// Loads weights onto a device, and routed experts onto it or into host banks.
pub struct Weights<'a> {
    backend: &'a dyn Backend,
    source: &'a dyn WeightSource,
    used: BTreeSet<String>,
    experts: LoadedExperts,
    /// Name of the first tensor of an expert, for errors.
    first_expert: String,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Weights<'a> {
    /// Weights of `source` for `backend`, experts included; `progress` hears the bytes of each tensor.
    pub fn new(
        backend: &'a dyn Backend,
        source: &'a dyn WeightSource,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        let experts = LoadedExperts::Placed(Vec::new());
        Weights { backend, source, used: BTreeSet::new(), experts, first_expert: String::new(), progress }
    }

    /// Keeps the experts in host memory instead.
    pub fn with_banks(mut self) -> Self {
        self.experts = LoadedExperts::Banked(ExpertBanks::default());
        self
    }

    /// Where the experts of all MoE layers are.
    pub fn into_experts(self) -> LoadedExperts {
        self.experts
    }

    /// Names of the tensors that were asked for.
    pub fn used(&self) -> &BTreeSet<String> {
        &self.used
    }

    /// Whether the checkpoint has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    fn fetch(&mut self, name: &str, shape: &[usize]) -> Result<(Format, HostBytes), TensorError> {
        let (dtype, bytes) = self.source.tensor(name, shape)?;
        let format = format_of(name, dtype)?;
        self.used.insert(name.into());
        (self.progress)(bytes.len() as u64);
        Ok((format, bytes))
    }

    fn place(
        &self,
        format: Format,
        bytes: &HostBytes,
        rows: usize,
        cols: usize,
    ) -> Result<Weight, ModelError> {
        let buffer = if self.backend.caps().host_memory {
            self.backend.import(bytes)?
        } else {
            let buffer = self.backend.alloc(bytes.len())?;
            self.backend.write(&buffer.whole(), bytes.as_slice())?;
            buffer
        };
        Ok(Weight { view: buffer.whole(), format, rows, cols })
    }

    /// A matrix `[rows, cols]`.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let (format, bytes) = self.fetch(name, &[rows, cols])?;
        self.place(format, &bytes, rows, cols)
    }

    /// A vector `[n]`.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn vector(&mut self, name: &str, n: usize) -> Result<Weight, ModelError> {
        let (format, bytes) = self.fetch(name, &[n])?;
        self.place(format, &bytes, 1, n)
    }

    /// Matrices stacked by rows, `(name, rows)` each.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn stacked(&mut self, pieces: &[(String, usize)], cols: usize) -> Result<Matrix, ModelError> {
        let mut fetched = Vec::new();
        for (name, rows) in pieces {
            fetched.push((self.fetch(name, &[*rows, cols])?, *rows));
        }
        let format = fetched[0].0.0;
        for (((other, _), _), (name, _)) in fetched.iter().zip(pieces) {
            same_format(format, &pieces[0].0, *other, name)?;
        }
        if self.backend.caps().host_memory {
            let place = |((format, bytes), rows): &((Format, HostBytes), usize)| {
                self.place(*format, bytes, *rows, cols)
            };
            return Ok(Matrix::new(fetched.iter().map(place).collect::<Result<_, _>>()?));
        }
        let rows = pieces.iter().map(|(_, rows)| rows).sum();
        let view = self.backend.alloc(rows * format.row_bytes(cols))?.whole();
        let mut start = 0;
        for ((_, bytes), _) in &fetched {
            self.backend.write(&view.slice(start..start + bytes.len()), bytes.as_slice())?;
            start += bytes.len();
        }
        Ok(Weight { view, format, rows, cols }.into())
    }

    /// The routed experts of the next MoE layer, whose number it gives; `name(expert, "gate_proj")` gives the names of their
    /// tensors.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn experts(
        &mut self,
        n_experts: usize,
        hidden: usize,
        intermediate: usize,
        name: impl Fn(usize, &str) -> String,
    ) -> Result<usize, ModelError> {
        let mut first: Option<(Format, String)> = None;
        let mut fetched = Vec::new();
        for e in 0..n_experts {
            let mut of = |what: &str, shape: [usize; 2]| -> Result<HostBytes, TensorError> {
                let name = name(e, what);
                let (format, bytes) = self.fetch(&name, &shape)?;
                let (wanted, first) = first.get_or_insert_with(|| (format, name.clone()));
                same_format(*wanted, first, format, &name)?;
                Ok(bytes)
            };
            let up_shape = [intermediate, hidden];
            fetched.push([
                of("gate_proj", up_shape)?,
                of("up_proj", up_shape)?,
                of("down_proj", [hidden, intermediate])?,
            ]);
        }
        let (format, first) = first.expect("a layer has experts");
        if let LoadedExperts::Banked(banks) = &self.experts {
            if let Some(record) = banks.record() {
                same_format(record.format, &self.first_expert, format, &first)?;
            }
            let record = record(format, hidden, intermediate);
            let mut bank = self.backend.alloc_host(n_experts * record.bytes)?;
            for (matrices, place) in fetched.iter().zip(bank.as_mut_slice().chunks_exact_mut(record.bytes)) {
                assemble(&record, matrices, place);
                // What is copied need not stay in the page cache as well.
                matrices.iter().for_each(|matrix| os::drop_pages(matrix.as_slice()));
            }
            self.first_expert = first;
            let LoadedExperts::Banked(banks) = &mut self.experts else { unreachable!("matched above") };
            return Ok(banks.push(record, n_experts, bank));
        }
        let placed = if self.backend.caps().host_memory {
            let mut experts = Vec::new();
            for [gate, up, down] in &fetched {
                experts.push(ExpertWeights {
                    gate: self.place(format, gate, intermediate, hidden)?,
                    up: self.place(format, up, intermediate, hidden)?,
                    down: self.place(format, down, hidden, intermediate)?,
                });
            }
            Experts::InPlace(experts.into())
        } else {
            let pool = self.resident_pool(format, hidden, intermediate, &fetched)?;
            Experts::Pool { pool: Arc::new(pool), layer: 0 }
        };
        let LoadedExperts::Placed(layers) = &mut self.experts else { unreachable!("returned above") };
        layers.push(placed);
        Ok(layers.len() - 1)
    }

    /// All experts of a layer in slots of their own, each assembled into a record once.
    fn resident_pool(
        &self,
        format: Format,
        hidden: usize,
        intermediate: usize,
        experts: &[[HostBytes; 3]],
    ) -> Result<ExpertPool, ModelError> {
        let record = record(format, hidden, intermediate);
        let slots_per_chunk = (self.backend.caps().max_binding_bytes / record.bytes).clamp(1, experts.len());
        let mut chunks = Vec::new();
        for _ in 0..experts.len().div_ceil(slots_per_chunk) {
            chunks.push(self.backend.alloc(slots_per_chunk * record.bytes)?);
        }
        let table = self.backend.alloc(experts.len() * 4)?.whole();
        let slots: Vec<i32> = (0..experts.len() as i32).collect();
        self.backend.write(&table, bytemuck::cast_slice(&slots))?;
        let pool = ExpertPool {
            record,
            n_layers: 1,
            n_experts: experts.len(),
            chunks,
            slots_per_chunk,
            table,
            banks: Vec::new(),
        };
        let mut assembled = vec![0_u8; pool.record.bytes];
        for (slot, matrices) in experts.iter().enumerate() {
            assemble(&pool.record, matrices, &mut assembled);
            self.backend.write(&pool.slot(slot), &assembled)?;
        }
        Ok(pool)
    }
}

/// How a tensor of this type is multiplied.
pub(super) fn format_of(name: &str, dtype: Dtype) -> Result<Format, TensorError> {
    match dtype {
        Dtype::F32 => Ok(Format::F32),
        Dtype::BF16 => Ok(Format::Bf16),
        Dtype::F16 => Ok(Format::F16),
        found => Err(TensorError::Dtype { name: name.into(), found }),
    }
}

/// One record from the gate, up and down matrices of an expert.
fn assemble(record: &ExpertRecord, [gate, up, down]: &[HostBytes; 3], into: &mut [u8]) {
    into[record.gate()].copy_from_slice(gate.as_slice());
    into[record.up()].copy_from_slice(up.as_slice());
    into[record.down.clone()].copy_from_slice(down.as_slice());
}

fn same_format(format: Format, first: &str, other: Format, second: &str) -> Result<(), TensorError> {
    if format == other {
        return Ok(());
    }
    let formats = format!("{format} and {other}");
    Err(TensorError::Mixed { first: first.into(), second: second.into(), formats })
}
