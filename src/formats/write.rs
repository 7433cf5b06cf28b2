//! Streaming writer of safetensors files and sharded checkpoints.
//!
//! Tensor bytes come from a callback and pass through a buffer, so that a model larger than memory can be written. A
//! file appears under its name only when it is complete. This file knows no architecture and makes no weights.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ::safetensors::Dtype;
use ::safetensors::tensor::{Metadata, TensorInfo};

use super::checkpoint::{INDEX_FILE, SINGLE_FILE};
use super::error::{FormatError, TensorFault};
use super::safetensors::{METADATA_KEY, byte_len, shown};

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes of its elements.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes the little-endian, row-major bytes of the tensor of that name, all of them and no more.
pub type Producer<'a> = &'a mut dyn FnMut(&str, &mut dyn Write) -> io::Result<()>;

/// Writes one safetensors file to `path`, replacing what was there once it is complete. `produce` is called once per
/// tensor, widest element type first, then by name, which keeps every tensor aligned.
///
/// # Errors
/// [`FormatError`] for a repeated or reserved name, a size that overflows, a tensor that gets too many or too few
/// bytes, a full disk, or any other failed write; the unfinished file is removed.
pub fn write_safetensors(
    path: &Path,
    tensors: impl IntoIterator<Item = TensorSpec>,
    produce: Producer<'_>,
) -> Result<(), FormatError> {
    let file = path.display().to_string();
    let sized = tensors.into_iter().map(|spec| SizedTensor::new(&file, spec)).collect::<Result<_, _>>()?;
    write_file(path, sized, produce)
}

/// Writes a checkpoint's weights into the existing directory `dir`: `model.safetensors` if they fit in `shard_bytes`,
/// else shards of at most `shard_bytes` of tensor data each, filled in the given order, and their index last. A
/// tensor larger than `shard_bytes` gets a shard of its own.
///
/// # Errors
/// As [`write_safetensors`]; shards that were complete before the error stay.
pub fn write_sharded(
    dir: &Path,
    tensors: impl IntoIterator<Item = TensorSpec>,
    shard_bytes: u64,
    produce: Producer<'_>,
) -> Result<(), FormatError> {
    let label = dir.display().to_string();
    let mut shards: Vec<Vec<SizedTensor>> = vec![Vec::new()];
    let (mut filled, mut total_size) = (0u64, 0u64);
    for spec in tensors {
        let tensor = SizedTensor::new(&label, spec)?;
        let bytes = tensor.bytes as u64;
        if filled > 0 && filled.saturating_add(bytes) > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled = filled.saturating_add(bytes);
        total_size = total_size.saturating_add(bytes);
        shards.last_mut().expect("starts with one shard and only grows").push(tensor);
    }
    if shards.len() == 1 {
        return write_file(&dir.join(SINGLE_FILE), shards.remove(0), produce);
    }

    let n_shards = shards.len();
    let mut weight_map = BTreeMap::new();
    let mut files = Vec::with_capacity(n_shards);
    for (i, shard) in shards.into_iter().enumerate() {
        let file_name = format!("model-{:05}-of-{n_shards:05}.safetensors", i + 1);
        for tensor in &shard {
            if weight_map.insert(tensor.spec.name.clone(), file_name.clone()).is_some() {
                return Err(FormatError::tensor(&label, &tensor.spec.name, TensorFault::Name));
            }
        }
        files.push((file_name, shard));
    }
    for (file_name, shard) in files {
        write_file(&dir.join(file_name), shard, produce)?;
    }
    let index = serde_json::json!({ "metadata": { "total_size": total_size }, "weight_map": weight_map });
    let text = format!("{index:#}\n");
    replace(&dir.join(INDEX_FILE), text.len() as u64, |out| Ok(out.write_all(text.as_bytes())?))
}

/// A tensor whose size is known not to overflow.
struct SizedTensor {
    spec: TensorSpec,
    bytes: usize,
}

impl SizedTensor {
    fn new(file: &str, spec: TensorSpec) -> Result<Self, FormatError> {
        if spec.name == METADATA_KEY {
            return Err(FormatError::tensor(file, &spec.name, TensorFault::Name));
        }
        match byte_len(spec.dtype, &spec.shape) {
            Ok(bytes) => Ok(Self { spec, bytes }),
            Err(fault) => Err(FormatError::tensor(file, &spec.name, fault)),
        }
    }
}

fn write_file(path: &Path, mut tensors: Vec<SizedTensor>, produce: Producer<'_>) -> Result<(), FormatError> {
    let tensor_error = |name: &str, fault| FormatError::tensor(&path.display().to_string(), name, fault);
    tensors.sort_by(|a, b| b.spec.dtype.cmp(&a.spec.dtype).then_with(|| a.spec.name.cmp(&b.spec.name)));
    let header = header(&tensors).map_err(|(name, fault)| tensor_error(&name, fault))?;
    let bytes =
        tensors.iter().fold(header.len() as u64, |sum, tensor| sum.saturating_add(tensor.bytes as u64));

    replace(path, bytes, |out| {
        out.write_all(&header)?;
        for SizedTensor { spec, bytes: expected } in &tensors {
            let mut counted = Counted { out, written: 0, expected: *expected as u64 };
            let result = produce(&spec.name, &mut counted);
            let written = counted.written;
            if written > *expected as u64 || (result.is_ok() && written < *expected as u64) {
                let fault = TensorFault::Size {
                    bytes: written,
                    expected: *expected,
                    dtype: spec.dtype,
                    shape: shown(&spec.shape),
                };
                return Err(Failure::Format(tensor_error(&spec.name, fault)));
            }
            result?;
        }
        Ok(())
    })
}

/// Length and text of the header for tensors that follow each other in this order, padded to 8 bytes.
fn header(tensors: &[SizedTensor]) -> Result<Vec<u8>, (String, TensorFault)> {
    let mut begin = 0usize;
    let mut names = HashSet::new();
    let mut infos = Vec::with_capacity(tensors.len());
    for SizedTensor { spec, bytes } in tensors {
        if !names.insert(&spec.name) {
            return Err((spec.name.clone(), TensorFault::Name));
        }
        let end = begin
            .checked_add(*bytes)
            .ok_or_else(|| (spec.name.clone(), TensorFault::Overflow { shape: shown(&spec.shape) }))?;
        let info = TensorInfo { dtype: spec.dtype, shape: spec.shape.clone(), data_offsets: (begin, end) };
        infos.push((spec.name.clone(), info));
        begin = end;
    }
    // Transformers refuses a file that does not say which framework's tensors it holds.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), infos).expect("offsets were laid out end to end above");
    let mut text = serde_json::to_vec(&metadata).expect("names and numbers serialise");
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    Ok(header)
}

/// Passes bytes on until `expected`; refuses the write that would exceed it, and counts it.
struct Counted<'a> {
    out: &'a mut dyn Write,
    written: u64,
    expected: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.written.saturating_add(bytes.len() as u64) > self.expected {
            self.written = self.written.saturating_add(bytes.len() as u64);
            return Err(io::Error::other("more bytes than the tensor has"));
        }
        let n = self.out.write(bytes)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Why filling a file stopped: the disk, or what was to be written.
pub(super) enum Failure {
    Io(io::Error),
    Format(FormatError),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Fills `<path>.tmp` and renames it to `path`; on failure removes it.
pub(super) fn replace(
    path: &Path,
    bytes: u64,
    fill: impl FnOnce(&mut dyn Write) -> Result<(), Failure>,
) -> Result<(), FormatError> {
    let mut tmp = OsString::from(path);
    tmp.push(".tmp");
    let written = File::create(&tmp).map_err(Failure::Io).and_then(|file| {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        fill(&mut out)?;
        let file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
        // Some file systems notice a full disk only here.
        file.sync_all()?;
        drop(file);
        Ok(fs::rename(&tmp, path)?)
    });
    written.map_err(|failure| {
        // It may not exist; the first error is the one to report.
        let _ = fs::remove_file(&tmp);
        match failure {
            Failure::Io(source) => FormatError::write(path, bytes, source),
            Failure::Format(error) => error,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::Checkpoint;
    use super::*;

    fn spec(name: &str, dtype: Dtype, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: name.to_string(), dtype, shape: shape.to_vec() }
    }

    /// Elements of every width, in an order that would leave some of them misaligned.
    fn specs() -> Vec<TensorSpec> {
        vec![
            spec("a.bytes", Dtype::U8, &[3]),
            spec("b.half", Dtype::BF16, &[5, 2]),
            spec("c.wide", Dtype::F64, &[2]),
            spec("d.none", Dtype::F32, &[0, 4]),
            spec("e.codes", Dtype::F4, &[2, 8]),
            spec("f.single", Dtype::F32, &[7]),
        ]
    }

    /// Each byte of a tensor is the last letter of its name, written in two pieces.
    fn produce(name: &str, out: &mut dyn Write) -> io::Result<()> {
        let spec = specs().into_iter().find(|spec| spec.name == name).unwrap();
        let bytes = vec![*name.as_bytes().last().unwrap(); byte_len(spec.dtype, &spec.shape).unwrap()];
        let (first, second) = bytes.split_at(bytes.len() / 2);
        out.write_all(first)?;
        out.write_all(second)
    }

    fn file_names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_written_opens() {
        let one_file = vec!["model.safetensors"];
        let two_shards = vec![
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
        ];
        for (shard_bytes, files) in [(u64::MAX, one_file), (40, two_shards)] {
            let dir = tempfile::tempdir().unwrap();
            write_sharded(dir.path(), specs(), shard_bytes, &mut produce).unwrap();
            assert_eq!(file_names(dir.path()), files);

            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            assert_eq!(checkpoint.tensor_names().len(), specs().len());
            assert_eq!(checkpoint.total_bytes(), 3 + 20 + 16 + 8 + 28);
            for TensorSpec { name, dtype, shape } in specs() {
                let tensor = checkpoint.tensor(&name).unwrap();
                assert_eq!((tensor.dtype, &tensor.shape), (dtype, &shape));
                assert!(tensor.bytes.as_slice().iter().all(|byte| name.as_bytes().ends_with(&[*byte])));
            }
        }
    }

    #[test]
    fn the_safetensors_crate_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        write_safetensors(&path, specs(), &mut produce).unwrap();
        let bytes = fs::read(path).unwrap();
        let file = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), specs().len());
        assert_eq!(file.tensor("a.bytes").unwrap().data(), b"sss");
    }

    #[test]
    fn failures_leave_the_old_file_and_no_other() {
        type Produce = fn(&str, &mut dyn Write) -> io::Result<()>;
        let w = || spec("w", Dtype::F32, &[2]);
        let cases: [(Vec<TensorSpec>, Produce, &str); 8] = [
            (
                vec![w()],
                |_, out| out.write_all(&[0; 7]),
                "tensor `w` has 7 bytes but F32 of shape [2] takes 8",
            ),
            (
                vec![w()],
                |_, out| out.write_all(&[0; 9]),
                "tensor `w` has 9 bytes but F32 of shape [2] takes 8",
            ),
            (vec![w()], |_, _| Err(io::ErrorKind::StorageFull.into()), "the disk is full: "),
            (vec![w()], |_, _| Err(io::Error::other("no source")), "x.safetensors: no source"),
            (vec![w(), w()], |_, _| Ok(()), "tensor `w` cannot be written under this name"),
            (vec![spec(METADATA_KEY, Dtype::U8, &[])], |_, _| Ok(()), "cannot be written under this name"),
            (vec![spec("w", Dtype::U8, &[usize::MAX, 2])], |_, _| Ok(()), "has a size that overflows"),
            (vec![spec("w", Dtype::F4, &[3])], |_, _| Ok(()), "ends inside a byte"),
        ];
        for (specs, mut produce, fragment) in cases {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("x.safetensors");
            fs::write(&path, "old").unwrap();
            let sentence = write_safetensors(&path, specs, &mut produce).unwrap_err().to_string();
            assert!(sentence.contains(fragment) && sentence.contains("x.safetensors"), "{sentence}");
            assert_eq!(fs::read(&path).unwrap(), b"old");
            assert_eq!(file_names(dir.path()), ["x.safetensors"]);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.safetensors");
        std::os::unix::fs::symlink("/dev/full", dir.path().join("x.safetensors.tmp")).unwrap();
        let sentence = write_safetensors(&path, specs(), &mut produce).unwrap_err().to_string();
        assert!(
            sentence.starts_with("the disk is full: ") && sentence.contains("x.safetensors"),
            "{sentence}"
        );
        assert!(file_names(dir.path()).is_empty());
    }
}
