//! From names of tensors to weights on a device: shapes are checked, pieces are stacked, experts get their place.

use std::{borrow::Cow, collections::BTreeSet, ops::Range, sync::Arc};

use freetoken_backend::{
    Backend, Banks, ExpertPool, ExpertRecord, ExpertWeights, Experts, Format, HostBytes, Matrix, Weight, os,
    record,
};
use half::{bf16, f16};

use super::{
    ModelError,
    stored_experts::{StoredExperts, StoredLayer},
};
use crate::{
    formats::{
        Checkpoint, Dtype, FormatError,
        ftw::Records,
        quantised::{HostMatrix, QuantisedError, Scheme, check_record},
        read::{self, Transfer},
        write::TensorSpec,
    },
    moe::ExpertBanks,
};

/// Bytes of records that are read at once on their way to a device.
const STAGING_BYTES: usize = 64 << 20;

/// Where tensors come from: a checkpoint, or nothing but their names and shapes.
pub trait WeightSource {
    /// The tensor of this name, which must have this shape.
    ///
    /// # Errors
    /// [`TensorError`] when it is missing or has another shape.
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError>;

    /// Type and shape of the tensor of this name, if there is one.
    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)>;

    /// The routed experts of the MoE layer of that number, where the source keeps each as one record; their tensors then have no
    /// names.
    fn records(&self, _moe_layer: usize) -> Option<Records<'_>> {
        None
    }

    /// Copies bytes of tensors that it gave, in whatever way is fastest.
    ///
    /// # Errors
    /// [`TensorError`] for bytes that cannot be read.
    fn transfer(&self, transfers: Vec<Transfer<'_>>) -> Result<(), TensorError> {
        read::copy(transfers);
        Ok(())
    }

    /// The files that it is, for experts that are read while the model runs; `None` where it is none.
    fn files(&self) -> Option<Checkpoint> {
        None
    }

    /// Whether all values are zeros that stand for others, which nobody should judge.
    fn is_blank(&self) -> bool {
        false
    }
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
    /// A part of a quantised weight is wrong.
    #[error(transparent)]
    Quantised(#[from] QuantisedError),
    /// Its elements are of a type that this model has no use for.
    #[error("tensor `{name}` holds {found}; this weight must be BF16, F16 or F32")]
    Dtype {
        /// Name.
        name: String,
        /// Type in the file.
        found: Dtype,
    },
    /// Records of experts that are not those of the configuration.
    #[error("`{module}` holds {found}, but config.json asks for {expected}: they do not belong together")]
    Records {
        /// The experts of a layer.
        module: String,
        /// What they are.
        found: String,
        /// By the configuration.
        expected: String,
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
    /// All of them in host memory, or a disk below it, behind a cache that the engine makes.
    Banked(ExpertBanks),
}

/// How the checkpoints of a family write what models ask for under one name.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spelling {
    /// Names that begin with `model.` begin with `model.language_model.`
    pub nested: bool,
    /// Weights of norms are stored less one.
    pub norms_less_one: bool,
}

/// Takes the routed experts of a model as they are loaded, layer by layer.
pub trait RecordSink {
    /// Whether it has no use for the experts of this MoE layer, which are then not loaded.
    fn has(&self, moe_layer: usize) -> bool;

    /// Takes the records of a layer, one behind the other. `first` is the name of a tensor of the first, or of their module.
    ///
    /// # Errors
    /// [`TensorError`] for what it cannot keep.
    fn take(
        &mut self,
        moe_layer: usize,
        record: &ExpertRecord,
        first: &str,
        records: &[u8],
    ) -> Result<(), TensorError>;
}

/// What is known of experts that stay on the disk.
struct Stored {
    files: Checkpoint,
    /// Of each MoE layer.
    n_records: Vec<usize>,
    layers: Vec<StoredLayer>,
}

/// Loads weights onto a device, and routed experts onto it or into host banks.
pub struct Weights<'a> {
    backend: &'a dyn Backend,
    source: &'a dyn WeightSource,
    spelling: Spelling,
    used: BTreeSet<String>,
    experts: LoadedExperts,
    /// MoE layers so far.
    n_moe_layers: usize,
    /// Experts that stay where they are, in banks with so many records each.
    stored: Option<Stored>,
    /// Where banks go as soon as they are filled, instead of to `experts`.
    sink: Option<&'a mut dyn RecordSink>,
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
        Weights {
            backend,
            source,
            spelling: Spelling::default(),
            used: BTreeSet::new(),
            experts,
            n_moe_layers: 0,
            stored: None,
            sink: None,
            first_expert: String::new(),
            progress,
        }
    }

    /// Looks for tensors as another spelling has them.
    pub fn spell(&mut self, spelling: Spelling) {
        self.spelling = spelling;
    }

    /// The name of a tensor in the checkpoint.
    fn spelled<'n>(&self, name: &'n str) -> Cow<'n, str> {
        match name.strip_prefix("model.").filter(|_| self.spelling.nested) {
            Some(rest) => format!("model.language_model.{rest}").into(),
            None => name.into(),
        }
    }

    /// Keeps the experts in host memory instead.
    pub fn with_banks(mut self) -> Self {
        self.experts = LoadedExperts::Banked(ExpertBanks::default());
        self
    }

    /// Keeps the experts on the disk: banks in host memory have room for so many of each MoE layer. Asserts that the source is files.
    pub fn with_part_in_banks(mut self, n_records: Vec<usize>) -> Self {
        let files = self.source.files().expect("experts that stay on the disk are in files");
        self.stored = Some(Stored { files, n_records, layers: Vec::new() });
        self.with_banks()
    }

    /// Hands the experts of each layer over in host memory, and keeps none.
    pub fn with_sink(mut self, sink: &'a mut dyn RecordSink) -> Self {
        self.sink = Some(sink);
        self.with_banks()
    }

    /// Where the experts of all MoE layers are.
    pub fn into_experts(mut self) -> LoadedExperts {
        if let (LoadedExperts::Banked(banks), Some(Stored { files, layers, .. })) =
            (&mut self.experts, self.stored)
            && let Some(record) = banks.record().cloned()
        {
            let n_experts = banks.n_experts();
            banks.set_source(Arc::new(StoredExperts { files, record, n_experts, layers }));
        }
        self.experts
    }

    /// Names of the tensors that were asked for.
    pub fn used(&self) -> &BTreeSet<String> {
        &self.used
    }

    /// Whether the checkpoint has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.source.spec(&self.spelled(name)).is_some()
    }

    /// Whether two matrices are stored in one format, so that they may be stacked.
    pub fn are_alike(&self, a: &str, b: &str) -> bool {
        let dtype = |name: &str| self.source.spec(name).map(|(dtype, _)| dtype);
        let stored = |name: &str| {
            let name = self.spelled(name);
            let scheme = Scheme::find(name.strip_suffix(".weight")?, dtype);
            Some((scheme.map(|scheme| scheme.format), dtype(&name).filter(|_| scheme.is_none())))
        };
        stored(a) == stored(b)
    }

    fn fetch(&mut self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let (dtype, bytes) = self.source.tensor(name, shape)?;
        self.used.insert(name.into());
        (self.progress)(bytes.len() as u64);
        Ok((dtype, bytes))
    }

    /// A matrix that is codes only.
    fn fetch_plain(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
        shape: &[usize],
    ) -> Result<HostMatrix, TensorError> {
        let (dtype, codes) = self.fetch(name, shape)?;
        Ok(HostMatrix { format: format_of(name, dtype)?, rows, cols, codes, scales: None, globals: None })
    }

    /// A matrix of any format. `name` is that of the weight; a quantised one also has, or instead of it, tensors beside.
    fn fetch_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostMatrix, TensorError> {
        let is_blank = self.source.is_blank();
        matrix_of(self.source, name, [rows, cols], is_blank, &mut |name, shape| self.fetch(name, shape))
    }

    /// The same of an expert. The values of one that stays on the disk are looked at as they are read.
    fn fetch_expert_matrix(
        &mut self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<HostMatrix, TensorError> {
        let is_blank = self.source.is_blank() || self.stored.is_some();
        matrix_of(self.source, name, [rows, cols], is_blank, &mut |name, shape| self.fetch(name, shape))
    }

    /// Places one matrix, or several on top of each other: imported where they lie, or written one behind the other.
    fn place(&self, pieces: &[HostMatrix]) -> Result<Matrix, ModelError> {
        if self.backend.caps().host_memory {
            let import = |bytes: &HostBytes| self.backend.import(bytes).map(|buffer| buffer.whole());
            let place = |m: &HostMatrix| -> Result<Weight, ModelError> {
                Ok(Weight {
                    view: import(&m.codes)?,
                    scales: m.scales.as_ref().map(import).transpose()?,
                    globals: m.globals.as_ref().map(import).transpose()?,
                    format: m.format,
                    rows: m.rows,
                    cols: m.cols,
                })
            };
            return Ok(Matrix::new(pieces.iter().map(place).collect::<Result<_, _>>()?));
        }
        let HostMatrix { format, cols, .. } = pieces[0];
        let rows = pieces.iter().map(|piece| piece.rows).sum();
        let banks = Banks::new(0, format, rows, cols);
        let buffer = self.backend.alloc(banks.end())?;
        let mut top = 0;
        for piece in pieces {
            for (bytes, place) in parts(piece, &banks.rows(top..top + piece.rows, rows)) {
                self.backend.write(&buffer.view(place), bytes.as_slice())?;
            }
            top += piece.rows;
        }
        Ok(Weight::in_banks(&buffer.whole(), &banks, format, rows, cols).into())
    }

    /// A matrix `[rows, cols]` of any format.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Matrix, ModelError> {
        let matrix = self.fetch_matrix(&self.spelled(name), rows, cols)?;
        self.place(&[matrix])
    }

    /// A matrix whose rows come group by group, and part by part in each group: all groups of one part, then of the next. `parts`:
    /// rows of each in a group.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn part_by_part(
        &mut self,
        name: &str,
        n_groups: usize,
        parts: &[usize],
        cols: usize,
    ) -> Result<Matrix, ModelError> {
        let of_group: usize = parts.iter().sum();
        let mut matrix = self.fetch_matrix(&self.spelled(name), n_groups * of_group, cols)?;
        // Nobody asks in which order zeros lie.
        if !self.source.is_blank() {
            let mut order = Vec::new();
            let mut start = 0;
            for part in parts {
                order.extend((0..n_groups).map(|group| group * of_group + start).map(|row| row..row + part));
                start += part;
            }
            matrix = matrix.reordered(&order);
        }
        self.place(&[matrix])
    }

    /// A matrix `[rows, cols]` that is read by rows or by a router, and so never quantised.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn plain_matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let matrix = self.fetch_plain(&self.spelled(name), rows, cols, &[rows, cols])?;
        Ok(self.place(&[matrix])?.pieces()[0].clone())
    }

    /// The taps of a convolution of each channel by itself, `[channels, 1, kernel]`, as a matrix `[channels, kernel]`.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn channel_taps(&mut self, name: &str, channels: usize, kernel: usize) -> Result<Weight, ModelError> {
        let taps = self.fetch_plain(&self.spelled(name), channels, kernel, &[channels, 1, kernel])?;
        Ok(self.place(&[taps])?.pieces()[0].clone())
    }

    /// A vector `[n]`.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn vector(&mut self, name: &str, n: usize) -> Result<Weight, ModelError> {
        let vector = self.fetch_plain(&self.spelled(name), 1, n, &[n])?;
        Ok(self.place(&[vector])?.pieces()[0].clone())
    }

    /// The weight of a norm, `[n]`: as what values are multiplied with, however it is stored.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn norm(&mut self, name: &str, n: usize) -> Result<Weight, ModelError> {
        if !self.spelling.norms_less_one {
            return self.vector(name, n);
        }
        let less_one = self.fetch_f32(name, n)?;
        self.place_f32(less_one.iter().map(|weight| 1.0 + weight))
    }

    /// Vectors, `(name, n)` each, one behind the other as f32.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn joined_f32(&mut self, vectors: &[(String, usize)]) -> Result<Weight, ModelError> {
        let mut joined = Vec::new();
        for (name, n) in vectors {
            joined.extend(self.fetch_f32(name, *n)?);
        }
        self.place_f32(joined.into_iter())
    }

    fn fetch_f32(&mut self, name: &str, n: usize) -> Result<Vec<f32>, TensorError> {
        let HostMatrix { format, codes, .. } = self.fetch_plain(&self.spelled(name), 1, n, &[n])?;
        let halves = || codes.as_slice().chunks_exact(2).map(|b| [b[0], b[1]]);
        Ok(match format {
            Format::Bf16 => halves().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
            Format::F16 => halves().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
            _ => bytemuck::allocation::pod_collect_to_vec(codes.as_slice()),
        })
    }

    fn place_f32(&self, values: impl Iterator<Item = f32>) -> Result<Weight, ModelError> {
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let (cols, codes) = (bytes.len() / 4, HostBytes::new(Arc::new(bytes)));
        let vector = HostMatrix { format: Format::F32, rows: 1, cols, codes, scales: None, globals: None };
        Ok(self.place(&[vector])?.pieces()[0].clone())
    }

    /// Matrices stacked by rows, `(name, rows)` each, all of one format.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn stacked(&mut self, pieces: &[(String, usize)], cols: usize) -> Result<Matrix, ModelError> {
        let mut fetched: Vec<HostMatrix> = Vec::new();
        for (name, rows) in pieces {
            let piece = self.fetch_matrix(&self.spelled(name), *rows, cols)?;
            let format = fetched.first().map_or(piece.format, |first| first.format);
            same_format(format, &self.spelled(&pieces[0].0), piece.format, &self.spelled(name))?;
            fetched.push(piece);
        }
        self.place(&fetched)
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
        let (moe_layer, is_done) = self.next_moe_layer(n_experts, hidden, intermediate)?;
        if is_done {
            return Ok(moe_layer);
        }
        let mut first: Option<(Format, String)> = None;
        let (mut fetched, mut names) = (Vec::new(), Vec::new());
        for e in 0..n_experts {
            let mut of = |what: &str, rows: usize, cols: usize| -> Result<HostMatrix, TensorError> {
                let name = self.spelled(&name(e, what)).into_owned();
                let matrix = self.fetch_expert_matrix(&name, rows, cols)?;
                let (wanted, first) = first.get_or_insert_with(|| (matrix.format, name.clone()));
                same_format(*wanted, first, matrix.format, &name)?;
                Ok(matrix)
            };
            fetched.push([
                of("gate_proj", intermediate, hidden)?,
                of("up_proj", intermediate, hidden)?,
                of("down_proj", hidden, intermediate)?,
            ]);
            names.push(
                ["gate_proj", "up_proj", "down_proj"].map(|what| self.spelled(&name(e, what)).into_owned()),
            );
        }
        let (format, first) = first.expect("a layer has experts");
        if self.stored.is_some() {
            let record = record(format, hidden, intermediate);
            self.store(&record, n_experts, first, StoredLayer::Apart(names))?;
            return Ok(moe_layer);
        }
        self.place_experts(&fetched, first)?;
        Ok(moe_layer)
    }

    /// The routed experts of the next MoE layer, whose number it gives, from one tensor `gate_up_proj` `[n_experts, 2 * intermediate,
    /// hidden]` of a module and one `down_proj` `[n_experts, hidden, intermediate]`.
    ///
    /// # Errors
    /// [`ModelError`] naming the tensor.
    pub fn stacked_experts(
        &mut self,
        module: &str,
        n_experts: usize,
        hidden: usize,
        intermediate: usize,
    ) -> Result<usize, ModelError> {
        let (moe_layer, is_done) = self.next_moe_layer(n_experts, hidden, intermediate)?;
        if is_done {
            return Ok(moe_layer);
        }
        let names =
            ["gate_up_proj", "down_proj"].map(|what| self.spelled(&format!("{module}.{what}")).into_owned());
        let shapes = [[n_experts, 2 * intermediate, hidden], [n_experts, hidden, intermediate]];
        let mut fetch = |i: usize| {
            let [n, rows, cols] = shapes[i];
            self.fetch_plain(&names[i], n * rows, cols, &shapes[i])
        };
        let (gate_up, down) = (fetch(0)?, fetch(1)?);
        same_format(gate_up.format, &names[0], down.format, &names[1])?;
        if self.stored.is_some() {
            let (record, first) = (record(gate_up.format, hidden, intermediate), names[0].clone());
            self.store(&record, n_experts, first, StoredLayer::Stacked(names))?;
            return Ok(moe_layer);
        }
        let expert = |e: usize| {
            let gate = 2 * e * intermediate..(2 * e + 1) * intermediate;
            let up = gate.end..gate.end + intermediate;
            [
                plain_rows(&gate_up, gate),
                plain_rows(&gate_up, up),
                plain_rows(&down, e * hidden..(e + 1) * hidden),
            ]
        };
        let fetched: Vec<_> = (0..n_experts).map(expert).collect();
        let [first, _] = names;
        self.place_experts(&fetched, first)?;
        Ok(moe_layer)
    }

    /// The number of the next MoE layer, and whether its experts need not be put together: nobody wants them, or the source keeps
    /// each as one record.
    fn next_moe_layer(
        &mut self,
        n_experts: usize,
        hidden: usize,
        intermediate: usize,
    ) -> Result<(usize, bool), ModelError> {
        let moe_layer = self.n_moe_layers;
        self.n_moe_layers += 1;
        if self.sink.as_ref().is_some_and(|sink| sink.has(moe_layer)) {
            return Ok((moe_layer, true));
        }
        let Some(records) = self.source.records(moe_layer) else { return Ok((moe_layer, false)) };
        self.recorded(&records, n_experts, hidden, intermediate)?;
        Ok((moe_layer, true))
    }

    /// Gives the experts of a layer, gate, up and down, all of one format, their place. `first`: name of their first tensor.
    fn place_experts(&mut self, fetched: &[[HostMatrix; 3]], first: String) -> Result<(), ModelError> {
        let [HostMatrix { format, rows: intermediate, cols: hidden, .. }, ..] = fetched[0];
        let n_experts = fetched.len();
        let record = record(format, hidden, intermediate);
        if let LoadedExperts::Banked(_) = self.experts {
            let source = self.source;
            self.bank(&record, n_experts, first, |bank, _| {
                let records = fetched.iter().zip(bank.chunks_exact_mut(record.bytes));
                source.transfer(
                    records.flat_map(|(matrices, into)| assemble(&record, matrices, into)).collect(),
                )?;
                // What is copied need not stay in the page cache as well.
                fetched.iter().flatten().for_each(|matrix| os::drop_pages(matrix.codes.as_slice()));
                Ok(())
            })?;
            return Ok(());
        }
        let placed = if self.backend.caps().host_memory {
            let mut experts = Vec::new();
            for [gate, up, down] in fetched {
                let place = |matrix: &HostMatrix| -> Result<Weight, ModelError> {
                    Ok(self.place(std::slice::from_ref(matrix))?.pieces()[0].clone())
                };
                experts.push(ExpertWeights { gate: place(gate)?, up: place(up)?, down: place(down)? });
            }
            Experts::InPlace(experts.into())
        } else {
            self.resident(&record, n_experts, 1, |experts, into, _| {
                read::copy(assemble(&record, &fetched[experts.start], into));
                Ok(())
            })?
        };
        self.placed(placed);
        Ok(())
    }

    /// The experts of the next MoE layer from a source that keeps each as one record.
    fn recorded(
        &mut self,
        records: &Records<'_>,
        n_experts: usize,
        hidden: usize,
        intermediate: usize,
    ) -> Result<(), ModelError> {
        let (layout, module) = (records.record(), records.module());
        let shape = |n: usize, r: &ExpertRecord| format!("{n} experts of {} x {}", r.hidden, r.intermediate);
        let (found, expected) = (
            shape(records.n_experts(), layout),
            shape(n_experts, &record(layout.format, hidden, intermediate)),
        );
        if found != expected {
            return Err(TensorError::Records { module: module.into(), found, expected }.into());
        }
        if self.stored.is_some() {
            return self.store(layout, n_experts, module.into(), StoredLayer::Records);
        }
        let is_blank = self.source.is_blank();
        let check = |first: usize, bytes: &[u8]| -> Result<(), TensorError> {
            for (e, bytes) in bytes.chunks_exact(layout.bytes).enumerate().filter(|_| !is_blank) {
                check_record(layout, bytes, &format_args!("{module}.{}", first + e))?;
            }
            Ok(())
        };
        if let LoadedExperts::Banked(_) = self.experts {
            return self.bank(layout, n_experts, module.into(), |bank, progress| {
                records.read(0..n_experts, bank, progress)?;
                Ok(check(0, bank)?)
            });
        }
        let placed = if self.backend.caps().host_memory {
            let bytes = records.mapped()?;
            check(0, bytes.as_slice())?;
            (self.progress)(bytes.len() as u64);
            let layer = self.backend.import(&bytes)?.whole();
            let expert = |e: usize| {
                let view = layer.slice(e * layout.bytes..(e + 1) * layout.bytes);
                let of =
                    |banks: &Banks, rows, cols| Weight::in_banks(&view, banks, layout.format, rows, cols);
                ExpertWeights {
                    gate: of(&layout.gate(), intermediate, hidden),
                    up: of(&layout.up(), intermediate, hidden),
                    down: of(&layout.down, hidden, intermediate),
                }
            };
            Experts::InPlace((0..n_experts).map(expert).collect())
        } else {
            let n_together = (STAGING_BYTES / layout.bytes).clamp(1, n_experts);
            self.resident(layout, n_experts, n_together, |experts, into, progress| {
                records.read(experts.clone(), into, progress)?;
                Ok(check(experts.start, into)?)
            })?
        };
        self.placed(placed);
        Ok(())
    }

    /// Fills the bank of the next MoE layer and keeps it, or hands it over. `first` names a tensor of its first expert.
    fn bank(
        &mut self,
        record: &ExpertRecord,
        n_experts: usize,
        first: String,
        fill: impl FnOnce(&mut [u8], &mut dyn FnMut(u64)) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let LoadedExperts::Banked(banks) = &mut self.experts else {
            unreachable!("asked for by the callers")
        };
        if let Some(known) = banks.record() {
            same_format(known.format, &self.first_expert, record.format, &first)?;
        }
        let mut bank = self.backend.alloc_host(n_experts * record.bytes)?;
        fill(&mut bank.as_mut_slice()[..n_experts * record.bytes], self.progress)?;
        if let Some(sink) = &mut self.sink {
            let records = &bank.as_slice()[..n_experts * record.bytes];
            return Ok(sink.take(self.n_moe_layers - 1, record, &first, records)?);
        }
        banks.push(record.clone(), n_experts, bank);
        self.first_expert = first;
        Ok(())
    }

    /// Notes where the experts of the next MoE layer stay, and makes a bank for some of them.
    fn store(
        &mut self,
        record: &ExpertRecord,
        n_experts: usize,
        first: String,
        layer: StoredLayer,
    ) -> Result<(), ModelError> {
        let (LoadedExperts::Banked(banks), Some(stored)) = (&mut self.experts, &mut self.stored) else {
            unreachable!("asked for by the callers")
        };
        if let Some(known) = banks.record() {
            same_format(known.format, &self.first_expert, record.format, &first)?;
        }
        let n_records = stored.n_records[stored.layers.len()];
        let bank = self.backend.alloc_host(n_records * record.bytes)?;
        banks.push_part(record.clone(), n_experts, n_records, bank);
        stored.layers.push(layer);
        self.first_expert = first;
        Ok(())
    }

    /// All experts of a layer in slots of their own, written once; `fill` gives the records of some experts, `n_together` of them.
    fn resident(
        &mut self,
        record: &ExpertRecord,
        n_experts: usize,
        n_together: usize,
        mut fill: impl FnMut(Range<usize>, &mut [u8], &mut dyn FnMut(u64)) -> Result<(), ModelError>,
    ) -> Result<Experts, ModelError> {
        let slots_per_chunk = (self.backend.caps().max_binding_bytes / record.bytes).clamp(1, n_experts);
        let mut chunks = Vec::new();
        for start in (0..n_experts).step_by(slots_per_chunk) {
            let n_slots = slots_per_chunk.min(n_experts - start);
            chunks.push(self.backend.alloc(n_slots * record.bytes)?);
        }
        let table = self.backend.alloc(n_experts * 4)?.whole();
        let slots: Vec<i32> = (0..n_experts as i32).collect();
        self.backend.write(&table, bytemuck::cast_slice(&slots))?;
        let pool = ExpertPool {
            record: record.clone(),
            n_layers: 1,
            n_experts,
            chunks,
            slots_per_chunk,
            table,
            banks: Vec::new(),
        };
        let mut staging = os::anonymous(n_together * record.bytes)
            .map_err(|source| FormatError::Read { file: "memory for experts on their way".into(), source })?;
        for start in (0..n_experts).step_by(n_together) {
            let experts = start..n_experts.min(start + n_together);
            let records = &mut staging.as_mut()[..experts.len() * record.bytes];
            fill(experts.clone(), records, self.progress)?;
            for (slot, bytes) in experts.zip(records.chunks_exact(record.bytes)) {
                self.backend.write(&pool.slot(slot), bytes)?;
            }
        }
        Ok(Experts::Pool { pool: Arc::new(pool), layer: 0 })
    }

    /// Keeps the experts of the next MoE layer.
    fn placed(&mut self, placed: Experts) {
        let LoadedExperts::Placed(layers) = &mut self.experts else { unreachable!("banks go elsewhere") };
        layers.push(placed);
    }
}

/// How a tensor of this type is stored, where it is all there is to a weight.
fn format_of(name: &str, dtype: Dtype) -> Result<Format, TensorError> {
    match dtype {
        Dtype::F32 => Ok(Format::F32),
        Dtype::BF16 => Ok(Format::Bf16),
        Dtype::F16 => Ok(Format::F16),
        found => Err(TensorError::Dtype { name: name.into(), found }),
    }
}

/// A tensor, or why there is none.
type Fetched = Result<(Dtype, HostBytes), TensorError>;

/// A matrix of any format, by the name of its weight; `fetch` gives the tensors that it is made of.
pub(super) fn matrix_of(
    source: &dyn WeightSource,
    name: &str,
    [rows, cols]: [usize; 2],
    is_blank: bool,
    fetch: &mut dyn FnMut(&str, &[usize]) -> Fetched,
) -> Result<HostMatrix, TensorError> {
    let dtype = |name: &str| source.spec(name).map(|(dtype, _)| dtype);
    let module = name.strip_suffix(".weight");
    let Some((module, scheme)) = module.and_then(|module| Some((module, Scheme::find(module, dtype)?)))
    else {
        let (dtype, codes) = fetch(name, &[rows, cols])?;
        let format = format_of(name, dtype)?;
        return Ok(HostMatrix { format, rows, cols, codes, scales: None, globals: None });
    };
    scheme.matrix(module, [rows, cols], is_blank, |name, shapes| {
        let found = source.spec(name).and_then(|(_, found)| shapes.iter().find(|shape| **shape == found));
        let shape = found.unwrap_or(&shapes[0]);
        let (dtype, bytes) = fetch(name, shape)?;
        Ok((TensorSpec { name: name.into(), dtype, shape: shape.clone() }, bytes))
    })
}

/// Some rows of a matrix that is codes only.
pub(super) fn plain_rows(matrix: &HostMatrix, rows: Range<usize>) -> HostMatrix {
    let row_bytes = matrix.format.row_bytes(matrix.cols);
    let codes = matrix.codes.slice(rows.start * row_bytes..rows.end * row_bytes);
    HostMatrix { rows: rows.len(), codes, ..matrix.clone() }
}

/// What makes one record of the gate, up and down matrices of an expert.
pub(super) fn assemble<'r>(
    record: &ExpertRecord,
    [gate, up, down]: &[HostMatrix; 3],
    mut into: &'r mut [u8],
) -> Vec<Transfer<'r>> {
    let banks = [(gate, record.gate()), (up, record.up()), (down, record.down.clone())];
    let mut places: Vec<_> = banks.iter().flat_map(|(matrix, banks)| parts(matrix, banks)).collect();
    places.sort_by_key(|(_, place)| place.start);
    let mut end = 0;
    let mut cut = |to: usize| {
        let part = into.split_off_mut(..to - end).expect("the parts of a record lie in it");
        end = to;
        part
    };
    let transfer = |(from, place): (&HostBytes, Range<usize>)| {
        cut(place.start);
        Transfer { from: from.clone(), into: cut(place.end) }
    };
    places.into_iter().map(transfer).collect()
}

/// The parts of a matrix and the banks that they belong in.
fn parts<'m>(matrix: &'m HostMatrix, banks: &Banks) -> impl Iterator<Item = (&'m HostBytes, Range<usize>)> {
    let HostMatrix { codes, scales, globals, .. } = matrix;
    let places = [banks.codes.clone(), banks.scales.clone(), banks.globals.clone()];
    [Some(codes), scales.as_ref(), globals.as_ref()]
        .into_iter()
        .zip(places)
        .filter_map(|(bytes, place)| Some((bytes?, place)))
}

fn same_format(format: Format, first: &str, other: Format, second: &str) -> Result<(), TensorError> {
    if format == other {
        return Ok(());
    }
    let formats = format!("{format} and {other}");
    Err(TensorError::Mixed { first: first.into(), second: second.into(), formats })
}
