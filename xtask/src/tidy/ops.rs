//! What each op has: the same stem everywhere, from its parameters to its conformance case.

use std::fs;

use anyhow::{Context, Result};

use super::files::File;

const OPS: &str = "backends/api/src/ops/";
const REFERENCE: &str = "backends/cpu/src/reference/";
const FAST: &str = "backends/cpu/src/fast/";
const SHADERS: &str = "shaders/";
const KERNELS: &str = "backends/cuda/kernels/";
const CASES: &str = "backends/api/src/conformance/cases.rs";

/// One op and which of its files exist.
#[derive(Debug)]
pub(super) struct Op {
    name: String,
    reference: bool,
    /// Without one, the reference is what runs on the CPU.
    fast: bool,
    wgsl: bool,
    cuda: bool,
    case: bool,
}

/// The ops, by name.
pub(super) fn ops(files: &[File]) -> Result<Vec<Op>> {
    let cases = fs::read_to_string(CASES).with_context(|| CASES.to_owned())?;
    let paths: Vec<_> = files.iter().map(|file| file.path.as_str()).collect();
    Ok(ops_of(&paths, &cases))
}

fn ops_of(paths: &[&str], cases: &str) -> Vec<Op> {
    let names = paths.iter().filter_map(|path| path.strip_prefix(OPS)?.strip_suffix(".rs"));
    let op = |name: &str| Op {
        name: name.to_owned(),
        reference: paths.contains(&format!("{REFERENCE}{name}.rs").as_str()),
        fast: paths.contains(&format!("{FAST}{name}.rs").as_str()),
        wgsl: has_variant(paths, SHADERS, name, ".wgsl"),
        cuda: has_variant(paths, KERNELS, name, ".cu"),
        case: cases.contains(&format!("\"{name}/")) || cases.contains(&format!("\"{name}\"")),
    };
    names.filter(|&name| name != "mod").map(op).collect()
}

/// Whether `dir` has the op's file or one of its variants: `matmul.wgsl`, `matmul_tile.wgsl`.
fn has_variant(paths: &[&str], dir: &str, name: &str, suffix: &str) -> bool {
    let variant =
        |path: &str| path.strip_prefix(dir)?.strip_suffix(suffix)?.strip_prefix(name).map(str::to_owned);
    paths.iter().filter_map(|path| variant(path)).any(|rest| rest.is_empty() || rest.starts_with('_'))
}

/// The ops as a table.
pub(super) fn table(ops: &[Op]) -> String {
    let row = |[op, reference, fast, wgsl, cuda, case]: [&str; 6]| {
        format!("{op:<14} {reference:<10} {fast:<10} {wgsl:<6} {cuda:<5} {case}\n")
    };
    let yes = |there: bool, word: &'static str| if there { word } else { "-" };
    let head = row(["op", "reference", "fast", ".wgsl", ".cu", "case"]);
    let rows = ops.iter().map(|op| {
        row([
            &op.name,
            yes(op.reference, "yes"),
            if op.fast { "yes" } else { "reference" },
            yes(op.wgsl, "yes"),
            yes(op.cuda, "yes"),
            yes(op.case, "yes"),
        ])
    });
    std::iter::once(head).chain(rows).collect()
}

/// What every op must have and these lack.
pub(super) fn complaints(ops: &[Op]) -> Vec<String> {
    let mut complaints = Vec::new();
    for op in ops {
        let name = &op.name;
        if !op.reference {
            complaints.push(format!("{OPS}{name}.rs: the op has no reference: write {REFERENCE}{name}.rs"));
        }
        if !op.case {
            complaints.push(format!("{OPS}{name}.rs: the op has no conformance case: add one to {CASES}"));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_op_is_found_everywhere_by_its_stem() {
        let paths = [
            "backends/api/src/ops/matmul.rs",
            "backends/api/src/ops/mod.rs",
            "backends/api/src/ops/route.rs",
            "backends/cpu/src/fast/matmul.rs",
            "backends/cpu/src/reference/matmul.rs",
            "backends/cuda/kernels/router.cu",
            "shaders/matmul_tile.wgsl",
        ];
        let ops = ops_of(&paths, "case(format!(\"matmul/{format}\"))");
        let table = table(&ops);
        let rows: Vec<Vec<_>> = table.lines().map(|row| row.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["op", "reference", "fast", ".wgsl", ".cu", "case"]);
        assert_eq!(rows[1], ["matmul", "yes", "yes", "yes", "-", "yes"]);
        assert_eq!(rows[2], ["route", "-", "reference", "-", "-", "-"]);
        assert_eq!(rows.len(), 3);
        let complaints = complaints(&ops);
        assert!(
            complaints.len() == 2 && complaints.iter().all(|complaint| complaint.contains("ops/route.rs"))
        );
    }
}
