//! `cargo xtask deny`: licences, bans and sources of every crate that the workspace can pull in, by `deny.toml`.
//!
//! The file is in cargo-deny's format, so that cargo-deny reads it too; this needs no installation and no network.
//! Advisories need a database from the network and stay with cargo-deny.

mod metadata;
mod policy;

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};

use metadata::{Metadata, Package, Source};
use policy::{Level, Policy};

const POLICY: &str = "deny.toml";

/// What breaks the policy, and what is worth a look.
#[derive(Debug, Default)]
struct Findings {
    errors: Vec<String>,
    warnings: Vec<String>,
}

impl Findings {
    fn add(&mut self, level: Level, finding: String) {
        match level {
            Level::Deny => self.errors.push(finding),
            Level::Warn => self.warnings.push(finding),
            Level::Allow => {}
        }
    }
}

/// Prints what was found; an error when something breaks the policy.
pub(crate) fn run() -> Result<()> {
    let policy = fs::read_to_string(POLICY).with_context(|| format!("{POLICY}: cannot be read"))?;
    let policy = Policy::parse(&policy).with_context(|| POLICY.to_owned())?;
    let metadata = Metadata::load(policy.graph.all_features)?;
    let findings = check(&policy, &metadata);
    for warning in &findings.warnings {
        println!("warning: {warning}");
    }
    for error in &findings.errors {
        println!("error: {error}");
    }
    let broken = findings.errors.len();
    ensure!(
        broken == 0,
        "{broken} times something that {POLICY} does not allow; who needs it: cargo tree -i <crate>"
    );
    println!("{} crates: licences, bans and sources are as {POLICY} says", metadata.packages.len());
    Ok(())
}

fn check(policy: &Policy, metadata: &Metadata) -> Findings {
    let mut findings = Findings::default();
    for package in &metadata.packages {
        check_licence(policy, package, &mut findings);
        check_ban(policy, package, &mut findings);
        check_source(policy, metadata, package, &mut findings);
    }
    check_duplicates(policy, metadata, &mut findings);
    check_unused(policy, metadata, &mut findings);
    findings
}

fn check_licence(policy: &Policy, package: &Package, findings: &mut Findings) {
    let error = match package.expression() {
        None => format!("{package} names no licence"),
        Some(Err(reason)) => format!("{package} has a licence that is no SPDX expression: {reason}"),
        Some(Ok(licence)) => {
            let allowed = policy.licenses.allowed_to(&package.name);
            if licence.evaluate(|required| allowed.clone().any(|licensee| licensee.satisfies(required))) {
                return;
            }
            format!("{package} is licensed as {licence}, which is not allowed")
        }
    };
    findings.errors.push(error);
}

fn check_ban(policy: &Policy, package: &Package, findings: &mut Findings) {
    for ban in policy.bans.deny.iter().filter(|ban| ban.name == package.name) {
        findings.errors.push(format!("{package} is banned: {}", ban.reason));
    }
}

fn check_source(policy: &Policy, metadata: &Metadata, package: &Package, findings: &mut Findings) {
    let sources = &policy.sources;
    let listed = |urls: &[String], url: &str| urls.iter().any(|allowed| allowed == url);
    match package.source() {
        Source::Path if metadata.workspace_members.contains(&package.id) => {}
        Source::Path => findings.errors.push(format!("{package} is a folder that is not in the workspace")),
        Source::Registry(url) if listed(&sources.allow_registry, url) => {}
        Source::Registry(url) => {
            findings.add(sources.unknown_registry, format!("{package} comes from the registry {url}"));
        }
        Source::Git(url) if listed(&sources.allow_git, url) => {}
        Source::Git(url) => {
            findings.add(sources.unknown_git, format!("{package} comes from the repository {url}"));
        }
        Source::Other(source) => findings.errors.push(format!("{package} comes from {source}")),
    }
}

fn check_duplicates(policy: &Policy, metadata: &Metadata, findings: &mut Findings) {
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in &metadata.packages {
        versions.entry(&package.name).or_default().push(&package.version);
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        findings.add(
            policy.bans.multiple_versions,
            format!("{name} is there {} times: {}", versions.len(), versions.join(", ")),
        );
    }
}

/// A permission that nobody uses is one that nobody would miss.
fn check_unused(policy: &Policy, metadata: &Metadata, findings: &mut Findings) {
    let needs = |package: &Package, licensee: &spdx::Licensee| {
        let licence = package.expression().and_then(Result::ok);
        licence
            .is_some_and(|licence| licence.requirements().any(|required| licensee.satisfies(&required.req)))
    };
    for licensee in &policy.licenses.allow {
        if !metadata.packages.iter().any(|package| needs(package, &licensee.0)) {
            findings.warnings.push(format!("the licence {} is allowed, and no crate has it", licensee.0));
        }
    }
    for exception in &policy.licenses.exceptions {
        for licensee in &exception.allow {
            let named = |package: &&Package| package.name == exception.name;
            if !metadata.packages.iter().filter(named).any(|package| needs(package, &licensee.0)) {
                findings.warnings.push(format!(
                    "the licence {} is allowed to {}, which does not need it",
                    licensee.0, exception.name
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests;
