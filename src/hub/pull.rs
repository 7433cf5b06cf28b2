//! [`Pull`]: all files of one model, from what the hub lists to a folder that is whole. The files gather in a folder of another
//! name beside it, so that a model is either there or not.

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
};

use super::{
    Hub, HubError,
    download::{bytes_here, download},
    listing::{Remote, RemoteFile},
    name::ModelName,
    places,
};

/// A download that was planned and not begun.
pub struct Pull<'h> {
    hub: &'h Hub,
    name: ModelName,
    remote: Remote,
    files: Vec<RemoteFile>,
    /// The model, once it is whole.
    dir: PathBuf,
    /// Where its files gather.
    gathering: PathBuf,
    lock_path: PathBuf,
    /// Held while this exists.
    lock: File,
}

impl<'h> Pull<'h> {
    /// Asks the hub what there is, and makes the folder. Nothing of the weights is read yet.
    ///
    /// # Errors
    /// [`HubError`], one sentence.
    pub fn plan(hub: &'h Hub, name: &ModelName) -> Result<Self, HubError> {
        let remote = hub.model(name)?;
        let index = match remote.index() {
            Some(index) => Some(hub.bytes(&hub.file_url(name, &remote, &index.name))?),
            None => None,
        };
        let files = remote.needed(name, index.as_deref())?;
        let dir = places::own_dir(name);
        let beside = |what: &str| {
            let folder = dir.file_name().expect("it ends in the model's name").to_string_lossy();
            dir.with_file_name(format!(".{folder}.{what}"))
        };
        let gathering = beside("part");
        fs::create_dir_all(&gathering).map_err(HubError::disk(&gathering))?;
        let lock_path = beside("lock");
        let lock = locked(&lock_path, &dir)?;
        Ok(Pull { hub, name: name.clone(), remote, files, gathering, dir, lock_path, lock })
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes that are not here.
    pub fn missing_bytes(&self) -> u64 {
        let here = self.files.iter().map(|file| bytes_here(&self.gathering, file)).sum();
        self.total_bytes().saturating_sub(here)
    }

    /// What will come, in one line: model, licence, size, place.
    pub fn summary(&self) -> String {
        let license = match &self.remote.license {
            Some(license) => format!("licence {license}"),
            None => "its page names no licence".into(),
        };
        let (total, missing) = (self.total_bytes(), self.missing_bytes());
        let rest = if missing < total { format!(", {} of it to come", gib(missing)) } else { String::new() };
        let (n_files, dir) = (self.files.len(), self.dir.display());
        format!("{} ({license}): {n_files} files, {}{rest}, into {dir}", self.name, gib(total))
    }

    /// Refuses a model for which the disk is too small.
    ///
    /// # Errors
    /// [`HubError::DiskFull`].
    pub fn check_fits(&self) -> Result<(), HubError> {
        let free = fs4::available_space(&self.gathering).map_err(HubError::disk(&self.gathering))?;
        fits(&self.name, self.missing_bytes(), free, &self.gathering)
    }

    /// Downloads what is missing. `progress` hears how many bytes of the whole are here. Returns the model's folder.
    ///
    /// # Errors
    /// [`HubError`], one sentence; what came stays for the next attempt.
    pub fn run(self, progress: &mut dyn FnMut(u64)) -> Result<PathBuf, HubError> {
        let mut before = 0;
        for file in &self.files {
            let url = self.hub.file_url(&self.name, &self.remote, &file.name);
            download(self.hub, &url, file, &self.gathering, &mut |bytes| progress(before + bytes))?;
            before += file.bytes;
        }
        fs::rename(&self.gathering, &self.dir).map_err(HubError::disk(&self.dir))?;
        drop(self.lock);
        let _ = fs::remove_file(&self.lock_path);
        Ok(self.dir)
    }
}

fn locked(path: &Path, dir: &Path) -> Result<File, HubError> {
    let lock = File::create(path).map_err(HubError::disk(path))?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(HubError::Busy { dir: dir.display().to_string() }),
        Err(TryLockError::Error(error)) => Err(HubError::disk(path)(error)),
    }
}

/// Room that stays free beside a model.
const MARGIN_BYTES: u64 = 256 << 20;

fn fits(name: &ModelName, missing: u64, free: u64, dir: &Path) -> Result<(), HubError> {
    if missing == 0 || missing.saturating_add(MARGIN_BYTES) <= free {
        return Ok(());
    }
    let (needed, free, dir) = (gib(missing), gib(free), dir.display().to_string());
    Err(HubError::DiskFull { name: name.to_string(), needed, free, dir })
}

fn gib(bytes: u64) -> String {
    match bytes {
        0..0x4000_0000 => format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::{MARGIN_BYTES, fits};
    use std::path::Path;

    #[test]
    fn a_disk_that_is_too_small_is_said_with_numbers() {
        let name = "a/b".parse().expect("a name");
        let fits = |missing, free| fits(&name, missing, free, Path::new("models"));
        let error = fits(72 << 30, 40 << 30).expect_err("too small").to_string();
        assert!(error.contains("a/b needs 72.0 GiB more in models, and 40.0 GiB are free"), "{error}");
        assert!(fits(1, MARGIN_BYTES).is_err() && fits(1, MARGIN_BYTES + 1).is_ok() && fits(0, 0).is_ok());
        assert!(fits(u64::MAX, u64::MAX - 1).is_err());
    }
}
