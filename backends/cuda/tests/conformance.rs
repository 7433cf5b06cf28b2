//! The first card of this machine, in both precisions and both ways of submission, passes the conformance suite.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and reports")]

use std::io::Write;

use freetoken_backend::{Backend, Precision, conformance};
use freetoken_cpu::Cpu;
use freetoken_cuda::{CardChoice, Cuda, CudaOptions, Submission, cards};

fn conforms(submission: Submission) {
    if let Err(error) = cards() {
        // Past the harness, which hides what a passing test prints.
        let text = format!("SKIPPED: {error}; no kernel of the CUDA backend was run\n");
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return;
    }
    for precision in [Precision::F32, Precision::Auto] {
        let cuda = Cuda::open(&CardChoice::First, CudaOptions { precision, submission }).unwrap();
        let report = conformance::run_suite(&cuda, &Cpu::reference(), "");
        println!("{}, {} {precision}\n{report}\n", cuda.caps().device, cuda.caps().detail);
        assert!(report.passed());
    }
}

#[test]
fn kernel_by_kernel() {
    conforms(Submission::Staged);
}

#[test]
fn by_graphs() {
    conforms(Submission::Graph);
}
