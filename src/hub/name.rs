//! [`ModelName`]: the name of a model on the hub. It becomes part of paths and addresses, so it has no letter that means
//! something in either.

use std::{fmt, str::FromStr};

use super::HubError;

/// Names that go without their organisation.
const SHORT: [&str; 17] = [
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "Qwen/Qwen3-235B-A22B-Instruct-2507",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3.6-35B-A3B",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "zai-org/GLM-4.6",
    "zai-org/GLM-4.7-Flash",
    "deepseek-ai/DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.2",
    "MiniMaxAI/MiniMax-M2",
    "moonshotai/Kimi-K2-Instruct",
];

/// The longest part of a name.
const MAX_PART_BYTES: usize = 96;

/// `ORG/NAME`, or `ORG/NAME@REVISION`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    org: String,
    name: String,
    revision: Option<String>,
}

impl ModelName {
    /// The same model in another state: a branch, a tag or a commit.
    ///
    /// # Errors
    /// [`HubError::Name`] where a letter has no place in a name.
    pub fn at(self, revision: &str) -> Result<Self, HubError> {
        format!("{}/{}@{revision}", self.org, self.name).parse()
    }

    /// `ORG/NAME`
    pub(super) fn repository(&self) -> String {
        format!("{}/{}", self.org, self.name)
    }

    /// The revision that was asked for; the hub's own name of the newest state otherwise.
    pub(super) fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Folders of the Hugging Face cache.
    pub(super) fn cache_folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }

    /// The folder of the organisation, and in it that of the model.
    pub(super) fn folders(&self) -> (&str, String) {
        let revision = self.revision.as_ref().map(|revision| format!("@{revision}")).unwrap_or_default();
        (&self.org, format!("{}{revision}", self.name))
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let (path, revision) = text.split_once('@').map_or((text, None), |(path, at)| (path, Some(at)));
        let short = SHORT
            .iter()
            .find(|full| full.split_once('/').is_some_and(|(_, name)| name.eq_ignore_ascii_case(path)));
        let (org, name) = short.copied().unwrap_or(path).split_once('/').unwrap_or(("", ""));
        if [org, name].into_iter().chain(revision).all(is_part) {
            return Ok(ModelName {
                org: org.into(),
                name: name.into(),
                revision: revision.map(String::from),
            });
        }
        Err(HubError::Name { name: text.into() })
    }
}

/// Whether a text is a plain name on every system.
pub(super) fn is_part(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_PART_BYTES).contains(&text.len())
        && text.bytes().all(plain)
        && !text.starts_with(['.', '-'])
        && !text.ends_with('.')
        && !text.contains("..")
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (org, name) = self.folders();
        write!(f, "{org}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::{ModelName, SHORT};

    fn parsed(text: &str) -> Option<String> {
        text.parse::<ModelName>().ok().map(|name| name.to_string())
    }

    #[test]
    fn names_are_plain() {
        for name in ["a/b", "Qwen/Qwen3-0.6B", "a_b/c.d@v1.0"] {
            assert_eq!(parsed(name).as_deref(), Some(name));
        }
        for name in [
            "", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/b@", "a/b@../c", "a/b c", "a/b\\c", "C:/b",
            "a/-b", "a/b..c", "é/b",
        ] {
            assert_eq!(parsed(name), None, "{name}");
        }
        assert_eq!(parsed(&format!("a/{}", "b".repeat(97))), None);
    }

    #[test]
    fn well_known_names_go_without_an_organisation() {
        assert_eq!(parsed("qwen3.6-35b-a3b").as_deref(), Some("Qwen/Qwen3.6-35B-A3B"));
        assert_eq!(parsed("gpt-oss-20b@v1").as_deref(), Some("openai/gpt-oss-20b@v1"));
        for full in SHORT {
            let short = full.split_once('/').expect("ORG/NAME").1;
            assert_eq!(parsed(short).as_deref(), Some(full));
        }
    }
}
