//! The golden checkpoints on every backend.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use freetoken::golden;
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

const TAKEN: [&str; 5] =
    ["qwen3_moe-bf16", "qwen3-bf16", "llama-bf16", "qwen3_5_moe-bf16", "qwen3_5_moe-f32"];
/// Codes and scales as their publishers store them; expected outputs are those of the dequantised weights.
const QUANTISED: [&str; 6] = [
    "qwen3_moe-fp8-block",
    "qwen3_moe-nvfp4-ct",
    "qwen3_moe-nvfp4-modelopt",
    "qwen3_5_moe-fp8-block",
    "qwen3_5_moe-nvfp4-ct",
    "qwen3_5_moe-nvfp4-modelopt",
];
/// Read from the folder that `FREETOKEN_GOLDEN` names, where it does.
const OUTSIDE: [&str; 3] = ["qwen3_moe-f32", "qwen3-f32", "llama-f32"];

fn taken(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn check(dir: &Path, backend: Arc<dyn Backend>) {
    let report = golden::run(dir, &backend).unwrap();
    println!("{} {}\n{report}\n", dir.display(), backend.caps().precision);
    assert!(report.passed(), "{}\n{report}", dir.display());
}

fn cpu(precision: Precision) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap())
}

#[test]
fn the_scalar_reference_gives_the_golden_outputs() {
    for name in TAKEN.into_iter().chain(QUANTISED) {
        check(&taken(name), Arc::new(Cpu::reference()));
    }
}

#[test]
fn the_cpu_gives_the_golden_outputs_in_f32() {
    for name in TAKEN.into_iter().chain(QUANTISED) {
        for cpu in Cpu::every_isa(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap() {
            check(&taken(name), Arc::new(cpu));
        }
    }
}

#[test]
fn the_cpu_stays_close_in_auto() {
    for name in TAKEN.into_iter().chain(QUANTISED) {
        check(&taken(name), cpu(Precision::Auto));
    }
}

#[test]
fn f32_checkpoints_outside_of_the_project() {
    let Some(folder) = std::env::var_os("FREETOKEN_GOLDEN").map(PathBuf::from) else {
        eprintln!("SKIPPED: FREETOKEN_GOLDEN is not set: the f32 golden checkpoints were not checked");
        return;
    };
    for name in OUTSIDE {
        check(&folder.join(name), cpu(Precision::F32));
    }
}
