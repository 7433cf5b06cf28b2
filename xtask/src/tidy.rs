//! `cargo xtask tidy`: what each op has, and the rules of the tree that no other tool knows.

mod files;
mod ops;
mod rules;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use files::{File, files};

/// The whole tree, so that a clone stays quick.
const TREE_BYTES: u64 = 40 << 20;
/// One file of it.
const FILE_BYTES: u64 = 12 << 20;
/// Bytes that are looked at to tell a text from other files, as git does.
const LOOKED_AT: usize = 8000;

/// Prints the table of ops and every complaint; an error when there is a complaint.
pub(crate) fn run() -> Result<()> {
    let files = files()?;
    let ops = ops::ops(&files)?;
    println!("{}", ops::table(&ops));

    let mut complaints = ops::complaints(&ops);
    complaints.extend(sizes(&files));
    let mut with_unsafe = Vec::new();
    for file in &files {
        let Some(text) = text(Path::new(&file.path))? else { continue };
        complaints.extend(rules::complaints(&file.path, &text));
        if rules::has_unsafe(&text) {
            with_unsafe.push(file.path.as_str());
        }
    }
    complaints.extend(rules::unused_permissions(&with_unsafe));

    for complaint in &complaints {
        println!("{complaint}");
    }
    ensure!(complaints.is_empty(), "{} complaints", complaints.len());
    println!("{} files are tidy", files.len());
    Ok(())
}

fn sizes(files: &[File]) -> Vec<String> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    let total = files.iter().map(|file| file.bytes).sum();
    let large = files.iter().filter(|file| file.bytes > FILE_BYTES);
    let mut complaints: Vec<_> = large
        .map(|file| {
            format!("{}: {} MiB in one file, at most {}", file.path, mib(file.bytes), mib(FILE_BYTES))
        })
        .collect();
    if total > TREE_BYTES {
        complaints.push(format!("the tree has {} MiB, at most {}", mib(total), mib(TREE_BYTES)));
    }
    complaints
}

/// The file's text, or `None` where it holds something else.
fn text(path: &Path) -> Result<Option<String>> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    let is_text = !bytes.iter().take(LOOKED_AT).any(|&byte| byte == 0);
    Ok(String::from_utf8(bytes).ok().filter(|_| is_text))
}
