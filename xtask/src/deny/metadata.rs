//! The dependencies, as `cargo metadata` lists them: for every target and, on request, with every feature.

use std::fmt;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use spdx::{Expression, ParseMode};

use crate::cargo;

/// Every crate that can be part of a build.
#[derive(Debug, Deserialize)]
pub(super) struct Metadata {
    pub(super) packages: Vec<Package>,
    /// Ids of the packages that are ours.
    pub(super) workspace_members: Vec<String>,
}

/// One version of a crate.
#[derive(Debug, Deserialize)]
pub(super) struct Package {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) version: String,
    license: Option<String>,
    source: Option<String>,
}

/// Where a crate comes from. URLs are without branch, tag or commit.
#[derive(Debug)]
pub(super) enum Source<'a> {
    Path,
    Registry(&'a str),
    Git(&'a str),
    /// A kind that is not known here.
    Other(&'a str),
}

impl Metadata {
    /// Asks cargo, which may download a crate but changes nothing in `Cargo.lock`.
    pub(super) fn load(all_features: bool) -> Result<Self> {
        let mut cargo = cargo("metadata --format-version 1 --locked");
        if all_features {
            cargo.arg("--all-features");
        }
        let output = cargo.stderr(Stdio::inherit()).output().context("cargo cannot be started")?;
        ensure!(output.status.success(), "cargo metadata failed");
        serde_json::from_slice(&output.stdout).context("cargo metadata")
    }
}

impl Package {
    /// The licence, if the package names one; older crates write `/` for `OR`.
    pub(super) fn expression(&self) -> Option<Result<Expression, spdx::ParseError>> {
        self.license.as_deref().map(|text| Expression::parse_mode(text, ParseMode::LAX))
    }

    pub(super) fn source(&self) -> Source<'_> {
        let Some(source) = self.source.as_deref() else { return Source::Path };
        match source.split_once('+') {
            Some(("registry" | "sparse", url)) => Source::Registry(url),
            Some(("git", url)) => Source::Git(url.split(['?', '#']).next().unwrap_or(url)),
            _ => Source::Other(source),
        }
    }
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}
