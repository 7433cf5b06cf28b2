//! FTW: one region of bytes cut in shards, and an index that says what lies where. Written by the seed system, whose directories
//! are read here, and by `freetoken convert`. The format, field by field: `docs/ftw.md`.
//!
//! - [`fault`]: what can be wrong with a directory
//! - [`index`]: the index, checked
//! - `names`: what the seed system stacked, by the names of a Hugging Face checkpoint
//! - [`records`]: the experts of a layer, each one run of bytes
//! - `region`: the shards, mapped
//! - [`write`](mod@write): shards, journal and index, so that a directory is complete or says that it is not

pub mod fault;
pub mod index;
mod names;
pub mod records;
mod region;
pub mod write;

use std::{collections::BTreeMap, path::Path};

use freetoken_backend::HostBytes;

use super::{FormatError, Tensor, error::shorten, json, mapped::open_file, read::LazyFile};
use fault::IndexFault;
pub use index::{Entry, Index, Kind};
use names::View;
pub use records::Records;
use region::Region;

/// The index of a directory.
pub const INDEX_FILE: &str = "freetoken_weight.json";
/// What a conversion keeps in its directory until that is complete.
pub const JOURNAL_FILE: &str = "freetoken_convert.json";

/// A directory whose index and shards are checked and mapped.
#[derive(Debug)]
pub struct Ftw {
    /// Path of the index.
    label: String,
    index: Index,
    region: Region,
}

impl Ftw {
    /// Opens the directory `dir`.
    ///
    /// # Errors
    /// [`FormatError`] for an index that breaks a rule, and for shards that are missing or are not what it says.
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        let path = dir.join(INDEX_FILE);
        let label = path.display().to_string();
        let index = index::parse(&label, &json::read_bytes(&path, json::CONFIG_LIMIT)?)?;
        let region = Region::open(dir, &label, &index)?;
        Ok(Ftw { label, index, region })
    }

    /// What lies where.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Compares each shard with the checksum that its writer took, where it took one; `progress` hears the bytes. Gives how many
    /// were compared.
    ///
    /// # Errors
    /// [`FormatError`] naming the shard that is another, or cannot be read.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<usize, FormatError> {
        let mut n_compared = 0;
        for (shard, path) in self.index.shards.iter().zip(self.region.paths()) {
            let Some(expected) = shard.sha256.clone() else { continue };
            let found = open_file(path).and_then(|mut file| {
                write::checksum(&mut file, progress).map_err(|e| FormatError::read(path, e))
            })?;
            if found != expected.to_lowercase() {
                let (file, expected) = (self.label.clone(), shorten(&expected));
                let fault = IndexFault::Checksum { shard: shard.file.clone(), expected, found };
                return Err(FormatError::Index { file, fault });
            }
            n_compared += 1;
        }
        Ok(n_compared)
    }

    /// Bytes of all entries.
    pub fn n_bytes(&self) -> u64 {
        self.index.entries.iter().map(|entry| entry.range.end - entry.range.start).sum()
    }

    /// Bytes of all shards.
    pub fn region_bytes(&self) -> u64 {
        self.index.shards.last().map_or(0, |shard| shard.range.end)
    }

    /// The bytes of an entry.
    ///
    /// # Errors
    /// The system's refusal of memory for an entry that lies in several shards.
    pub fn bytes(&self, entry: &Entry) -> Result<HostBytes, FormatError> {
        self.region.bytes(&entry.range)
    }
}

/// An FTW directory as a checkpoint: tensors by the names that Hugging Face has for them.
#[derive(Debug)]
pub struct Tensors {
    ftw: Ftw,
    views: BTreeMap<String, View>,
    /// Entries of records, in the order of their layers: places in the index.
    layers: Vec<usize>,
}

impl Tensors {
    /// Opens the directory `dir`.
    ///
    /// # Errors
    /// Those of [`Ftw::open`], and [`FormatError`] for experts in a layout that is not read.
    pub fn open(dir: &Path) -> Result<Self, FormatError> {
        let ftw = Ftw::open(dir)?;
        let label = dir.join(INDEX_FILE).display().to_string();
        let layers = records::layers(&label, &ftw.index)?;
        let views = names::views(&label, &ftw.index)?;
        Ok(Tensors { ftw, views, layers })
    }

    /// The container.
    pub fn ftw(&self) -> &Ftw {
        &self.ftw
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.views.keys().map(String::as_str)
    }

    /// The experts of the MoE layer of that number, where they are records.
    pub fn records(&self, moe_layer: usize) -> Option<Records<'_>> {
        let entry = &self.ftw.index.entries[*self.layers.get(moe_layer)?];
        Some(Records::new(entry, &self.ftw.region))
    }

    /// The file that these bytes are mapped from and their place in it, if a shard is it.
    pub(super) fn locate(&self, bytes: &HostBytes) -> Option<(&LazyFile, u64)> {
        self.ftw.region.locate(bytes)
    }

    /// Whether there is a tensor of that name.
    pub fn contains(&self, name: &str) -> bool {
        self.views.contains_key(name)
    }

    /// The tensor of that name.
    ///
    /// # Errors
    /// The system's refusal of memory for a tensor that lies in several shards.
    pub fn tensor(&self, name: &str) -> Result<Option<Tensor>, FormatError> {
        let Some(View { dtype, shape, range }) = self.views.get(name) else { return Ok(None) };
        let bytes = self.ftw.region.bytes(range)?;
        Ok(Some(Tensor { name: name.to_string(), dtype: *dtype, shape: shape.clone(), bytes }))
    }
}
