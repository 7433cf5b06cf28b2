//! Every adapter of this machine passes the conformance suite, in both precisions, as it is, without subgroups, and as a device that
//! binds little; and on every path to host memory.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_adapter;

use std::time::Instant;

use freetoken_backend::{
    Backend, Precision,
    conformance::{self, Outcome, Row},
};
use freetoken_cpu::Cpu;
use freetoken_wgpu::{HostPath, Options};

#[test]
fn every_adapter_conforms() {
    let mut failed = Vec::new();
    for precision in [Precision::F32, Precision::Auto] {
        let whole = Options::new(precision);
        let no_subgroups = Options { subgroups: false, host: HostPath::Mapped, ..whole.clone() };
        let floor = Options { floor: true, as_hardware: true, ..whole.clone() };
        let poorest =
            Options { floor: true, as_hardware: true, host: HostPath::Copied, ..no_subgroups.clone() };
        for options in [whole, no_subgroups, floor, poorest] {
            on_every_adapter::run(&options, |device| {
                let start = Instant::now();
                let report = conformance::run_suite(device, &Cpu::reference(), "");
                let (caps, Options { subgroups, floor, .. }) = (device.caps(), &options);
                let seconds = start.elapsed().as_secs_f64();
                let what = format!("{} {precision} subgroups={subgroups} floor={floor}", caps.device);
                let count = report.to_string().lines().last().unwrap_or_default().to_owned();
                println!("{what}: {count}, {seconds:.1} s, {}", caps.detail);
                // What is not supported is not silently left out: experts of a checkpoint in place, banks where the device cannot read them,
                // and what a poor device cannot bind.
                let unsupported = |row: &Row| matches!(row.outcome, Outcome::Unsupported(_));
                let needs_bank = |row: &Row| row.name.contains("without slots");
                let may_lack =
                    |row: &Row| row.name.contains("in place") && !(caps.reads_host && needs_bank(row));
                let missing = report.rows.iter().any(|row| unsupported(row) && !may_lack(row));
                if !report.passed() || missing && !options.floor {
                    println!("{report}");
                    failed.push(what);
                }
            });
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}
