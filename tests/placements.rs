//! Wherever experts are (all on the device, a few slots, none; fetched, read in place, on the host; while the cache changes its
//! size), the golden outputs are the same, on every device of this machine and on the CPU with its experts in banks.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_device;

use std::{path::PathBuf, sync::Arc};

use freetoken::{
    golden::{self, PLACEMENTS},
    moe::{CacheSize, Mode},
};
use freetoken_backend::{Backend, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

/// In both precisions.
const GOLDEN: &str = "qwen3_moe-bf16";
/// In f32, which bounds more closely: a recurrent model with an expert that every token passes.
const RECURRENT: &str = "qwen3_5_moe-bf16";
/// The same in one format each.
const FORMATS: [&str; 4] =
    ["qwen3_moe-fp8-block", "qwen3_moe-nvfp4-ct", "qwen3_5_moe-fp8-block", "qwen3_5_moe-nvfp4-modelopt"];
/// Where experts of these are through WGSL, since a software GPU takes seconds for each. `freetoken selftest --golden` leaves none out.
const FEW: [&str; 3] =
    ["resident", "half fetched, half on the host", "in slots, nearly all others on the disk"];

fn cpu(precision: Precision) -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision }).unwrap())
}

fn check(golden: &str, device: &Arc<dyn Backend>, few: bool) {
    let caps = device.caps();
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(golden);
    assert!(FEW.iter().all(|name| PLACEMENTS.iter().any(|placement| placement.name == *name)));
    for placement in PLACEMENTS.iter().filter(|placement| !few || FEW.contains(&placement.name)) {
        let place = placement.name;
        let what =
            format!("{} ({}) {}, {golden}, experts {place}", caps.backend, caps.device, caps.precision);
        if !placement.suits(caps) {
            println!("{what}: the device does not read host memory");
            continue;
        }
        let report = golden::run_placed(&dir, device, &cpu(caps.precision), placement).unwrap();
        println!("{what}: {} checks", report.checks.len());
        assert!(report.passed(), "{what}\n{report}");
        let Some(sums) = report.experts else {
            assert_eq!(placement.cache, None, "{what}: a cache that counts nothing");
            continue;
        };
        // The placement is what it says, and not another one with the same outputs.
        let decode = sums.decode.plus(&sums.prompts);
        assert!(decode.points > 0 && decode.misses() > 0 && sums.prefill.n_fetched > 0, "{what}: {sums:?}");
        let shares = matches!(placement.mode, Mode::Cpu | Mode::Share(_));
        assert!(
            if shares { decode.host > 0 } else { placement.host || decode.host == 0 },
            "{what}: {sums:?}"
        );
        assert!(placement.in_place || decode.in_place == 0, "{what}: {sums:?}");
        assert!(
            placement.resized
                || placement.cache != Some(CacheSize::Slots(0))
                || decode.hits + decode.fetched == 0,
            "{what}: {sums:?}"
        );
        assert_eq!(sums.disk.reads > 0, placement.ram.is_some(), "{what}: {sums:?}");
        if placement.ram.is_some() && placement.cache.is_none() {
            // What comes from the disk is computed by the device as the host.
            continue;
        }
        if !placement.host {
            assert!(
                if placement.in_place { decode.in_place > 0 } else { decode.fetched > 0 },
                "{what}: {sums:?}"
            );
        }
    }
}

#[test]
fn every_placement_on_every_device_gives_the_golden_outputs() {
    on_every_device::run(Precision::Auto, |device| check(GOLDEN, &device, false));
    on_every_device::run(Precision::F32, |device| {
        check(GOLDEN, &device, false);
        check(RECURRENT, &device, false);
        let few = device.caps().backend == "wgpu";
        FORMATS.iter().for_each(|golden| check(golden, &device, few));
    });
}
