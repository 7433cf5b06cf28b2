//! From a checkpoint to an FTW directory: what the model asks for, tensors as they are and each expert as one record, layer by
//! layer. Knows no architecture but through [`models::load`], and no container but through its writer.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread, time,
};

use freetoken_backend::{ExpertRecord, Format, os, record};

use crate::{
    devices,
    formats::{
        FormatError,
        ftw::{
            INDEX_FILE, JOURNAL_FILE,
            write::{ClaimError, Plan, Writer},
        },
        quantise::{NotFinite, quantise},
    },
    model_files::ModelFiles,
    models::{self, Inventory, ModelError, RecordSink, TensorError, WeightSource, Weights},
};

/// Most bytes of a shard of tensors that are no experts; experts have a shard a layer.
const SHARD_BYTES: u64 = 4 << 30;

/// Why a checkpoint cannot be converted.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The source is wrong.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// It cannot be read, or the directory cannot be written.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The directory is taken.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// There is nothing to quantise, it was done before, or the experts are not where a model has them.
    #[error("{model} {why}")]
    Refused {
        /// The source.
        model: String,
        /// Why not.
        why: String,
    },
}

/// A conversion that was planned: the source's headers are read, nothing is written.
pub struct Conversion<'a> {
    files: &'a ModelFiles,
    plan: Plan,
    /// Shapes of the tensors in the plan, by name.
    shapes: BTreeMap<String, Vec<usize>>,
    /// How many shards have no experts.
    n_dense_shards: usize,
    /// How experts are stored in the source, and what they become, where there are any.
    source_format: Option<Format>,
    record: Option<ExpertRecord>,
    source_bytes: u64,
    /// Files that go along as they are.
    beside: Vec<(PathBuf, OsString)>,
    /// Tells the source from others, and from itself when it changes.
    source: String,
}

impl<'a> Conversion<'a> {
    /// Plans the conversion of a model; its experts are rounded to `quantised` where that is given.
    ///
    /// # Errors
    /// [`ConvertError`] for a source that is wrong, or that cannot be quantised.
    pub fn plan(files: &'a ModelFiles, quantised: Option<Format>) -> Result<Self, ConvertError> {
        let checkpoint = files.checkpoint();
        let inventory = Inventory::of_checkpoint(&files.config(), checkpoint, &*devices::reference())?;
        let refused = |why: String| Err(ConvertError::Refused { model: files.name(), why });
        let moe = inventory.sizes.moe.filter(|moe| moe.n_layers > 0);
        let format = match (quantised, inventory.expert_format) {
            (Some(_), None) => return refused("has no routed experts to quantise".into()),
            (Some(format), Some(found)) if found.group().is_some() => {
                return refused(format!(
                    "has experts in {found} already: convert the original weights to {format}"
                ));
            }
            (quantised, found) => quantised.or(found),
        };
        let mut plan = Plan::default();
        let (mut shapes, mut modules) = (BTreeMap::new(), Vec::<String>::new());
        for tensor in &inventory.tensors {
            if let Some(module) = expert_module(&tensor.name) {
                // All tensors of a layer's experts come one after the other.
                if modules.last().is_none_or(|last| last != module) {
                    modules.push(module.to_owned());
                }
                continue;
            }
            if shapes.insert(tensor.name.clone(), tensor.shape.clone()).is_some() {
                continue;
            }
            if plan.n_shards().checked_sub(1).is_none_or(|last| plan.shard_bytes(last) >= SHARD_BYTES) {
                plan.begin_shard();
            }
            plan.add_tensor(tensor)?;
        }
        let n_dense_shards = plan.n_shards();
        let layout = moe
            .zip(format)
            .map(|(moe, format)| (moe, record(format, inventory.sizes.hidden, moe.intermediate)));
        if let Some((moe, record)) = &layout {
            if modules.len() != moe.n_layers {
                let (found, expected) = (modules.len(), moe.n_layers);
                return refused(format!(
                    "names experts of {found} modules, and config.json asks for {expected}"
                ));
            }
            for (layer, module) in modules.iter().enumerate() {
                plan.begin_shard();
                plan.add_records(layer, record, moe.n_experts, module);
            }
        }
        let (beside, source) = files_of(checkpoint.dir())?;
        Ok(Conversion {
            files,
            plan,
            shapes,
            n_dense_shards,
            source_format: inventory.expert_format,
            record: layout.map(|(_, record)| record),
            source_bytes: checkpoint.total_bytes(),
            beside,
            source,
        })
    }

    /// Bytes of the source's tensors.
    pub fn source_bytes(&self) -> u64 {
        self.source_bytes
    }

    /// Bytes of the shards that it becomes.
    pub fn bytes(&self) -> u64 {
        self.plan.bytes()
    }

    /// How experts will be stored, where there are any.
    pub fn expert_format(&self) -> Option<Format> {
        self.record.as_ref().map(|record| record.format)
    }

    /// Writes the directory, or goes on where an earlier run of the same conversion was cut off; with `force`, what another one
    /// wrote there is removed. `progress` hears the bytes of shards, those of earlier runs at once, and 0 where a file is complete.
    ///
    /// # Errors
    /// [`ConvertError`]. What was written stays, and another run goes on behind it.
    pub fn run(&self, out: &Path, force: bool, progress: &mut dyn FnMut(u64)) -> Result<(), ConvertError> {
        let mut writer = Writer::begin(out, &self.plan, &self.source, force)?;
        let done = (0..self.plan.n_shards()).filter(|&shard| writer.is_done(shard));
        progress(done.map(|shard| self.plan.shard_bytes(shard)).sum());
        let checkpoint = self.files.checkpoint();
        for shard in 0..self.n_dense_shards {
            if writer.is_done(shard) {
                continue;
            }
            writer.shard(shard, &mut |name, file| {
                let tensor = WeightSource::tensor(checkpoint, name, &self.shapes[name]);
                let (_, bytes) = tensor.map_err(|error| io::Error::other(error.to_string()))?;
                for piece in bytes.as_slice().chunks(WRITE_BYTES) {
                    file.write_all(piece)?;
                    progress(piece.len() as u64);
                }
                os::drop_pages(bytes.as_slice());
                Ok(())
            })?;
            progress(0);
        }
        let mut sink = Layers { conversion: self, writer, progress };
        let reference = devices::reference();
        let mut heard = |_| ();
        let mut weights = Weights::new(&*reference, checkpoint, &mut heard).with_sink(&mut sink);
        models::load(&self.files.config(), &mut weights)?;
        let Layers { writer, progress, .. } = sink;
        for (path, name) in &self.beside {
            writer.copy(path, name)?;
            progress(0);
        }
        Ok(writer.finish()?)
    }
}

/// Bytes that are written between two reports.
const WRITE_BYTES: usize = 16 << 20;

/// Writes the experts of each layer as they are loaded.
struct Layers<'c, 'p> {
    conversion: &'c Conversion<'c>,
    writer: Writer<'c>,
    progress: &'p mut dyn FnMut(u64),
}

impl RecordSink for Layers<'_, '_> {
    fn has(&self, moe_layer: usize) -> bool {
        self.writer.is_done(self.conversion.n_dense_shards + moe_layer)
    }

    fn take(
        &mut self,
        moe_layer: usize,
        from: &ExpertRecord,
        first: &str,
        records: &[u8],
    ) -> Result<(), TensorError> {
        let (known, found) = (self.conversion.source_format, from.format);
        if known != Some(found) {
            let formats = known.map_or(found.to_string(), |known| format!("{known} and {found}"));
            let known = "experts of the first layer".into();
            return Err(TensorError::Mixed { first: known, second: first.into(), formats });
        }
        let to = self.conversion.record.as_ref().expect("a model with experts has a record planned");
        let progress = &mut *self.progress;
        self.writer.shard(self.conversion.n_dense_shards + moe_layer, &mut |_, file| {
            if from == to {
                for piece in records.chunks(WRITE_BYTES) {
                    file.write_all(piece)?;
                    progress(piece.len() as u64);
                }
                return Ok(());
            }
            let n_together = os::physical_cores().len();
            let mut quantised = vec![0; n_together * to.bytes];
            for (i, part) in records.chunks(n_together * from.bytes).enumerate() {
                let into = &mut quantised[..part.len() / from.bytes * to.bytes];
                quantise_all(from, part, to, into).map_err(|(e, wrong)| {
                    let module = expert_module(first).unwrap_or(first);
                    io::Error::other(format!("{module}, expert {}: {wrong}", i * n_together + e))
                })?;
                file.write_all(into)?;
                progress(into.len() as u64);
            }
            Ok(())
        })?;
        (self.progress)(0);
        Ok(())
    }
}

/// Quantises records with a thread for each; gives the first that cannot be.
fn quantise_all(
    from: &ExpertRecord,
    records: &[u8],
    to: &ExpertRecord,
    into: &mut [u8],
) -> Result<(), (usize, NotFinite)> {
    let first_wrong = Mutex::new(None);
    thread::scope(|scope| {
        for (e, (bytes, into)) in
            records.chunks_exact(from.bytes).zip(into.chunks_exact_mut(to.bytes)).enumerate()
        {
            let first_wrong = &first_wrong;
            scope.spawn(move || {
                if let Err(wrong) = quantise(from, bytes, to, into) {
                    let mut first = first_wrong.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.is_none_or(|(known, _)| e < known) {
                        *first = Some((e, wrong));
                    }
                }
            });
        }
    });
    first_wrong.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// The module of the experts that a tensor belongs to: `model.layers.0.mlp.experts`.
fn expert_module(tensor: &str) -> Option<&str> {
    let end = tensor.find(".experts.")? + ".experts".len();
    Some(&tensor[..end])
}

/// Files beside the weights, and a text that changes with any file of the directory.
fn files_of(dir: &Path) -> Result<(Vec<(PathBuf, OsString)>, String), FormatError> {
    let refused = |source| FormatError::Read { file: dir.display().to_string(), source };
    let (mut beside, mut facts) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(dir).map_err(refused)? {
        let entry = entry.map_err(refused)?;
        let (path, name) = (entry.path(), entry.file_name());
        let Ok(found) = fs::metadata(&path) else { continue };
        if !found.is_file() || name == JOURNAL_FILE {
            continue;
        }
        let modified = found.modified().ok().and_then(|at| at.duration_since(time::UNIX_EPOCH).ok());
        facts.push(format!("{} {} {modified:?}", name.display(), found.len()));
        if !is_weights(&name.to_string_lossy()) {
            beside.push((path, name));
        }
    }
    beside.sort();
    facts.sort();
    Ok((beside, facts.join("\n")))
}

/// Whether a file holds weights or lists those that do, in whatever format, or is hidden.
fn is_weights(name: &str) -> bool {
    const ENDS: [&str; 9] =
        [".safetensors", ".index.json", ".ftw", ".gguf", ".bin", ".pt", ".pth", ".tmp", ".onnx"];
    name == INDEX_FILE || name.starts_with('.') || ENDS.iter().any(|end| name.ends_with(end))
}
