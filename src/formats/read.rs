//! Many reads of files in flight at once, into memory that waits for them: a disk is fast only when it has much to do.
//!
//! Knows files, offsets and memory, not what is read.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use freetoken_backend::{
    HostBytes,
    os::{self, AnonymousMemory, DIRECT_ALIGN, DirectFile},
};

use super::FormatError;

/// Threads that read: as many requests are in flight.
const N_READERS: usize = 16;
/// Bytes of a request.
const CHUNK: usize = 4 << 20;

/// A file that is opened for such reads when the first of them comes.
#[derive(Debug)]
pub(super) struct LazyFile {
    path: PathBuf,
    file: OnceLock<DirectFile>,
}

impl LazyFile {
    pub(super) fn new(path: &Path) -> Self {
        LazyFile { path: path.to_path_buf(), file: OnceLock::new() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, open.
    ///
    /// # Errors
    /// The system's refusal.
    pub(super) fn open(&self) -> Result<&DirectFile, FormatError> {
        if self.file.get().is_none() {
            let opened =
                DirectFile::open(&self.path).map_err(|source| FormatError::read(&self.path, source))?;
            // Another thread may have been first; either file will do.
            let _ = self.file.set(opened);
        }
        Ok(self.file.get().expect("set above"))
    }
}

/// The place of bytes in a mapping that they are a part of.
pub(super) fn place_in(mapping: &HostBytes, bytes: &HostBytes) -> Option<u64> {
    let (mapping, bytes) = (mapping.as_slice().as_ptr_range(), bytes.as_slice().as_ptr_range());
    let is_inside = mapping.start <= bytes.start && bytes.end <= mapping.end;
    is_inside.then(|| (bytes.start.addr() - mapping.start.addr()) as u64)
}

/// Bytes that are mapped, and where a copy of them goes, which is as long.
pub struct Transfer<'a> {
    /// What is copied.
    pub from: HostBytes,
    /// Where to.
    pub into: &'a mut [u8],
}

/// Copies from the mapping.
pub fn copy(transfers: Vec<Transfer<'_>>) {
    transfers.into_iter().for_each(|Transfer { from, into }| into.copy_from_slice(from.as_slice()));
}

/// Bytes of a file and the memory that they go to, as many as that holds.
pub struct Read<'a> {
    /// The file.
    pub file: &'a DirectFile,
    /// Where they begin.
    pub offset: u64,
    /// Where they go.
    pub into: &'a mut [u8],
}

impl<'a> Read<'a> {
    /// The same in requests that end at multiples of [`CHUNK`] in the file, so that all but the ends stay aligned.
    fn requests(self) -> impl Iterator<Item = Read<'a>> {
        let Read { file, mut offset, mut into } = self;
        std::iter::from_fn(move || {
            let bytes = (CHUNK - (offset % CHUNK as u64) as usize).min(into.len());
            let request =
                Read { file, offset, into: into.split_off_mut(..bytes).filter(|part| !part.is_empty())? };
            offset += bytes as u64;
            Some(request)
        })
    }

    /// Fills the memory: at once where all is aligned, else by way of `bounce`.
    fn fill(self, bounce: &mut Bounce) -> Result<(), FormatError> {
        let Read { file, offset, into } = self;
        let failed = |source: io::Error| FormatError::ReadAt {
            file: file.path().display().to_string(),
            offset,
            source,
        };
        let cut = || failed(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends before it"));
        let block = DIRECT_ALIGN as u64;
        let is_aligned =
            into.as_ptr().addr().is_multiple_of(DIRECT_ALIGN) && into.len().is_multiple_of(DIRECT_ALIGN);
        if offset.is_multiple_of(block) && is_aligned || !file.is_direct() {
            return if file.read_at(into, offset).map_err(failed)? == into.len() {
                Ok(())
            } else {
                Err(cut())
            };
        }
        let start = offset - offset % block;
        let skipped = (offset - start) as usize;
        let window = &mut bounce.memory()?[..(skipped + into.len()).next_multiple_of(DIRECT_ALIGN)];
        let found = file.read_at(window, start).map_err(failed)?;
        into.copy_from_slice(window[..found].get(skipped..skipped + into.len()).ok_or_else(cut)?);
        Ok(())
    }
}

/// Memory of a thread that requests go through which are not aligned, as large as the largest of them; made for the first.
#[derive(Default)]
struct Bounce(Option<AnonymousMemory>);

impl Bounce {
    fn memory(&mut self) -> Result<&mut [u8], FormatError> {
        if self.0.is_none() {
            let memory = os::anonymous(CHUNK + 2 * DIRECT_ALIGN);
            let refused = |source| FormatError::Read { file: "memory to read into".into(), source };
            self.0 = Some(memory.map_err(refused)?);
        }
        Ok(self.0.as_mut().expect("made above").as_mut())
    }
}

/// Fills the memory of a read on this thread alone.
///
/// # Errors
/// [`FormatError::ReadAt`] naming file and offset.
pub fn read_here(read: Read<'_>) -> Result<(), FormatError> {
    let mut bounce = Bounce::default();
    read.requests().try_for_each(|request| request.fill(&mut bounce))
}

/// Fills the memory of all reads; `progress` hears the bytes. After an error some of the memory is filled.
///
/// # Errors
/// [`FormatError::ReadAt`] naming file and offset of a read that failed.
pub fn read_all<'a>(
    reads: impl IntoIterator<Item = Read<'a>, IntoIter: Send>,
    progress: &mut dyn FnMut(u64),
) -> Result<(), FormatError> {
    let requests = Mutex::new(reads.into_iter().flat_map(Read::requests));
    let (filled, stopped) = (AtomicU64::new(0), AtomicBool::new(false));
    let fill_next = |bounce: &mut Bounce| -> Result<bool, FormatError> {
        let request = requests.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(request) = request.filter(|_| !stopped.load(Ordering::Relaxed)) else { return Ok(false) };
        let bytes = request.into.len() as u64;
        request.fill(bounce).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
        filled.fetch_add(bytes, Ordering::Relaxed);
        Ok(true)
    };
    thread::scope(|scope| {
        let readers: Vec<_> = (1..N_READERS)
            .map(|_| {
                scope.spawn(|| {
                    let mut bounce = Bounce::default();
                    while fill_next(&mut bounce)? {}
                    Ok(())
                })
            })
            .collect();
        let mut bounce = Bounce::default();
        while fill_next(&mut bounce)? {
            progress(filled.swap(0, Ordering::Relaxed));
        }
        readers.into_iter().try_for_each(|reader| reader.join().expect("a reader does not panic"))
    })?;
    progress(filled.into_inner());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_reads_of_any_place_and_length_arrive() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let bytes: Vec<u8> = (0..2 * CHUNK + 12_345).map(|i| (i / 3 % 251) as u8).collect();
        std::fs::write(&path, &bytes).unwrap();
        let file = DirectFile::open(&path).unwrap();
        let mut memory = os::anonymous(bytes.len()).unwrap();
        for cuts in [vec![], vec![1], vec![4096, CHUNK], vec![5, 4096, 4097, CHUNK + 1, 2 * CHUNK + 12_344]] {
            memory.as_mut().fill(0);
            let (mut rest, mut start, mut reads) = (memory.as_mut(), 0, Vec::new());
            for end in cuts.into_iter().chain([bytes.len()]) {
                let into = rest.split_off_mut(..end - start).unwrap();
                reads.push(Read { file: &file, offset: start as u64, into });
                start = end;
            }
            let mut heard = 0;
            read_all(reads, &mut |n| heard += n).unwrap();
            assert_eq!(heard, bytes.len() as u64);
            assert!(memory.as_ref() == bytes);
        }
    }

    #[test]
    fn a_file_that_ends_too_soon_is_named_with_the_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("short");
        std::fs::write(&path, [7; 5000]).unwrap();
        let file = DirectFile::open(&path).unwrap();
        let mut memory = os::anonymous(3 * 4096).unwrap();
        for (offset, bytes) in [(0, 8192), (4096, 1000), (8192, 4096), (1, 5000)] {
            let read = Read { file: &file, offset, into: &mut memory.as_mut()[..bytes] };
            let sentence = read_all([read], &mut |_| ()).unwrap_err().to_string();
            assert!(sentence.contains("short") && sentence.contains(&format!("byte {offset}")), "{sentence}");
        }
    }
}
