//! What the hub says of a model: its licence and its files; and which of those freetoken reads. Names of files come from
//! outside and become paths: only plain ones pass.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::{
    HubError,
    name::{ModelName, is_part},
};

pub(super) const CONFIG: &str = "config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// What is read beside the weights.
const SMALL: [&str; 7] = [
    CONFIG,
    INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// A model on the hub.
#[derive(Debug, PartialEq)]
pub(super) struct Remote {
    /// The state that is downloaded.
    pub(super) commit: String,
    /// The licence's name, where the model's page names one.
    pub(super) license: Option<String>,
    /// All files by name.
    files: BTreeMap<String, RemoteFile>,
}

/// A file on the hub.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// In hexadecimal, of large files.
    pub(super) sha256: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    sha: String,
    siblings: Vec<Sibling>,
    #[serde(default, rename = "cardData")]
    card: Value,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The shards that an index lists; `None` where it is none.
pub(super) fn shards(index: &[u8]) -> Option<BTreeSet<String>> {
    let index: Index = serde_json::from_slice(index).ok()?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    shards.iter().all(|shard| is_part(shard)).then_some(shards)
}

impl Remote {
    /// Reads the answer to `/api/models/...?blobs=true`; the error is a reason.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let answer: Answer = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        if !is_part(&answer.sha) {
            return Err(format!("its commit is {:?}", answer.sha));
        }
        let card = |field: &str| answer.card[field].as_str().map(String::from);
        let mut files = BTreeMap::new();
        for sibling in answer.siblings {
            let (sha256, size) = sibling.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            let is_digest =
                |sha: &String| sha.len() == 64 && sha.bytes().all(|byte| byte.is_ascii_hexdigit());
            if let Some(bad) = sha256.as_ref().filter(|sha| !is_digest(sha)) {
                return Err(format!("{} has the checksum {bad:?}", sibling.rfilename));
            }
            let Some(bytes) = size.or(sibling.size) else {
                return Err(format!("{} has no size", sibling.rfilename));
            };
            let name = sibling.rfilename;
            files.insert(name.clone(), RemoteFile { name, bytes, sha256 });
        }
        Ok(Remote { commit: answer.sha, license: card("license_name").or_else(|| card("license")), files })
    }

    /// Refuses a model that has a file whose name would leave its folder, whether it is read or not.
    pub(super) fn check_names(&self, model: &ModelName) -> Result<(), HubError> {
        let is_path = |name: &String| {
            let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
            name.split('/').all(plain) && !name.contains(['\\', ':', '\0'])
        };
        match self.files.keys().find(|name| !is_path(name)) {
            Some(file) => Err(HubError::FileName { name: model.to_string(), file: file.clone() }),
            None => Ok(()),
        }
    }

    /// The list of shards, where there is one.
    pub(super) fn index(&self) -> Option<&RemoteFile> {
        self.files.get(INDEX)
    }

    /// The files that freetoken reads, small ones first; `index` is the content of [`Remote::index`].
    pub(super) fn needed(
        &self,
        model: &ModelName,
        index: Option<&[u8]>,
    ) -> Result<Vec<RemoteFile>, HubError> {
        let named = |name: &str| {
            let missing = || HubError::Missing { name: model.to_string(), file: name.into() };
            self.files.get(name).cloned().ok_or_else(missing)
        };
        let weights = match index {
            Some(index) => shards(index).ok_or_else(|| HubError::Listing {
                url: format!("{INDEX} of {model}"),
                reason: "it lists no plain names of shards".into(),
            })?,
            None => BTreeSet::from([SINGLE.to_owned()]),
        };
        let licences = self.files.keys().filter(|name| is_part(name) && name.starts_with("LICENSE"));
        let small = SMALL.iter().copied().filter(|&name| self.files.contains_key(name) || name == CONFIG);
        let names = small.chain(licences.map(String::as_str)).chain(weights.iter().map(String::as_str));
        names.map(named).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Remote, shards};
    use serde_json::{Value, json};

    fn remote(files: Value) -> Result<Remote, String> {
        Remote::parse(json!({"sha": "abc", "siblings": files}).to_string().as_bytes())
    }

    fn names(remote: &Remote, index: Option<&str>) -> Result<Vec<String>, String> {
        let model = "a/b".parse().expect("a name");
        let needed = remote.needed(&model, index.map(str::as_bytes)).map_err(|error| error.to_string())?;
        Ok(needed.into_iter().map(|file| file.name).collect())
    }

    fn files(names: &[&str]) -> Value {
        names.iter().map(|name| json!({"rfilename": name, "size": 1})).collect()
    }

    #[test]
    fn only_what_is_read_is_needed() {
        let all = remote(files(&[
            "README.md",
            "LICENSE",
            "config.json",
            "tokenizer.json",
            "model.safetensors",
            "original/model.safetensors",
            "x.gguf",
            "consolidated.safetensors",
        ]))
        .expect("a listing");
        assert_eq!(
            names(&all, None).expect("whole"),
            ["config.json", "tokenizer.json", "LICENSE", "model.safetensors"]
        );
        let sharded = remote(files(&["config.json", "b.safetensors", "a.safetensors", "c.safetensors"]))
            .expect("a listing");
        let index = r#"{"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "a.safetensors"}}"#;
        assert_eq!(
            names(&sharded, Some(index)).expect("whole"),
            ["config.json", "a.safetensors", "b.safetensors"]
        );
        assert!(names(&sharded, None).expect_err("no weights").contains("model.safetensors"));
        assert!(
            names(&sharded, Some(r#"{"weight_map": {"x": "d.safetensors"}}"#))
                .expect_err("no shard")
                .contains("d.safetensors")
        );
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for name in ["../model.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "a//b", "a\\b", "."] {
            let listing = remote(files(&["config.json", name])).expect("a listing");
            let error =
                listing.check_names(&"a/b".parse().expect("a name")).expect_err("refused").to_string();
            assert!(error.contains("a/b has a file named"), "{error}");
        }
        assert_eq!(shards(br#"{"weight_map": {"x": "../a.safetensors"}}"#), None);
    }

    #[test]
    fn a_listing_that_makes_no_sense_is_refused() {
        for (listing, reason) in [
            (json!({"sha": "../x", "siblings": []}), "commit"),
            (json!({"sha": "abc", "siblings": [{"rfilename": "config.json"}]}), "no size"),
            (
                json!({"sha": "abc", "siblings": [{"rfilename": "a", "lfs": {"sha256": "xyz", "size": 1}}]}),
                "checksum",
            ),
            (json!({"error": "no"}), "sha"),
        ] {
            let error = Remote::parse(listing.to_string().as_bytes()).expect_err("refused");
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_licence_is_the_one_of_the_page() {
        let license = |card: Value| {
            let listing = json!({"sha": "abc", "siblings": [], "cardData": card}).to_string();
            Remote::parse(listing.as_bytes()).expect("a listing").license
        };
        assert_eq!(license(json!({"license": "apache-2.0"})).as_deref(), Some("apache-2.0"));
        assert_eq!(
            license(json!({"license": "other", "license_name": "modified-mit"})).as_deref(),
            Some("modified-mit")
        );
        assert_eq!(license(json!(null)), None);
    }
}
