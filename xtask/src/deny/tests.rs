//! One dependency against one policy.

use serde_json::{Value, json};

use super::{Findings, Metadata, Policy, check};

const POLICY: &str = r#"
    [graph]
    all-features = true
    [licenses]
    allow = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"]
    exceptions = [{ crate = "tables", allow = ["Unicode-3.0"] }]
    [bans]
    multiple-versions = "warn"
    deny = [{ crate = "openssl-sys", reason = "needs a system library" }]
    [sources]
    unknown-registry = "deny"
    unknown-git = "deny"
    allow-registry = ["https://github.com/rust-lang/crates.io-index"]
    allow-git = ["https://example.com/ours"]
"#;
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

fn findings(packages: Value) -> Findings {
    let metadata = json!({ "packages": packages, "workspace_members": ["ours"] });
    let metadata: Metadata = serde_json::from_value(metadata).expect("metadata");
    check(&Policy::parse(POLICY).expect("a policy"), &metadata)
}

fn package(name: &str, license: Option<&str>, source: Option<&str>) -> Value {
    json!({ "id": name, "name": name, "version": "1.0.0", "license": license, "source": source })
}

fn licence_is_allowed(name: &str, license: Option<&str>) -> bool {
    findings(json!([package(name, license, Some(CRATES_IO))])).errors.is_empty()
}

#[test]
fn licences_are_expressions() {
    for allowed in [
        "MIT",
        "GPL-3.0-only OR MIT",
        "MIT/GPL-3.0-only",
        "GPL-3.0-only / MIT",
        "MIT AND Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "(MIT OR GPL-3.0-only) AND (Zlib OR Apache-2.0)",
    ] {
        assert!(licence_is_allowed("some", Some(allowed)), "{allowed}");
    }
    for refused in [
        "GPL-3.0-only",
        "MIT AND GPL-3.0-only",
        "GPL-3.0-only OR MIT AND Zlib",
        "(GPL-3.0-only OR MIT) AND Zlib",
        "MIT WITH LLVM-exception",
        "Apache-2.0 WITH Classpath-exception-2.0",
        "as you like",
        "(MIT",
        "",
    ] {
        assert!(!licence_is_allowed("some", Some(refused)), "{refused}");
    }
    assert!(!licence_is_allowed("some", None));
}

#[test]
fn an_exception_holds_for_its_crate_only() {
    assert!(licence_is_allowed("tables", Some("(MIT OR Apache-2.0) AND Unicode-3.0")));
    assert!(!licence_is_allowed("others", Some("(MIT OR Apache-2.0) AND Unicode-3.0")));
}

#[test]
fn a_banned_crate_is_refused_with_its_reason() {
    let errors = findings(json!([package("openssl-sys", Some("MIT"), Some(CRATES_IO))])).errors;
    assert_eq!(errors, ["openssl-sys 1.0.0 is banned: needs a system library"]);
}

#[test]
fn sources_are_those_that_are_listed() {
    let allowed = |name, source| findings(json!([package(name, Some("MIT"), source)])).errors.is_empty();
    assert!(allowed("some", Some(CRATES_IO)));
    assert!(allowed("some", Some("git+https://example.com/ours?rev=1f#1f00")));
    assert!(allowed("ours", None));
    assert!(!allowed("some", Some("registry+https://example.com/index")));
    assert!(!allowed("some", Some("git+https://example.com/theirs#1f00")));
    assert!(!allowed("some", Some("directory+vendor")));
    assert!(!allowed("some", None), "a path dependency outside of the workspace");
}

#[test]
fn a_second_version_and_an_unused_permission_are_warnings() {
    let twice =
        json!([package("some", Some("MIT"), Some(CRATES_IO)), package("some", Some("MIT"), Some(CRATES_IO))]);
    let findings = findings(twice);
    assert_eq!(findings.errors, [""; 0]);
    let warned = |words: &str| findings.warnings.iter().any(|warning| warning.contains(words));
    assert!(warned("some is there 2 times: 1.0.0, 1.0.0"));
    assert!(warned("the licence Apache-2.0 is allowed, and no crate has it"));
    assert!(warned("the licence Unicode-3.0 is allowed to tables, which does not need it"));
    assert!(!warned("the licence MIT is"));
}

#[test]
fn an_unknown_key_and_an_unknown_licence_are_refused() {
    let error = |policy: &str| Policy::parse(policy).expect_err("refused").to_string();
    assert!(error(&POLICY.replace("allow-git", "allow-gti")).contains("allow-gti"));
    assert!(error(&POLICY.replace("\"MIT\"", "\"MTI\"")).contains("MTI"));
}
