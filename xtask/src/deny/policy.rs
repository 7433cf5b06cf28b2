//! `deny.toml`: the part of cargo-deny's format that the project uses. A key outside it is refused, so that no rule is
//! written down and not checked.

use anyhow::Result;
use serde::Deserialize;
use spdx::Licensee;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Policy {
    pub(super) graph: Graph,
    pub(super) licenses: Licenses,
    pub(super) bans: Bans,
    pub(super) sources: Sources,
}

/// Which dependencies are looked at.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Graph {
    pub(super) all_features: bool,
}

/// Licences that a crate may have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Licenses {
    pub(super) allow: Vec<Allowed>,
    pub(super) exceptions: Vec<Exception>,
}

/// Licences that one crate may have, beside those of all.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Exception {
    #[serde(rename = "crate")]
    pub(super) name: String,
    pub(super) allow: Vec<Allowed>,
}

/// A licence by its SPDX identifier, with `WITH` and its exception where it has one.
#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Allowed(pub(super) Licensee);

impl TryFrom<String> for Allowed {
    type Error = spdx::ParseError;

    fn try_from(licence: String) -> Result<Self, Self::Error> {
        Licensee::parse(&licence).map(Self)
    }
}

impl Licenses {
    /// The licences under which `name` may be used.
    pub(super) fn allowed_to<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Licensee> + Clone {
        let exceptions = self.exceptions.iter().filter(move |exception| exception.name == name);
        self.allow.iter().chain(exceptions.flat_map(|exception| &exception.allow)).map(|allowed| &allowed.0)
    }
}

/// Crates that may not be there, or not twice.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Bans {
    pub(super) multiple_versions: Level,
    pub(super) deny: Vec<Ban>,
}

/// A crate that is banned in every version.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Ban {
    #[serde(rename = "crate")]
    pub(super) name: String,
    pub(super) reason: String,
}

/// Where crates may come from.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Sources {
    pub(super) unknown_registry: Level,
    pub(super) unknown_git: Level,
    pub(super) allow_registry: Vec<String>,
    pub(super) allow_git: Vec<String>,
}

/// What a finding means.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    Allow,
    Warn,
    Deny,
}

impl Policy {
    /// # Errors
    /// When the text is not TOML, lacks a key, has one that is not known, or names a licence that SPDX does not.
    pub(super) fn parse(text: &str) -> Result<Self> {
        Ok(toml::from_str(text)?)
    }
}
