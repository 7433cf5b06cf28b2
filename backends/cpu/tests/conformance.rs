//! Every instruction set of this CPU, in both precisions, passes the conformance suite.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

use freetoken_backend::{Backend, Precision, conformance};
use freetoken_cpu::{Cpu, CpuOptions};

#[test]
fn every_instruction_set_conforms() {
    for precision in [Precision::F32, Precision::Auto] {
        for cpu in Cpu::every_isa(CpuOptions { threads: Some(3), precision }).unwrap() {
            let report = conformance::run_suite(&cpu, &Cpu::reference(), "");
            println!("{} {precision}\n{report}\n", cpu.caps().detail);
            assert!(report.passed());
        }
    }
}

#[test]
fn the_reference_conforms_with_itself() {
    let report = conformance::run_suite(&Cpu::reference(), &Cpu::reference(), "");
    assert!(report.passed(), "{report}");
}
