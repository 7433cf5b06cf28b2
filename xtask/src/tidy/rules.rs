//! The rules that a file's text is held to. Reads no file: paths and texts in, complaints out.

/// Files, or folders by their trailing `/`, that may hold `unsafe`, and why.
const UNSAFE: [(&str, &str); 15] = [
    ("backends/api/src/filling.rs", "a bank is filled while others of its records are read"),
    ("backends/api/src/os/linux.rs", "advice to the kernel about pages"),
    ("backends/cpu/src/isa/", "intrinsics of an instruction set that was detected"),
    ("backends/cpu/src/memory.rs", "a view becomes a slice"),
    ("backends/cpu/src/parallel.rs", "threads write disjoint parts of one matrix"),
    ("backends/cpu/src/pool.rs", "workers run a job that lies on the stack of the thread that waits"),
    ("backends/cuda/src/driver.rs", "calls of the driver"),
    ("backends/cuda/tests/programs.rs", "an allocator that counts"),
    ("backends/wgpu/src/adapter.rs", "a device's memory, as Vulkan tells it"),
    (
        "backends/wgpu/src/pipelines.rs",
        "shaders without run-time checks, validated by a test; a cache from the disk",
    ),
    ("backends/wgpu/src/vulkan.rs", "memory that both sides see, and an extension that wgpu does not know"),
    ("src/formats/mapped.rs", "a file is mapped"),
    ("src/moe/reader.rs", "a thread fills the piece of a bank that was given to it"),
    ("tests/no_allocation.rs", "an allocator that counts"),
    ("xtask/src/kernels/nvrtc.rs", "calls of the compiler's library"),
];

/// Parts that know no device: what they say is said in ops.
const DEVICE_FREE: [&str; 3] = ["src/models/", "src/moe/", "src/scheduler/"];
const BACKENDS: [&str; 4] = ["cuda", "cudarc", "vulkan", "wgpu"];

const UNFINISHED: [&str; 3] = ["todo!", "unimplemented!", "FIXME"];
const MACHINE_PATHS: [&str; 3] = ["/work/", "/root/", "/home/"];

/// Endings of files that people write.
const SOURCE: [&str; 14] =
    ["rs", "wgsl", "cu", "cuh", "md", "toml", "py", "sh", "js", "ts", "css", "html", "yml", "yaml"];

/// One property that no line of some files may have.
struct Rule {
    holds_for: fn(&str) -> bool,
    broken_by: fn(&str) -> bool,
    complaint: &'static str,
}

const RULES: [Rule; 5] = [
    Rule {
        holds_for: is_source,
        broken_by: ends_with_space,
        complaint: "white space at the end of the line",
    },
    Rule {
        holds_for: is_source,
        broken_by: is_unfinished,
        complaint: "unfinished work: finish it, or leave it out",
    },
    Rule {
        holds_for: is_device_free,
        broken_by: names_backend,
        complaint: "a backend's name: say it in ops",
    },
    Rule {
        holds_for: is_not_lock_file,
        broken_by: has_machine_path,
        complaint: "a path of one person's machine",
    },
    Rule {
        holds_for: is_safe,
        broken_by: has_unsafe_word,
        complaint: "`unsafe` in a file that tidy does not list",
    },
];

/// What is wrong with one file.
pub(super) fn complaints(path: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if needs_header(path) && !text.starts_with("//!") {
        complaints.push(format!("{path}: no `//!` header that says what the file is"));
    }
    // This file has in it what it looks for.
    for rule in RULES.iter().filter(|rule| path != file!() && (rule.holds_for)(path)) {
        let broken = text.split('\n').enumerate().filter(|(_, line)| (rule.broken_by)(line));
        complaints.extend(broken.map(|(index, _)| format!("{path}:{}: {}", index + 1, rule.complaint)));
    }
    complaints
}

/// Whether a text has `unsafe` outside of comments.
pub(super) fn has_unsafe(text: &str) -> bool {
    text.lines().any(has_unsafe_word)
}

/// Permissions that none of the files with `unsafe` needs.
pub(super) fn unused_permissions(with_unsafe: &[&str]) -> Vec<String> {
    let unused = UNSAFE.iter().filter(|(place, _)| !with_unsafe.iter().any(|path| lies_in(path, place)));
    unused.map(|(place, _)| format!("{}: {place} has no `unsafe`: take it off the list", file!())).collect()
}

fn needs_header(path: &str) -> bool {
    let crates =
        path.strip_prefix("backends/").and_then(|path| path.split_once('/')).map_or(path, |(_, path)| path);
    path.ends_with(".rs") && (crates.starts_with("src/") || path.starts_with("xtask/src/"))
}

fn is_source(path: &str) -> bool {
    path.starts_with(".ci/") || path.rsplit_once('.').is_some_and(|(_, ending)| SOURCE.contains(&ending))
}

fn is_device_free(path: &str) -> bool {
    DEVICE_FREE.iter().any(|dir| path.starts_with(dir))
}

fn is_not_lock_file(path: &str) -> bool {
    !path.ends_with(".lock")
}

fn is_safe(path: &str) -> bool {
    path.ends_with(".rs") && !UNSAFE.iter().any(|(place, _)| lies_in(path, place))
}

fn lies_in(path: &str, place: &str) -> bool {
    path == place || place.ends_with('/') && path.starts_with(place)
}

fn ends_with_space(line: &str) -> bool {
    line.ends_with(char::is_whitespace)
}

fn is_unfinished(line: &str) -> bool {
    UNFINISHED.iter().any(|word| line.contains(word))
}

fn names_backend(line: &str) -> bool {
    let line = line.to_lowercase();
    BACKENDS.iter().any(|name| line.contains(name))
}

/// A path that starts there: `/home/me`, and not `docs/home/me` or a `$DIR/home/me`.
fn has_machine_path(line: &str) -> bool {
    let starts_path = |before: &str| {
        !before
            .ends_with(|c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '~' | '}' | ')' | '*'))
    };
    MACHINE_PATHS.iter().any(|path| line.match_indices(path).any(|(at, _)| starts_path(&line[..at])))
}

fn has_unsafe_word(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or(line);
    code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe")
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "//! A header.\n";

    fn broken(path: &str, line: &str) -> bool {
        !complaints(path, &format!("{HEADER}{line}\n")).is_empty()
    }

    #[test]
    fn a_complaint_names_file_and_line() {
        let complaints = complaints("src/engine/kv.rs", &format!("{HEADER}\nlet x = 1; \n"));
        assert_eq!(complaints, ["src/engine/kv.rs:3: white space at the end of the line"]);
    }

    #[test]
    fn sources_have_headers() {
        for path in ["src/lib.rs", "backends/cpu/src/isa/mod.rs", "xtask/src/main.rs"] {
            assert!(!complaints(path, "use std::fs;\n").is_empty(), "{path}");
            assert!(complaints(path, HEADER).is_empty(), "{path}");
        }
        assert!(complaints("backends/cuda/build.rs", "use std::fs;\n").is_empty());
    }

    #[test]
    fn lines_of_sources_are_clean_and_finished() {
        for line in ["a\t", "a\r", "todo!()", "    unimplemented!(\"later\")", "// FIXME: later"] {
            for path in ["src/a.rs", "docs/a.md", "shaders/a.wgsl", ".ci/run"] {
                assert!(broken(path, line), "{path} {line:?}");
            }
            assert!(!broken("models/demo/heldout.txt", line), "{line:?}");
        }
        assert!(!broken("src/a.rs", "let a = todo; // a fixme"));
    }

    #[test]
    fn the_heart_names_no_backend() {
        for path in ["src/moe/cache.rs", "src/scheduler/mod.rs", "src/models/llama.rs"] {
            assert!(broken(path, "// as CUDA does") && broken(path, "use wgpu::Device;"), "{path}");
            assert!(!broken(path, "// as the device does"), "{path}");
        }
        assert!(!broken("src/devices.rs", "use freetoken_cuda::Cuda;"));
    }

    #[test]
    fn nobody_meets_the_path_of_another_machine() {
        for line in ["/home/me/a", "\"/work/a\"", "(/root/a)", "DIR=/home/me", "file:///home/me"] {
            assert!(broken("docs/a.md", line) && broken("models/demo/report.json", line), "{line}");
        }
        for line in ["docs/home/a", "./work/a", "~/work/a", "$HOME/work/a", "/homes", "${DIR}/work/a"] {
            assert!(!broken("docs/a.md", line), "{line}");
        }
        assert!(!broken("Cargo.lock", "/home/me/a"));
    }

    #[test]
    fn unsafe_stays_where_it_is_listed() {
        for line in [
            "unsafe {",
            "unsafe impl Send for A {}",
            "let a = unsafe { b() };",
            "pub unsafe extern \"C\" fn a();",
        ] {
            assert!(broken("src/engine/kv.rs", line), "{line}");
            assert!(!broken("backends/cpu/src/isa/tile.rs", line), "{line}");
            assert!(!broken("src/formats/mapped.rs", line), "{line}");
        }
        assert!(!broken("src/engine/kv.rs", "#![forbid(unsafe_code)] // no unsafe here"));
    }

    #[test]
    fn a_permission_without_use_is_a_complaint() {
        let mut needed: Vec<_> =
            UNSAFE.iter().map(|(place, _)| place.replace("isa/", "isa/mod.rs")).collect();
        let complaints =
            |needed: &[String]| unused_permissions(&needed.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(complaints(&needed), [""; 0]);
        needed.pop();
        assert_eq!(complaints(&needed).len(), 1);
    }
}
