//! Where models lie on this machine: a folder, the cache of Hugging Face's own tools, the folder of freetoken.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Component, Path, PathBuf},
};

use super::{listing, name::ModelName};
use crate::model_files::home;

/// The longest name of a commit, and the longest index, that are read.
const MAX_REF_BYTES: u64 = 256;
const MAX_INDEX_BYTES: u64 = 64 << 20;

/// The folder of a model: `name` itself where it is a path; else by its name in the Hugging Face cache, then under
/// [`models_dir`]. A model in the cache of which a file is missing is not there.
pub fn find(name: &Path) -> Option<PathBuf> {
    if name.exists() {
        return Some(snapshot(name, "main").unwrap_or_else(|| name.to_path_buf()));
    }
    let hub_name = name.to_str().and_then(|text| text.parse::<ModelName>().ok());
    let cached =
        hub_name.as_ref().and_then(|name| snapshot(&cache_dir()?.join(name.cache_folder()), name.revision()));
    let is_plain = name.components().all(|part| matches!(part, Component::Normal(_)));
    let own = || is_plain.then(|| models_dir().join(name)).filter(|dir| dir.exists());
    let pulled = || hub_name.as_ref().map(own_dir).filter(|dir| dir.exists());
    cached.or_else(own).or_else(pulled)
}

/// Where freetoken keeps models.
pub fn models_dir() -> PathBuf {
    home().join("models")
}

/// Where freetoken keeps this one.
pub(super) fn own_dir(name: &ModelName) -> PathBuf {
    let (org, name) = name.folders();
    models_dir().join(org).join(name)
}

/// Whether the environment forbids to ask the hub, in the words of Hugging Face's tools.
pub fn offline_by_environment() -> bool {
    env::var("HF_HUB_OFFLINE")
        .is_ok_and(|set| matches!(set.to_lowercase().as_str(), "1" | "on" | "true" | "yes"))
}

/// A folder that the environment names.
pub(super) fn env_dir(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The folder of Hugging Face's tools.
pub(super) fn hugging_face_dir() -> Option<PathBuf> {
    let cache = || {
        let user = || Some(env_dir("HOME").or_else(|| env_dir("USERPROFILE"))?.join(".cache"));
        Some(env_dir("XDG_CACHE_HOME").or_else(user)?.join("huggingface"))
    };
    env_dir("HF_HOME").or_else(cache)
}

fn cache_dir() -> Option<PathBuf> {
    env_dir("HF_HUB_CACHE").or_else(|| Some(hugging_face_dir()?.join("hub")))
}

/// The files of a revision (a branch, or a commit) in a model's folder of the cache.
fn snapshot(folder: &Path, revision: &str) -> Option<PathBuf> {
    let reference = folder.join("refs").join(revision);
    let commit = match fs::metadata(&reference) {
        Ok(file) if file.len() <= MAX_REF_BYTES => fs::read_to_string(reference).ok()?,
        _ => revision.to_owned(),
    };
    let commit = commit.trim();
    let dir = folder.join("snapshots").join(commit);
    (super::name::is_part(commit) && is_whole(&dir)).then_some(dir)
}

/// Whether configuration and weights are all there.
fn is_whole(dir: &Path) -> bool {
    let shards = || -> Option<BTreeSet<String>> {
        let index = dir.join(listing::INDEX);
        fs::metadata(&index).ok().filter(|file| file.len() <= MAX_INDEX_BYTES)?;
        listing::shards(&fs::read(index).ok()?)
    };
    let weights = dir.join(listing::SINGLE).is_file()
        || shards().is_some_and(|shards| shards.iter().all(|shard| dir.join(shard).is_file()));
    weights && dir.join(listing::CONFIG).is_file()
}

#[cfg(test)]
mod tests {
    use super::snapshot;
    use std::fs;

    #[test]
    fn a_snapshot_is_found_by_its_branch_when_all_of_it_is_there() {
        let dir = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().expect("is in a folder")).expect("is made");
            fs::write(path, text).expect("is written");
        };
        write("refs/main", "abc\n");
        write("snapshots/abc/config.json", "{}");
        assert_eq!(snapshot(dir.path(), "main"), None);
        write(
            "snapshots/abc/model.safetensors.index.json",
            r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#,
        );
        write("snapshots/abc/one.safetensors", "");
        assert_eq!(snapshot(dir.path(), "main"), None);
        write("snapshots/abc/two.safetensors", "");
        let whole = Some(dir.path().join("snapshots/abc"));
        assert_eq!(snapshot(dir.path(), "main"), whole);
        assert_eq!(snapshot(dir.path(), "abc"), whole);
        assert_eq!(snapshot(dir.path(), "v1"), None);
        write("refs/main", "../../elsewhere");
        assert_eq!(snapshot(dir.path(), "main"), None);
    }
}
