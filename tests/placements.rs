//! Wherever experts are (all on the device, a few slots, none; fetched, read in place, on the host; while the cache changes its
//! size), the golden outputs are the same, on every device of this machine and on the CPU with its experts in banks.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_device;

use std::{path::PathBuf, sync::Arc};

use freetoken::golden::{self, PLACEMENTS};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

const GOLDEN: &str = "tests/golden/qwen3_moe-bf16";

fn cpu(precision: Precision) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap())
}

fn check(device: &Arc<dyn Backend>) {
    let caps = device.caps();
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(GOLDEN);
    for placement in PLACEMENTS {
        let what =
            format!("{} ({}) {}, experts {}", caps.backend, caps.device, caps.precision, placement.name);
        if !placement.suits(caps) {
            println!("{what}: the device does not read host memory");
            continue;
        }
        let report = golden::run_placed(&dir, device, &cpu(caps.precision), placement).unwrap();
        println!("{what}: {} checks", report.checks.len());
        assert!(report.passed(), "{what}\n{report}");
    }
}

#[test]
fn every_placement_on_the_cpu_gives_the_golden_outputs() {
    for precision in [Precision::F32, Precision::Auto] {
        check(&cpu(precision));
    }
}

#[test]
fn every_placement_on_every_device_gives_the_golden_outputs() {
    for precision in [Precision::F32, Precision::Auto] {
        on_every_device::run(precision, |device| check(&device));
    }
}
