//! Files opened and mapped read-only; the one place in `formats` with `unsafe`.
//!
//! Knows no format: a mapping is bytes, and what they mean is checked by whoever asked for them.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;

use super::FormatError;

/// A whole file mapped read-only; its bytes start at a page boundary.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`. The file must not be truncated or rewritten in place while the mapping lives: the operating
    /// system then ends the process at the next access. Replacing it by renaming another file over it is fine.
    ///
    /// # Errors
    /// [`FormatError`] when the path is absent, a directory, not a regular file, empty, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Arc<Self>, FormatError> {
        let file = open_file(path)?;
        let refused = |source| FormatError::read(path, source);
        if file.metadata().map_err(refused)?.len() == 0 {
            return Err(FormatError::Empty { file: path.display().to_string() });
        }
        Ok(Arc::new(Self { map: map(&file).map_err(refused)? }))
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Opens a regular file for reading. The kind is looked up first, since opening a pipe would wait for a writer.
pub(super) fn open_file(path: &Path) -> Result<File, FormatError> {
    let refused = |source| FormatError::read(path, source);
    let kind = fs::metadata(path).map_err(refused)?;
    if kind.is_dir() {
        return Err(FormatError::IsADirectory { file: path.display().to_string() });
    }
    if !kind.is_file() {
        return Err(FormatError::NotAFile { file: path.display().to_string() });
    }
    File::open(path).map_err(refused)
}

#[allow(unsafe_code)]
fn map(file: &File) -> io::Result<Mmap> {
    // SAFETY: the mapping is read-only and owns its lifetime; that nobody shrinks or rewrites the file under it is
    // the contract of a checkpoint in use, stated at `MappedFile::open`.
    unsafe { Mmap::map(file) }
}
