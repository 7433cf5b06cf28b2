//! Hostile files: each ends in its sentence, none in a panic, and whatever opens hands out slices in bounds.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use freetoken::formats::json::{self, UniqueMap, UniqueValue};
use freetoken::formats::{Checkpoint, FormatError, safetensors};
use proptest::prelude::*;
use serde_json::Value;

/// A safetensors file with this header, padded to 8 bytes, and this many zero bytes of data.
fn file(header: &str, data_bytes: usize) -> Vec<u8> {
    let padded = header.to_owned() + &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut bytes = (padded.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(padded.as_bytes());
    bytes.resize(bytes.len() + data_bytes, 0);
    bytes
}

/// A header entry.
fn entry(name: &str, dtype: &str, shape: &str, begin: i64, end: i64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn one(dtype: &str, shape: &str, begin: i64, end: i64, data_bytes: usize) -> Vec<u8> {
    file(&format!("{{{}}}", entry("w", dtype, shape, begin, end)), data_bytes)
}

fn two(first: &str, second: &str, data_bytes: usize) -> Vec<u8> {
    file(&format!("{{{first},{second}}}"), data_bytes)
}

/// The 8 length bytes alone, before a two-byte header.
fn length(bytes: u64) -> Vec<u8> {
    [&bytes.to_le_bytes()[..], b"{}"].concat()
}

fn sentence<T>(result: Result<T, FormatError>, case: &str) -> String {
    result.err().unwrap_or_else(|| panic!("{case}: opened")).to_string()
}

/// A fresh directory with these files.
fn directory(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

/// Opening fails with a sentence that holds `fragment`.
fn refuses(dir: &Path, case: &str, fragment: &str) {
    let sentence = sentence(Checkpoint::open(dir), case);
    assert!(sentence.contains(fragment), "{case}: {sentence}");
}

#[test]
fn bad_shards_end_in_a_sentence() {
    let deep = |open: &str, close: &str| format!("{}0{}", open.repeat(100_000), close.repeat(100_000));
    let long_name = "n".repeat(1 << 20);
    let u8s = |name, begin, end| entry(name, "U8", "[4]", begin, end);
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("no bytes", vec![], "model.safetensors is empty"),
        ("half a length", vec![2, 0, 0], "has 3 bytes, fewer than the 8"),
        ("length 0", length(0), "declares a header of 0 bytes"),
        ("length u64::MAX", length(u64::MAX), "header of 18446744073709551615 bytes, more than"),
        ("negative length", length(-2i64 as u64), "header of 18446744073709551614 bytes, more than"),
        ("length above the limit", length(100_000_001), "more than the format's 100000000"),
        ("length beyond the file", length(3), "declares a header of 3 bytes but only 2 follow"),
        ("not UTF-8", [&1u64.to_le_bytes()[..], b"\xff"].concat(), "is not UTF-8 text (byte 0)"),
        ("not JSON", file("{w}", 0), "is not valid JSON: key must be a string at line 1 column 2"),
        ("cut JSON", file(r#"{"w":"#, 0), "tensor `w`: EOF while parsing"),
        ("an array", file("[]", 0), "expected a JSON object of tensors"),
        ("nested arrays", file(&deep("[", "]"), 0), "expected a JSON object of tensors"),
        ("nested in an entry", file(&format!(r#"{{"w":{}}}"#, deep("[", "]")), 0), "tensor `w`"),
        ("nested unknown field", file(&format!(r#"{{"w":{{"x":{}}}}}"#, deep("[", "]")), 0), "missing field"),
        ("nested objects", file(&deep(r#"{"w":"#, "}"), 0), "missing field"),
        ("unknown dtype", one("Q4_7", "[4]", 0, 4, 4), "tensor `w`: unknown variant `Q4_7`"),
        ("negative dimension", one("U8", "[-4]", 0, 4, 4), "tensor `w`: invalid value: integer `-4`"),
        (
            "fractional dimension",
            one("U8", "[4.5]", 0, 4, 4),
            "tensor `w`: invalid type: floating point `4.5`",
        ),
        ("negative offset", one("U8", "[4]", -4, 0, 4), "tensor `w`: invalid value: integer `-4`"),
        ("missing field", file(r#"{"w":{"dtype":"U8","shape":[4]}}"#, 4), "missing field `data_offsets`"),
        ("metadata of numbers", file(r#"{"__metadata__":{"a":1}}"#, 0), "expected a string"),
        ("duplicate tensor", two(&u8s("w", 0, 4), &u8s("w", 4, 8), 8), "the key `w` appears twice"),
        (
            "duplicate field",
            file(r#"{"w":{"dtype":"U8","shape":[4],"shape":[4],"data_offsets":[0,4]}}"#, 4),
            "tensor `w`: duplicate field `shape`",
        ),
        (
            "duplicate metadata",
            file(r#"{"__metadata__":{},"__metadata__":{}}"#, 0),
            "`__metadata__` appears twice",
        ),
        ("duplicate in metadata", file(r#"{"__metadata__":{"a":"","a":""}}"#, 0), "`a` appears twice"),
        (
            "shape overflows",
            one("U8", "[4294967296,4294967296]", 0, 4, 4),
            "tensor `w` has a size that overflows",
        ),
        (
            "bits overflow",
            one("F64", "[4611686018427387904]", 0, 4, 4),
            "tensor `w` has a size that overflows",
        ),
        (
            "overflow hidden by 0",
            one("U8", "[0,4294967296,4294967296]", 0, 0, 0),
            "has a size that overflows",
        ),
        ("part of a byte", one("F4", "[3]", 0, 2, 2), "tensor `w` ends inside a byte: F4 of shape [3]"),
        ("reversed", one("U8", "[4]", 4, 0, 4), "tensor `w` ends at byte 0, before it begins at byte 4"),
        ("truncated", one("U8", "[4]", 0, 4, 3), "tensor `w` ends at byte 4 of 3: the file is truncated"),
        ("end at i64::MAX", one("U8", "[4]", 0, i64::MAX, 4), "the file is truncated"),
        ("oversized", one("F32", "[4]", 0, 8, 8), "tensor `w` has 8 bytes but F32 of shape [4] takes 16"),
        ("undersized", one("BF16", "[2]", 0, 8, 8), "tensor `w` has 8 bytes but BF16 of shape [2] takes 4"),
        ("many dimensions", one("U8", &format!("{:?}", [2; 20]), 0, 4, 4), "and 12 more takes 1048576"),
        ("overlap", two(&u8s("v", 0, 4), &u8s("w", 2, 6), 6), "tensor `w` begins at byte 2 and overlaps"),
        ("same bytes twice", two(&u8s("v", 0, 4), &u8s("w", 0, 4), 4), "begins at byte 0 and overlaps"),
        ("gap", two(&u8s("v", 0, 4), &u8s("w", 5, 9), 9), "tensor `w` begins at byte 5 and leaves a gap"),
        ("late start", one("U8", "[4]", 4, 8, 8), "tensor `w` begins at byte 4 and leaves a gap"),
        ("trailing bytes", one("U8", "[4]", 0, 4, 7), "ends in 3 bytes that belong to no tensor"),
        ("only trailing bytes", file("{}", 1), "ends in 1 bytes that belong to no tensor"),
        (
            "misaligned",
            two(&entry("v", "U8", "[1]", 0, 1), &entry("w", "F32", "[1]", 1, 5), 5),
            "tensor `w` begins at byte 121 of the file, misaligned for its 4-byte elements",
        ),
        (
            "control characters in a name",
            file(&format!("{{{}}}", entry(r"\u001b[2J", "U8", "[4]", 0, 9)), 9),
            r"tensor `\u{1b}[2J` has 9 bytes",
        ),
        (
            "a name of a megabyte",
            file(&format!("{{{}}}", entry(&long_name, "U8", "[4]", 0, 9)), 9),
            " ... nnn",
        ),
    ];
    for (case, bytes, fragment) in &cases {
        let dir = directory(&[("model.safetensors", bytes)]);
        refuses(dir.path(), case, fragment);
        let sentence = sentence(Checkpoint::open(dir.path()), case);
        assert!(sentence.contains("model.safetensors"), "{case}: {sentence}");
        assert!(sentence.len() < 1000, "{case}: a sentence of {} bytes", sentence.len());
    }
}

#[test]
fn bad_indexes_end_in_a_sentence() {
    let shard = one("U8", "[4]", 0, 4, 4);
    let index = |map: &str| format!(r#"{{"metadata":{{"total_size":4}},"weight_map":{map}}}"#);
    let cases = [
        (
            "absolute",
            index(r#"{"w":"/etc/a.safetensors"}"#),
            "`/etc/a.safetensors`, which is not a plain file name",
        ),
        (
            "parent",
            index(r#"{"w":"../a.safetensors"}"#),
            "tensor `w` in `../a.safetensors`, which is not a plain",
        ),
        ("windows", index(r#"{"w":"..\\a.safetensors"}"#), "not a plain file name"),
        ("drive", index(r#"{"w":"C:a.safetensors"}"#), "not a plain file name"),
        ("the directory itself", index(r#"{"w":"."}"#), "not a plain file name"),
        ("the directory above", index(r#"{"w":".."}"#), "`..`, which is not a plain file name"),
        (
            "control characters",
            index(r#"{"w":"\u001b[2J"}"#),
            r"in `\u{1b}[2J`, which is not a plain file name",
        ),
        (
            "a name of a megabyte",
            index(&format!(r#"{{"w":"{}"}}"#, "n".repeat(1 << 20))),
            "not a plain file name",
        ),
        ("no name", index(r#"{"w":""}"#), "not a plain file name"),
        ("missing shards", index(r#"{"w":"a.safetensors","x":"b.safetensors","y":"c.safetensors"}"#), {
            "lacks 2 of the 3 shards that its index lists, first b.safetensors"
        }),
        (
            "absent tensor",
            index(r#"{"w":"a.safetensors","x":"a.safetensors"}"#),
            "places tensor `x` in a.safetensors",
        ),
        (
            "duplicate tensor",
            index(r#"{"w":"a.safetensors","w":"a.safetensors"}"#),
            "the key `w` appears twice",
        ),
        ("number for a shard", index(r#"{"w":1}"#), "expected a string"),
        ("no weight_map", "{}".to_string(), "missing field `weight_map`"),
        (
            "two weight_maps",
            r#"{"weight_map":{},"weight_map":{}}"#.to_string(),
            "duplicate field `weight_map`",
        ),
        ("no bytes", String::new(), "is not valid JSON: EOF"),
    ];
    for (case, text, fragment) in &cases {
        let dir = directory(&[("a.safetensors", &shard), ("model.safetensors.index.json", text.as_bytes())]);
        refuses(dir.path(), case, fragment);
    }

    let both = index(r#"{"w":"a.safetensors","v":"b.safetensors"}"#);
    let second = two(&entry("v", "U8", "[4]", 0, 4), &entry("w", "U8", "[4]", 4, 8), 8);
    let files: [(&str, &[u8]); 3] = [
        ("a.safetensors", &shard),
        ("b.safetensors", &second),
        ("model.safetensors.index.json", both.as_bytes()),
    ];
    refuses(directory(&files).path(), "tensor in two shards", "tensor `w` lies in both");
}

#[test]
fn bad_paths_end_in_a_sentence() {
    let dir = directory(&[("model.safetensors", &one("U8", "[4]", 0, 4, 4))]);
    let at = |name: &str| dir.path().join(name);
    refuses(&at("absent"), "absent directory", "absent does not exist");
    refuses(&at("model.safetensors"), "file for a directory", "is a file; give the directory");
    refuses(&at("model.safetensors").join("deeper"), "below a file", "cannot read");
    refuses(
        directory(&[("pytorch_model.bin", b"x")]).path(),
        "no weights",
        "holds none of model.safetensors",
    );

    for name in ["model.safetensors", "model.safetensors.index.json"] {
        let dir = directory(&[]);
        fs::create_dir(dir.path().join(name)).unwrap();
        refuses(dir.path(), "directory for a file", "is a directory where a file is expected");
    }
    fs::create_dir(at("config.json")).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let sentence = sentence(checkpoint.file("config.json"), "directory for a configuration");
    assert!(sentence.contains("config.json is a directory"), "{sentence}");
}

#[cfg(unix)]
#[test]
fn links_devices_and_locked_directories_end_in_a_sentence() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let dir = directory(&[]);
    symlink("model.safetensors", dir.path().join("model.safetensors")).unwrap();
    refuses(dir.path(), "link to itself", "cannot read");

    let dir = directory(&[]);
    symlink("/dev/zero", dir.path().join("model.safetensors")).unwrap();
    refuses(dir.path(), "endless device", "is neither a file nor a directory");

    let dir = directory(&[("blob", &one("U8", "[4]", 0, 4, 4))]);
    symlink("blob", dir.path().join("model.safetensors")).unwrap();
    assert!(Checkpoint::open(dir.path()).is_ok(), "a link to a good file, as in the hub's cache");

    let dir = directory(&[]);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o000)).unwrap();
    if fs::read_dir(dir.path()).is_ok() {
        eprintln!("skipped: this user may read every directory");
    } else {
        refuses(dir.path(), "locked directory", "cannot read");
    }
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn missing_tensor_names_the_nearest() {
    let bytes =
        two(&entry("model.norm.weight", "U8", "[4]", 0, 4), &entry("lm_head.weight", "U8", "[4]", 4, 8), 8);
    let dir = directory(&[("model.safetensors", &bytes)]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let sentence = sentence(checkpoint.tensor("language_model.norm.weight"), "missing tensor");
    assert!(sentence.contains("no tensor `language_model.norm.weight` among its 2 tensors"), "{sentence}");
    assert!(sentence.contains("(nearest: `model.norm.weight`)"), "{sentence}");
}

#[test]
fn embedded_files_are_a_checkpoint() {
    let bytes: &'static [u8] = one("U8", "[4]", 0, 4, 4).leak();
    let checkpoint = Checkpoint::from_files("demo", &[("model.safetensors", bytes), ("config.json", b"{}")]);
    let checkpoint = checkpoint.unwrap();
    assert_eq!(checkpoint.dir(), Path::new("demo"));
    assert_eq!(checkpoint.tensor_names().collect::<Vec<_>>(), ["w"]);
    assert_eq!(checkpoint.total_bytes(), 4);
    assert_eq!(checkpoint.tensor("w").unwrap().bytes.as_slice(), [0; 4]);
    assert_eq!(checkpoint.file("config.json").unwrap().unwrap().as_ref(), b"{}");
    assert!(checkpoint.file("tokenizer.json").unwrap().is_none());
    assert!(sentence(Checkpoint::from_files("demo", &[]), "no files").starts_with("demo holds none of"));
}

#[test]
fn bad_json_ends_in_a_sentence() {
    let deep = "[".repeat(100_000);
    let cases: [(&str, &[u8], &str); 7] = [
        ("nested", deep.as_bytes(), "nests arrays or objects too deep (line 1, column 128)"),
        ("not UTF-8", b"{\"a\":\"\xff\"}", "is not UTF-8 text (byte 6)"),
        ("syntax", b"{\n  \"a\": ,\n}", "expected value at line 2 column 8"),
        ("repeated key", br#"{"a":1,"a":2}"#, "the key `a` appears twice at line 1 column 10"),
        ("repeated key below", br#"[{"b":{"a":1,"a":2}}]"#, "the key `a` appears twice"),
        ("two values", b"{} {}", "trailing characters"),
        ("number too large", b"1e999", "number out of range"),
    ];
    for (case, bytes, fragment) in cases {
        let sentence = sentence(json::parse::<UniqueValue>("config.json", bytes), case);
        assert!(sentence.starts_with("config.json ") && sentence.contains(fragment), "{case}: {sentence}");
    }
    let kept: Value = json::parse("config.json", br#"{"a":1,"a":2}"#).unwrap();
    assert_eq!(kept["a"], 2, "a plain value keeps the last of two");
    let sentence =
        sentence(json::parse::<UniqueMap<u32>>("config.json", br#"{"a":1,"a":2}"#), "repeated key");
    assert!(sentence.contains("the key `a` appears twice"), "{sentence}");
}

#[test]
fn unique_value_is_value_otherwise() {
    let text = r#"{"z":[null,true,-1,18446744073709551615,0.5,"é\n"],"a":{"b":{}}}"#;
    let plain: Value = json::parse("config.json", text.as_bytes()).unwrap();
    let UniqueValue(unique) = json::parse("config.json", text.as_bytes()).unwrap();
    assert_eq!(unique.to_string(), plain.to_string());
}

#[test]
fn a_file_may_have_its_limit_and_no_more() {
    let dir = directory(&[("config.json", b"[1, 2]")]);
    let path = dir.path().join("config.json");
    assert_eq!(json::read::<Vec<u32>>(&path, 6).unwrap(), [1, 2]);
    let sentence = sentence(json::read::<Vec<u32>>(&path, 5), "too large");
    assert!(sentence.contains("config.json is larger than the 5 bytes allowed"), "{sentence}");
}

/// The seeds of the fuzz target: those named `valid-` parse, the others do not.
#[test]
fn fuzz_corpus() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/safetensors");
    let (mut n_valid, mut n_bad) = (0, 0);
    for file in fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let parsed = safetensors::parse(&name, &fs::read(&path).unwrap());
        assert_eq!(parsed.is_ok(), name.starts_with("valid-"), "{name}: {:?}", parsed.err());
        if parsed.is_ok() { n_valid += 1 } else { n_bad += 1 }
    }
    assert!(n_valid >= 5 && n_bad >= 15, "{n_valid} valid and {n_bad} bad seeds");
}

/// Whatever parses has its tensors end to end, in bounds, aligned, and sized as their shapes say.
fn check_promises(bytes: &[u8]) -> Result<(), TestCaseError> {
    let Ok(entries) = safetensors::parse("mutant", bytes) else { return Ok(()) };
    let mut ranges = Vec::new();
    for (name, entry) in entries {
        let slice = bytes.get(entry.range.clone());
        prop_assert!(slice.is_some(), "{name} at {:?} of {}", entry.range, bytes.len());
        let bits = entry.shape.iter().product::<usize>() * entry.dtype.bitsize();
        prop_assert_eq!(entry.range.len() * 8, bits);
        prop_assert_eq!(entry.range.start % (entry.dtype.bitsize() / 8).max(1), 0);
        ranges.push((entry.range.start, entry.range.end));
    }
    ranges.sort_unstable();
    prop_assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutants_never_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..3),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = two(&entry("v", "F32", "[2,3]", 0, 24), &entry("w", "BF16", "[8]", 24, 40), 40);
        for (at, byte) in edits {
            let n = bytes.len();
            bytes[at.index(n)] = byte;
        }
        // A digit replaced by a digit leaves JSON that parses, and so reaches the checks behind the parser.
        let places: Vec<usize> = (8..bytes.len()).filter(|&at| bytes[at].is_ascii_digit()).collect();
        for (at, digit) in digits {
            bytes[places[at.index(places.len())]] = digit;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        check_promises(&bytes)?;
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        check_promises(&bytes)?;
        let _ = json::parse::<UniqueValue>("config.json", &bytes);
    }
}
