//! One file from the hub to the disk. It grows as `NAME.part`, goes on where it stopped, and gets its name when it is whole and
//! its checksum is right.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    path::Path,
};

use ring::digest::{Context, SHA256};

use super::{Hub, HubError, listing::RemoteFile};

/// Bytes between two looks at the checksum.
const PIECE_BYTES: usize = 1 << 20;

/// A file that grows.
struct Part {
    file: File,
    sha256: Context,
    bytes: u64,
}

/// Bytes that are here of a file: all, or those of its part.
pub(super) fn bytes_here(dir: &Path, file: &RemoteFile) -> u64 {
    let length = |path| fs::metadata(path).map(|metadata| metadata.len()).ok();
    let whole = length(dir.join(&file.name)).filter(|&bytes| bytes == file.bytes);
    whole.or_else(|| length(dir.join(part_name(file)))).unwrap_or(0).min(file.bytes)
}

/// A part belongs to one content: another one of the same name does not go on with it.
fn part_name(file: &RemoteFile) -> String {
    let content = file.sha256.as_ref().map_or("", |sha256| &sha256[..16]);
    format!("{}.{content}.part", file.name)
}

/// Brings a file into `dir`, unless it is there. `progress` hears how many of its bytes are there.
pub(super) fn download(
    hub: &Hub,
    url: &str,
    file: &RemoteFile,
    dir: &Path,
    progress: &mut dyn FnMut(u64),
) -> Result<(), HubError> {
    let path = dir.join(&file.name);
    if fs::metadata(&path).is_ok_and(|there| there.len() == file.bytes) {
        progress(file.bytes);
        return Ok(());
    }
    let part_path = dir.join(part_name(file));
    let disk = || HubError::disk(&part_path);
    let mut part = Part::open(&part_path, file).map_err(disk())?;
    progress(part.bytes);
    while part.bytes < file.bytes {
        // Whatever came makes the next failure the first again.
        let before = part.bytes;
        hub.patiently(|| match part.grow(hub, url, file, &part_path, progress) {
            Err(HubError::Network { .. }) if part.bytes > before => Ok(()),
            grown => grown,
        })?;
    }
    part.file.sync_all().map_err(disk())?;
    let damaged = |reason: String| {
        let _ = fs::remove_file(&part_path);
        Err(HubError::Damaged { file: file.name.clone(), reason })
    };
    if part.bytes > file.bytes {
        return damaged(format!("more than {} bytes", file.bytes));
    }
    let found: String = part.sha256.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    match &file.sha256 {
        Some(expected) if !expected.eq_ignore_ascii_case(&found) => {
            damaged(format!("its SHA-256 is {found} and should be {expected}"))
        }
        _ => fs::rename(&part_path, &path).map_err(HubError::disk(&path)),
    }
}

impl Part {
    /// Opens what is there already, or begins; only what has a checksum goes on.
    fn open(path: &Path, file: &RemoteFile) -> std::io::Result<Self> {
        let mut part = Part {
            file: OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?,
            sha256: Context::new(&SHA256),
            bytes: 0,
        };
        if file.sha256.is_none() || part.file.metadata()?.len() > file.bytes {
            part.file.set_len(0)?;
        }
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match part.file.read(&mut piece)? {
                0 => return Ok(part),
                n => part.count(&piece[..n]),
            }
        }
    }

    fn count(&mut self, piece: &[u8]) {
        self.sha256.update(piece);
        self.bytes += piece.len() as u64;
    }

    /// Appends what one connection gives.
    fn grow(
        &mut self,
        hub: &Hub,
        url: &str,
        file: &RemoteFile,
        path: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), HubError> {
        let network = |reason: String| HubError::Network { url: url.into(), reason };
        let response = hub.get(url, self.bytes)?;
        let range = response.headers().get("Content-Range").and_then(|range| range.to_str().ok());
        let goes_on = range.is_some_and(|range| range.starts_with(&format!("bytes {}-", self.bytes)));
        if self.bytes > 0 && !goes_on {
            self.restart().map_err(HubError::disk(path))?;
            if response.status().as_u16() == 206 {
                return Err(network("it gives another part than was asked for".into()));
            }
        }
        // One byte more than belongs to it shows that it is too long.
        let mut body = response.into_body().into_reader().take(file.bytes - self.bytes + 1);
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            match body.read(&mut piece) {
                Ok(0) if self.bytes < file.bytes => return Err(network("the connection ended early".into())),
                Ok(0) => return Ok(()),
                Ok(n) => {
                    self.file.write_all(&piece[..n]).map_err(HubError::disk(path))?;
                    self.count(&piece[..n]);
                    progress(self.bytes);
                }
                Err(error) => return Err(network(error.to_string())),
            }
        }
    }

    fn restart(&mut self) -> std::io::Result<()> {
        use std::io::Seek;
        self.file.set_len(0)?;
        self.file.rewind()?;
        (self.sha256, self.bytes) = (Context::new(&SHA256), 0);
        Ok(())
    }
}
