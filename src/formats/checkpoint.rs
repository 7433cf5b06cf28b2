//! One model's files: a Hugging Face checkpoint directory, or the same set of files embedded in the binary.
//!
//! The weights are `model.safetensors`, or the shards that `model.safetensors.index.json` lists, or the entries of an FTW
//! index. All headers are checked on opening; tensor bytes stay in the mapping until someone reads them. This file knows
//! names, not what they mean.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freetoken_backend::HostBytes;
use serde::Deserialize;

use super::error::{FormatError, shorten};
use super::ftw;
use super::json::{self, UniqueMap};
use super::read::{Read, Transfer, copy, read_all, read_here};
use super::safetensors::{Shard, Tensor};

/// The weights when they are one file.
pub(super) const SINGLE_FILE: &str = "model.safetensors";
/// The list of shards when they are several.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// Runs of so many bytes are read rather than copied from the mapping.
const READ_BYTES: usize = 256 << 10;

/// A model's files, checked: every tensor is in exactly one shard, and every shard keeps its format's rules. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    source: Arc<Source>,
    container: Arc<Container>,
}

/// What holds the tensors.
#[derive(Debug)]
enum Container {
    Safetensors {
        shards: Vec<Shard>,
        /// Tensor name to its place in `shards`.
        places: BTreeMap<String, usize>,
    },
    Ftw(ftw::Tensors),
}

impl Checkpoint {
    /// Opens the checkpoint in the directory `dir`.
    ///
    /// # Errors
    /// [`FormatError`] for a path that is no readable directory, absent weights, a bad index, or a bad shard.
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        let refused = |source| FormatError::read(dir, source);
        if !fs::metadata(dir).map_err(refused)?.is_dir() {
            return Err(FormatError::NotADirectory { file: dir.display().to_string() });
        }
        fs::read_dir(dir).map_err(refused)?;
        Self::load(Source::Directory(dir.to_path_buf()))
    }

    /// Opens a checkpoint whose `files` (name, content) are embedded in the binary; `label` stands for the directory.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    ///
    /// # Panics
    /// If an embedded safetensors file does not start at a multiple of 8 bytes.
    pub fn from_files(label: &str, files: &[(&'static str, &'static [u8])]) -> Result<Self, FormatError> {
        Self::load(Source::Embedded { label: PathBuf::from(label), files: files.to_vec() })
    }

    fn load(source: Source) -> Result<Self, FormatError> {
        let container = Container::open(&source)?;
        Ok(Self { source: Arc::new(source), container: Arc::new(container) })
    }

    /// The directory, or the label of an embedded checkpoint.
    pub fn dir(&self) -> &Path {
        self.source.dir()
    }

    /// The FTW directory that it is, if it is one.
    pub fn ftw(&self) -> Option<&ftw::Tensors> {
        match &*self.container {
            Container::Safetensors { .. } => None,
            Container::Ftw(tensors) => Some(tensors),
        }
    }

    /// Whether it holds a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        match &*self.container {
            Container::Safetensors { places, .. } => places.contains_key(name),
            Container::Ftw(tensors) => tensors.contains(name),
        }
    }

    /// The names of all tensors, sorted.
    pub fn tensor_names(&self) -> Box<dyn ExactSizeIterator<Item = &str> + '_> {
        match &*self.container {
            Container::Safetensors { places, .. } => Box::new(places.keys().map(String::as_str)),
            Container::Ftw(tensors) => Box::new(tensors.names()),
        }
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        match &*self.container {
            Container::Safetensors { shards, .. } => shards
                .iter()
                .flat_map(|shard| shard.entries().values())
                .map(|entry| entry.range.len() as u64)
                .sum(),
            Container::Ftw(tensors) => tensors.ftw().n_bytes(),
        }
    }

    /// The tensor of that name; cheap, since its bytes are a slice of the mapping.
    ///
    /// # Errors
    /// [`FormatError::MissingTensor`] with the most similar name.
    pub fn tensor(&self, name: &str) -> Result<Tensor, FormatError> {
        let found = match &*self.container {
            Container::Safetensors { shards, places } => {
                places.get(name).and_then(|&place| shards[place].tensor(name))
            }
            Container::Ftw(tensors) => tensors.tensor(name)?,
        };
        found.ok_or_else(|| FormatError::MissingTensor {
            dir: self.dir().display().to_string(),
            tensor: shorten(name),
            n_tensors: self.tensor_names().len(),
            nearest: self.tensor_names().max_by_key(|candidate| likeness(candidate, name)).map(shorten),
        })
    }

    /// Bytes of a tensor that it gave, read from their file into memory of their own: a file that changes under its mapping ends the
    /// process, one that cannot be read is an error.
    ///
    /// # Errors
    /// [`FormatError::ReadAt`] naming file and offset.
    pub fn read_here(&self, bytes: &HostBytes) -> Result<HostBytes, FormatError> {
        let located = match &*self.container {
            Container::Safetensors { shards, .. } => shards.iter().find_map(|shard| shard.locate(bytes)),
            Container::Ftw(tensors) => tensors.locate(bytes),
        };
        // What is in no file is memory already.
        let Some((file, offset)) = located else { return Ok(bytes.clone()) };
        let mut memory = vec![0; bytes.len()];
        read_here(Read { file: file.open()?, offset, into: &mut memory })?;
        Ok(HostBytes::new(Arc::new(memory)))
    }

    /// Copies bytes of its tensors. Long runs are read from their file, many at once and past the page cache; short ones, which lie
    /// among others that were looked at, are copied from the mapping.
    ///
    /// # Errors
    /// [`FormatError::ReadAt`] naming file and offset of a read that failed.
    pub fn transfer(&self, transfers: Vec<Transfer<'_>>) -> Result<(), FormatError> {
        let Container::Safetensors { shards, .. } = &*self.container else {
            copy(transfers);
            return Ok(());
        };
        let (long, short): (Vec<_>, Vec<_>) =
            transfers.into_iter().partition(|transfer| transfer.into.len() >= READ_BYTES);
        let (mut reads, mut unknown) = (Vec::new(), short);
        for transfer in long {
            match shards.iter().find_map(|shard| shard.locate(&transfer.from)) {
                Some((file, offset)) => reads.push(Read { file: file.open()?, offset, into: transfer.into }),
                None => unknown.push(transfer),
            }
        }
        copy(unknown);
        match reads.is_empty() {
            true => Ok(()),
            false => read_all(reads, &mut |_| ()),
        }
    }

    /// The content of a text file beside the weights (`config.json`, `tokenizer.json`, `chat_template.jinja` ...), at
    /// most [`json::TOKENIZER_LIMIT`] bytes for `tokenizer.json` and [`json::CONFIG_LIMIT`] for the rest; `None` if
    /// there is no such file.
    ///
    /// # Errors
    /// [`FormatError`] when it is there but is no regular file, unreadable, or too large.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, FormatError> {
        self.source.file(name)
    }
}

impl Container {
    fn open(source: &Source) -> Result<Self, FormatError> {
        if let Source::Directory(dir) = source {
            if dir.join(ftw::INDEX_FILE).exists() {
                return Ok(Self::Ftw(ftw::Tensors::open(dir)?));
            }
            if dir.join(ftw::JOURNAL_FILE).exists() {
                return Err(FormatError::Unfinished { dir: dir.display().to_string() });
            }
        }
        let shards = match source.shard(SINGLE_FILE) {
            Ok(shard) => vec![shard],
            Err(FormatError::NotFound { .. }) => indexed_shards(source)?,
            Err(error) => return Err(error),
        };
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        for (place, shard) in shards.iter().enumerate() {
            for name in shard.entries().keys() {
                if let Some(first) = places.insert(name.clone(), place) {
                    return Err(FormatError::InTwoShards {
                        tensor: shorten(name),
                        first: shards[first].label().to_string(),
                        second: shard.label().to_string(),
                    });
                }
            }
        }
        Ok(Self::Safetensors { shards, places })
    }
}

/// `model.safetensors.index.json`; its metadata repeats what the shards say.
#[derive(Deserialize)]
struct Index {
    /// Tensor name to the file name of its shard.
    weight_map: UniqueMap<String>,
}

/// Opens the shards that the index lists, sorted by name, and checks that each holds the tensors placed in it.
fn indexed_shards(source: &Source) -> Result<Vec<Shard>, FormatError> {
    let dir = || source.dir().display().to_string();
    let index_bytes = source.file(INDEX_FILE)?.ok_or_else(|| FormatError::NoWeights { dir: dir() })?;
    let file = source.path(INDEX_FILE).display().to_string();
    let Index { weight_map: UniqueMap(weight_map) } = json::parse(&file, &index_bytes)?;

    if let Some((tensor, shard)) = weight_map.iter().find(|(_, shard)| !is_plain_file_name(shard)) {
        return Err(FormatError::ShardOutside { file, tensor: shorten(tensor), shard: shorten(shard) });
    }
    let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    let mut shards = BTreeMap::new();
    let mut missing = Vec::new();
    for &name in &names {
        match source.shard(name) {
            Ok(shard) => drop(shards.insert(name, shard)),
            Err(FormatError::NotFound { .. }) => missing.push(name),
            Err(error) => return Err(error),
        }
    }
    if let Some(first) = missing.first() {
        let (missing, total, first) = (missing.len(), names.len(), shorten(first));
        return Err(FormatError::MissingShards { dir: dir(), missing, total, first });
    }
    for (tensor, shard) in &weight_map {
        if !shards[shard.as_str()].entries().contains_key(tensor) {
            return Err(FormatError::NotInShard { file, tensor: shorten(tensor), shard: shorten(shard) });
        }
    }
    Ok(shards.into_values().collect())
}

/// Whether `name` can only mean a file in the directory itself, on every operating system.
pub(super) fn is_plain_file_name(name: &str) -> bool {
    let forbidden = |c: char| c.is_control() || matches!(c, '/' | '\\' | ':');
    (1..=255).contains(&name.len()) && name != "." && name != ".." && !name.contains(forbidden)
}

/// Bytes that two names share at the start or at the end, whichever is more.
fn likeness(a: &str, b: &str) -> usize {
    let head = a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
    let tail = a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y).count();
    head.max(tail)
}

/// Where a checkpoint's files come from.
#[derive(Debug)]
enum Source {
    Directory(PathBuf),
    Embedded { label: PathBuf, files: Vec<(&'static str, &'static [u8])> },
}

impl Source {
    fn dir(&self) -> &Path {
        match self {
            Self::Directory(dir) => dir,
            Self::Embedded { label, .. } => label,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    fn shard(&self, name: &str) -> Result<Shard, FormatError> {
        let path = self.path(name);
        let Self::Embedded { files, .. } = self else { return Shard::open(&path) };
        let file = path.display().to_string();
        match files.iter().find(|(known, _)| *known == name) {
            Some((_, bytes)) => Shard::from_static(file, bytes),
            None => Err(FormatError::NotFound { file }),
        }
    }

    fn file(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, FormatError> {
        let Self::Embedded { files, .. } = self else {
            let limit = if name == "tokenizer.json" { json::TOKENIZER_LIMIT } else { json::CONFIG_LIMIT };
            return match json::read_bytes(&self.path(name), limit) {
                Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                Err(FormatError::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            };
        };
        let found = files.iter().find(|(known, _)| *known == name);
        Ok(found.map(|&(_, bytes)| Cow::Borrowed(bytes)))
    }
}
