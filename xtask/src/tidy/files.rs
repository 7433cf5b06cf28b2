//! The files of the project: those that git tracks or would add, or all of them in a copy without git.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// One file.
#[derive(Debug)]
pub(super) struct File {
    /// From the project's root, with `/`.
    pub(super) path: String,
    pub(super) bytes: u64,
}

/// All files, ordered by path, without links and without what is only in the index.
pub(super) fn files() -> Result<Vec<File>> {
    let mut paths = Vec::new();
    if Path::new(".git").exists() {
        paths = in_git()?;
    } else {
        walk(Path::new("."), &mut paths)?;
    }
    paths.sort_unstable();
    paths.dedup();
    let file = |path: String| {
        let metadata = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_file)?;
        Some(File { path, bytes: metadata.len() })
    };
    Ok(paths.into_iter().filter_map(file).collect())
}

fn in_git() -> Result<Vec<String>> {
    // In a container the checkout often belongs to another user, which git refuses by default.
    let args = ["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(args).output().context("git cannot be started")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr).trim());
    let paths = String::from_utf8(output.stdout).context("a path that is not UTF-8")?;
    Ok(paths.split_terminator('\0').map(str::to_owned).collect())
}

fn walk(dir: &Path, paths: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let path = entry.path().display().to_string().replace('\\', "/");
            paths.push(path.trim_start_matches("./").to_owned());
        } else if entry.file_type()?.is_dir() && entry.file_name() != "target" {
            walk(&entry.path(), paths)?;
        }
    }
    Ok(())
}
