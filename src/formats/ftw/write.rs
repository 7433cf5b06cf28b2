//! Writes an FTW directory so that it is complete, or says that it is not, wherever the work was cut off.
//!
//! A directory is begun with a journal. Each shard appears under its name when it is whole, and is then noted in the journal with
//! its checksum; the index comes last, and the journal goes. A second run of the same plan goes on behind the last noted shard.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use freetoken_backend::ExpertRecord;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{
    super::{
        FormatError,
        error::TensorFault,
        json,
        safetensors::{byte_len, shown},
        write::{Failure, TensorSpec, replace},
    },
    INDEX_FILE, JOURNAL_FILE,
    index::{ALIGN, EntryFile, FORMAT, IndexFile, RecordFile, ShardFile, VERSION, dtype_name},
    records::entry_name,
};

/// The `format` of a journal.
const JOURNAL_FORMAT: &str = "freetoken_convert";

/// What a shard will hold.
#[derive(Debug, Clone, Default)]
struct PlannedShard {
    entries: Vec<EntryFile>,
    /// Where it begins in the region.
    start: u64,
    bytes: u64,
}

/// What a directory will hold: shards of entries, one behind the other.
#[derive(Debug, Clone, Default)]
pub struct Plan {
    shards: Vec<PlannedShard>,
}

impl Plan {
    /// Bytes of the region.
    pub fn bytes(&self) -> u64 {
        self.shards.last().map_or(0, |shard| shard.start + shard.bytes)
    }

    /// Number of shards.
    pub fn n_shards(&self) -> usize {
        self.shards.len()
    }

    /// Bytes of a shard.
    pub fn shard_bytes(&self, shard: usize) -> u64 {
        self.shards[shard].bytes
    }

    /// Adds an empty shard, which the next entries go to. A shard has at least one.
    pub fn begin_shard(&mut self) {
        let start = self.bytes();
        self.shards.push(PlannedShard { start, ..PlannedShard::default() });
    }

    /// Adds a tensor to the last shard. Asserts that there is one.
    ///
    /// # Errors
    /// [`FormatError`] for an element type that an index has no name for, and for a size that overflows.
    pub fn add_tensor(&mut self, tensor: &TensorSpec) -> Result<(), FormatError> {
        let wrong = |fault| FormatError::tensor(INDEX_FILE, &tensor.name, fault);
        let bytes = byte_len(tensor.dtype, &tensor.shape).map_err(wrong)?;
        let dtype = dtype_name(tensor.dtype).ok_or_else(|| {
            wrong(TensorFault::PartByte { dtype: tensor.dtype, shape: shown(&tensor.shape) })
        })?;
        self.add("weight", &tensor.name, dtype, tensor.shape.clone(), bytes as u64, None);
        Ok(())
    }

    /// Adds the experts of a MoE layer to the last shard. Asserts that there is one.
    pub fn add_records(&mut self, moe_layer: usize, record: &ExpertRecord, n_experts: usize, module: &str) {
        let stated = RecordFile {
            format: record.format.to_string(),
            hidden: record.hidden,
            intermediate: record.intermediate,
            module: module.to_string(),
        };
        let (shape, bytes) = (vec![n_experts, record.bytes], (n_experts * record.bytes) as u64);
        self.add("expert_records", &entry_name(moe_layer), "uint8", shape, bytes, Some(stated));
    }

    fn add(
        &mut self,
        kind: &str,
        name: &str,
        dtype: &str,
        shape: Vec<usize>,
        bytes: u64,
        record: Option<RecordFile>,
    ) {
        let shard = self.shards.last_mut().expect("a shard was begun");
        shard.entries.push(EntryFile {
            name: name.to_string(),
            kind: kind.to_string(),
            dtype: dtype.to_string(),
            shape,
            global_off: shard.start + shard.bytes,
            nbytes: bytes,
            record,
        });
        // An entry of no bytes takes a page all the same, so that no shard is empty.
        shard.bytes += bytes.max(1).next_multiple_of(ALIGN);
    }

    /// Tells plans from each other; `source` tells sources from each other.
    fn fingerprint(&self, source: &str) -> String {
        let entries: Vec<_> = self.shards.iter().map(|shard| &shard.entries).collect();
        let text = serde_json::to_string(&(source, entries)).expect("names and numbers serialise");
        hexadecimal(&Sha256::digest(text))
    }
}

/// What is known of a directory that is not complete.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    format: String,
    /// Of the plan and its source.
    fingerprint: String,
    /// The shards that are there, the first of the plan.
    done: Vec<ShardFile>,
}

/// Why a directory cannot be written to.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Something is there that nobody asked to remove.
    #[error("{dir} {what}")]
    Taken {
        /// The directory.
        dir: String,
        /// What is there, and what to do.
        what: &'static str,
    },
    /// It cannot be read or written.
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// A directory that is being written.
#[derive(Debug)]
pub struct Writer<'p> {
    dir: PathBuf,
    plan: &'p Plan,
    journal: Journal,
}

impl<'p> Writer<'p> {
    /// Begins a directory, or goes on with one that a run of the same plan from the same `source` left. With `force`, what another
    /// plan wrote there is removed first.
    ///
    /// # Errors
    /// [`ClaimError`] for a directory that holds something else, or that cannot be written.
    pub fn begin(dir: &Path, plan: &'p Plan, source: &str, force: bool) -> Result<Self, ClaimError> {
        let taken = |what| Err(ClaimError::Taken { dir: dir.display().to_string(), what });
        fs::create_dir_all(dir).map_err(|source| FormatError::write(dir, plan.bytes(), source))?;
        let names = list(dir)?;
        let has = |wanted: &str| names.iter().any(|name| name == wanted);
        let fingerprint = plan.fingerprint(source);
        let journal_path = dir.join(JOURNAL_FILE);
        let journal: Option<Journal> = match has(JOURNAL_FILE) {
            true => Some(json::read(&journal_path, json::CONFIG_LIMIT)?),
            false => None,
        };
        if has(INDEX_FILE) && !force {
            return taken(
                "holds a complete FTW checkpoint: give --force to write it anew, or another directory",
            );
        }
        match journal.filter(|journal| journal.format == JOURNAL_FORMAT && journal.fingerprint == fingerprint)
        {
            Some(journal) if !has(INDEX_FILE) => {
                let mut writer = Writer { dir: dir.to_path_buf(), plan, journal };
                writer.forget_what_is_gone();
                return Ok(writer);
            }
            _ if force || !has(JOURNAL_FILE) => {}
            _ => {
                return taken(
                    "holds an unfinished conversion of another source, or in another format: give --force to begin anew",
                );
            }
        }
        let is_ours = has(INDEX_FILE) || has(JOURNAL_FILE);
        if !is_ours && names.iter().any(|name| !is_leftover(name)) {
            return taken("is not empty and holds no FTW checkpoint: give a new directory");
        }
        // From here on the directory says that it is not complete; the old index goes only then, and the old shards after it.
        let writer = Writer {
            dir: dir.to_path_buf(),
            plan,
            journal: Journal { format: JOURNAL_FORMAT.into(), fingerprint, done: Vec::new() },
        };
        writer.write_journal()?;
        let old = names.iter().filter(|name| is_shard(name) || is_leftover(name));
        for name in has(INDEX_FILE).then_some(INDEX_FILE).into_iter().chain(old.map(String::as_str)) {
            let path = dir.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(FormatError::write(&path, 0, error).into());
                }
                _ => sync_dir(dir),
            }
        }
        Ok(writer)
    }

    /// Whether a shard is there already.
    pub fn is_done(&self, shard: usize) -> bool {
        shard < self.journal.done.len()
    }

    /// Writes the next shard. `fill` is called for each entry by name, in order, and writes its bytes, all of them and no more.
    /// Asserts that it is the next.
    ///
    /// # Errors
    /// [`FormatError`] for an entry that gets too many or too few bytes, a full disk, or any other failed write.
    pub fn shard(
        &mut self,
        shard: usize,
        fill: &mut dyn FnMut(&str, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), FormatError> {
        assert_eq!(shard, self.journal.done.len(), "shards are written in order");
        let PlannedShard { entries, start, bytes } = &self.plan.shards[shard];
        let file = shard_name(shard);
        let path = self.dir.join(&file);
        let mut sha256 = Sha256::new();
        replace(&path, *bytes, |out| {
            let mut out = Hashed { out, sha256: &mut sha256, written: 0 };
            for entry in entries {
                let end = entry.global_off - start + entry.nbytes;
                let filled = fill(&entry.name, &mut out);
                if out.written != end && filled.is_ok() || out.written > end {
                    let found = entry.nbytes + out.written - end;
                    return Err(Failure::Io(io::Error::other(format!(
                        "`{}` has {found} bytes where {} were planned: did its source change?",
                        entry.name, entry.nbytes
                    ))));
                }
                filled?;
                let padding = entry.nbytes.max(1).next_multiple_of(ALIGN) - entry.nbytes;
                out.write_all(&[0; ALIGN as usize][..padding as usize])?;
            }
            Ok(())
        })?;
        sync_dir(&self.dir);
        let sha256 = Some(hexadecimal(&sha256.finalize()));
        self.journal.done.push(ShardFile { file, global_off: *start, nbytes: *bytes, sha256 });
        self.write_journal()
    }

    /// Copies a file of the source beside the shards.
    ///
    /// # Errors
    /// [`FormatError`] for a file that cannot be read, a full disk, or any other failed write.
    pub fn copy(&self, from: &Path, name: &OsStr) -> Result<(), FormatError> {
        let refused = |source| FormatError::read(from, source);
        let mut file = File::open(from).map_err(refused)?;
        let bytes = file.metadata().map_err(refused)?.len();
        replace(&self.dir.join(name), bytes, |out| Ok(io::copy(&mut file, out).map(drop)?))
    }

    /// Writes the index: the directory is complete. Asserts that all shards are there.
    ///
    /// # Errors
    /// [`FormatError`] for a full disk, or any other failed write.
    pub fn finish(self) -> Result<(), FormatError> {
        assert_eq!(self.journal.done.len(), self.plan.n_shards(), "an index of shards that are there");
        let index = IndexFile {
            format: FORMAT.into(),
            version: VERSION,
            align: ALIGN,
            shard_limit: self.plan.shards.iter().map(|shard| shard.bytes).max().unwrap_or(0),
            total_bytes: self.plan.bytes(),
            quant_format: None,
            layer_quant_formats: None,
            expert_bank_num_layers: None,
            tensors: self.plan.shards.iter().flat_map(|shard| shard.entries.iter().cloned()).collect(),
            shards: self.journal.done,
        };
        write_json(&self.dir.join(INDEX_FILE), &index)?;
        sync_dir(&self.dir);
        let journal = self.dir.join(JOURNAL_FILE);
        fs::remove_file(&journal).map_err(|source| FormatError::write(&journal, 0, source))
    }

    fn write_journal(&self) -> Result<(), FormatError> {
        write_json(&self.dir.join(JOURNAL_FILE), &self.journal)?;
        sync_dir(&self.dir);
        Ok(())
    }

    /// Takes shards out of the journal from the first on that is not there as it was written.
    fn forget_what_is_gone(&mut self) {
        let is_there = |(i, shard): (usize, &ShardFile)| {
            let planned = self.plan.shards.get(i).is_some_and(|planned| planned.bytes == shard.nbytes);
            let found =
                fs::metadata(self.dir.join(shard_name(i))).is_ok_and(|found| found.len() == shard.nbytes);
            planned && found && shard.file == shard_name(i)
        };
        let n = self.journal.done.iter().enumerate().take_while(|&place| is_there(place)).count();
        self.journal.done.truncate(n);
    }
}

/// The SHA-256 of what `read` gives, in hexadecimal digits; `progress` hears the bytes.
///
/// # Errors
/// Those of `read`.
pub fn checksum(read: &mut dyn io::Read, progress: &mut dyn FnMut(u64)) -> io::Result<String> {
    let (mut sha256, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
    loop {
        match read.read(&mut buffer) {
            Ok(0) => return Ok(hexadecimal(&sha256.finalize())),
            Ok(n) => {
                sha256.update(&buffer[..n]);
                progress(n as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn shard_name(shard: usize) -> String {
    format!("freetoken-{shard:05}.ftw")
}

fn is_shard(name: &str) -> bool {
    name.starts_with("freetoken-") && name.ends_with(".ftw")
}

/// Whether a file is one that a writer which was cut off left under another name.
fn is_leftover(name: &str) -> bool {
    let is_ours = |name| is_shard(name) || name == INDEX_FILE || name == JOURNAL_FILE;
    name.strip_suffix(".tmp").is_some_and(is_ours)
}

/// Names of the files of a directory, as far as they are text.
fn list(dir: &Path) -> Result<Vec<String>, FormatError> {
    let refused = |source| FormatError::read(dir, source);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(refused)? {
        names.push(entry.map_err(refused)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), FormatError> {
    let text = serde_json::to_string_pretty(value).expect("names and numbers serialise");
    replace(path, text.len() as u64, |out| Ok(out.write_all(text.as_bytes())?))
}

/// Makes renames in a directory last. Systems that cannot open one keep them in order by themselves.
fn sync_dir(dir: &Path) {
    if let Ok(dir) = File::open(dir) {
        let _ = dir.sync_all();
    }
}

/// Passes bytes on, and counts and hashes them.
struct Hashed<'a> {
    out: &'a mut dyn Write,
    sha256: &'a mut Sha256,
    written: u64,
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.sha256.update(&bytes[..n]);
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
