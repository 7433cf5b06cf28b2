//! The one run of bytes that the shards are together, mapped. Knows places, not what lies there.

use std::{ops::Range, path::Path, sync::Arc};

use freetoken_backend::{HostBytes, os};

use super::{
    super::{
        FormatError,
        mapped::MappedFile,
        read::{LazyFile, Read, place_in, read_all, read_here},
    },
    fault::IndexFault,
    index::Index,
};

/// All shards of a directory, mapped one by one.
#[derive(Debug)]
pub(super) struct Region {
    shards: Vec<Shard>,
}

#[derive(Debug)]
struct Shard {
    range: Range<u64>,
    bytes: HostBytes,
    /// The same file for reads past the mapping.
    file: LazyFile,
}

impl Region {
    /// Maps the shards of an index in `dir`; `label` is the index, for errors.
    ///
    /// # Errors
    /// [`FormatError`] for a shard that is missing, is no file, cannot be mapped, or has another length than the index says.
    pub(super) fn open(dir: &Path, label: &str, index: &Index) -> Result<Self, FormatError> {
        let missing: Vec<&str> = index
            .shards
            .iter()
            .map(|shard| shard.file.as_str())
            .filter(|file| !dir.join(file).exists())
            .collect();
        if let Some(first) = missing.first() {
            let (dir, first) = (dir.display().to_string(), (*first).to_string());
            let (missing, total) = (missing.len(), index.shards.len());
            return Err(FormatError::MissingShards { dir, missing, total, first });
        }
        let mut shards = Vec::with_capacity(index.shards.len());
        for shard in &index.shards {
            let path = dir.join(&shard.file);
            let bytes = HostBytes::new(MappedFile::open(&path)?);
            let (expected, found) = (shard.range.end - shard.range.start, bytes.len() as u64);
            if found != expected {
                let fault = IndexFault::ShardLength { shard: shard.file.clone(), expected, found };
                return Err(FormatError::Index { file: label.to_string(), fault });
            }
            shards.push(Shard { range: shard.range.clone(), bytes, file: LazyFile::new(&path) });
        }
        Ok(Region { shards })
    }

    /// The file that these bytes are mapped from and their place in it, if a shard is it.
    pub(super) fn locate(&self, bytes: &HostBytes) -> Option<(&LazyFile, u64)> {
        self.shards.iter().find_map(|shard| Some((&shard.file, place_in(&shard.bytes, bytes)?)))
    }

    /// Where the shards are, in their order.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.file.path())
    }

    /// Bytes of the region, which lie inside: a slice of a mapping, or a copy where they lie in several shards.
    ///
    /// # Errors
    /// The system's refusal of memory for the copy.
    pub(super) fn bytes(&self, range: &Range<u64>) -> Result<HostBytes, FormatError> {
        let len = (range.end - range.start) as usize;
        let mut parts = self.parts(range);
        let Some((first, part)) = parts.next() else { return Ok(HostBytes::from_static(&[])) };
        if part.len() == len {
            return Ok(first.bytes.slice(part));
        }
        let mut whole = os::anonymous(len).map_err(|source| FormatError::read(first.file.path(), source))?;
        let mut end = 0;
        for (shard, part) in self.parts(range) {
            whole.as_mut()[end..end + part.len()].copy_from_slice(&shard.bytes.as_slice()[part.clone()]);
            end += part.len();
        }
        Ok(HostBytes::new(Arc::new(whole)))
    }

    /// Reads bytes of the region, which lie inside, with many requests in flight and past the page cache where that can be;
    /// `progress` hears the bytes.
    ///
    /// # Errors
    /// [`FormatError`] naming the shard and the place in it.
    pub(super) fn read(
        &self,
        range: &Range<u64>,
        mut into: &mut [u8],
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), FormatError> {
        let mut reads = Vec::new();
        for (shard, part) in self.parts(range) {
            let into = into.split_off_mut(..part.len()).expect("memory for the whole range");
            reads.push(Read { file: shard.file.open()?, offset: part.start as u64, into });
        }
        read_all(reads, progress)
    }

    /// Reads bytes of the region on this thread alone, past the page cache where that can be.
    ///
    /// # Errors
    /// [`FormatError`] naming the shard and the place in it.
    pub(super) fn read_here(&self, range: &Range<u64>, mut into: &mut [u8]) -> Result<(), FormatError> {
        for (shard, part) in self.parts(range) {
            let into = into.split_off_mut(..part.len()).expect("memory for the whole range");
            read_here(Read { file: shard.file.open()?, offset: part.start as u64, into })?;
        }
        Ok(())
    }

    /// The shards that a range touches, and its part of each, counted from the start of the shard.
    fn parts(&self, range: &Range<u64>) -> impl Iterator<Item = (&Shard, Range<usize>)> {
        let first = self.shards.partition_point(|shard| shard.range.end <= range.start);
        let range = range.clone();
        self.shards[first..].iter().take_while(move |shard| shard.range.start < range.end).map({
            move |shard| {
                let start = range.start.max(shard.range.start) - shard.range.start;
                let end = range.end.min(shard.range.end) - shard.range.start;
                (shard, start as usize..end as usize)
            }
        })
    }
}
