//! A file that is read past the page cache where the system and its file system allow that, by many threads at once.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use super::imp;

/// Direct reads have offset, length and memory at multiples of this many bytes.
pub const DIRECT_ALIGN: usize = 4096;

/// A file open for reading at any place.
#[derive(Debug)]
pub struct DirectFile {
    path: PathBuf,
    /// `None` where the file system refuses (memory, some networks).
    direct: Option<File>,
    buffered: File,
}

impl DirectFile {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn open(path: &Path) -> io::Result<Self> {
        let buffered = File::open(path)?;
        Ok(DirectFile { path: path.to_path_buf(), direct: imp::open_direct(path).ok(), buffered })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether reads go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    /// Bytes of the file.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn n_bytes(&self) -> io::Result<u64> {
        Ok(self.buffered.metadata()?.len())
    }

    /// Fills `into` from `offset` on, or as far as the file goes, and gives the number of bytes. Past the page cache where offset,
    /// length and address are multiples of [`DIRECT_ALIGN`].
    ///
    /// # Errors
    /// The system's.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        let is_aligned = offset.is_multiple_of(DIRECT_ALIGN as u64)
            && into.len().is_multiple_of(DIRECT_ALIGN)
            && into.as_ptr().addr().is_multiple_of(DIRECT_ALIGN);
        let mut done = 0;
        // What a direct read leaves is read through the cache: the end of a file whose last block is not full, and all of it where
        // a file system took the flag and refuses the read.
        for (file, may_refuse) in self
            .direct
            .iter()
            .filter(|_| is_aligned)
            .map(|file| (file, true))
            .chain([(&self.buffered, false)])
        {
            while done < into.len() {
                match imp::read_at(file, &mut into[done..], offset + done as u64) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if may_refuse && error.kind() == io::ErrorKind::InvalidInput => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(done)
    }

    /// Takes what the page cache holds of the file out of it, so that the next read comes from the disk. False where the system
    /// does not know how.
    pub fn forget_cached(&self) -> bool {
        imp::forget_cached(&self.buffered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os;

    #[test]
    fn reads_give_the_bytes_of_the_file_aligned_or_not() {
        let path = std::env::temp_dir().join(format!("freetoken-direct-{}", std::process::id()));
        let bytes: Vec<u8> = (0..3 * DIRECT_ALIGN + 100).map(|i| (i * 7 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = DirectFile::open(&path).unwrap();
        assert_eq!((file.path(), file.n_bytes().unwrap()), (path.as_path(), bytes.len() as u64));
        file.forget_cached();
        let mut memory = os::anonymous(4 * DIRECT_ALIGN).unwrap();
        let into = memory.as_mut();
        assert_eq!(file.read_at(into, 0).unwrap(), bytes.len(), "as far as the file goes");
        assert_eq!(into[..bytes.len()], bytes);
        assert_eq!(file.read_at(&mut into[..DIRECT_ALIGN], 4096).unwrap(), 4096);
        assert_eq!(into[..4096], bytes[4096..8192]);
        assert_eq!(file.read_at(&mut into[3..10], 4097).unwrap(), 7);
        assert_eq!(into[3..10], bytes[4097..4104]);
        assert_eq!(file.read_at(into, 1 << 20).unwrap(), 0);
        std::fs::remove_file(path).unwrap();
    }
}
