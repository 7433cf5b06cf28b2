//! Host memory on every path to it: uploads of any range, and a bank larger than a binding, read in place behind slots.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_adapter;

use std::sync::Arc;

use freetoken_backend::{
    Backend, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Format, Lane, Op, Precision, Result,
    conformance::{Arena, Fill, Rng},
    record,
};
use freetoken_cpu::Cpu;
use freetoken_wgpu::{HostPath, Options, Wgpu};

/// f32 against f32 in another order of summation.
const BOUND: f64 = 1e-10;

fn on_every_path(mut test: impl FnMut(&Wgpu)) {
    for host in [HostPath::Imported, HostPath::Mapped, HostPath::Copied] {
        let options = Options { host, floor: true, ..Options::new(Precision::F32) };
        on_every_adapter::run(&options, |device| {
            println!("{host:?}: {}, {}", device.caps().device, device.caps().detail);
            assert!(host != HostPath::Copied || !device.caps().reads_host);
            test(device);
        });
    }
}

#[test]
fn uploads_of_any_range() {
    on_every_path(|device| {
        let n_bytes = 3_000_001;
        let mut memory = device.alloc_host(n_bytes).unwrap();
        assert!(memory.as_slice().len() == n_bytes && memory.as_slice().iter().all(|byte| *byte == 0));
        memory.as_mut_slice().iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + i / 256) as u8);
        let memory = Arc::new(memory);
        let buffer = device.alloc(n_bytes).unwrap();
        for (start, at, bytes) in [(0, 0, n_bytes), (4096, 8, 2_000_000), (3, 5, 77), (8, 2, 4), (12, 4, 0)] {
            let view = buffer.view(at..at + bytes);
            device.write(&buffer.whole(), &vec![0xa5; n_bytes]).unwrap();
            let arrived = device.upload(Lane::Copy, &memory, start, &view).unwrap();
            device.after(Lane::Compute, arrived).unwrap();
            let mut all = vec![0; n_bytes];
            device.read(&buffer.whole(), &mut all).unwrap();
            let mut want = vec![0xa5; n_bytes];
            want[at..at + bytes].copy_from_slice(&memory.as_slice()[start..start + bytes]);
            assert!(all == want, "{bytes} bytes from {start} to {at}");
        }
    });
}

/// Ten experts of 384 KiB, three of them in slots: two chunks, and a bank of two windows where a binding has 2 MiB.
fn banked(a: &mut Arena<'_>, n_rows: usize) -> Result<Op> {
    let (n_experts, top_k, hidden, intermediate) = (10, 3, 256, 256);
    let record = record(Format::Bf16, hidden, intermediate);
    let mut bank = a.backend().alloc_host(n_experts * record.bytes)?;
    let mut rng = Rng::new(5);
    for pair in bank.as_mut_slice().chunks_exact_mut(2) {
        // The upper half of an f32 is its bf16.
        pair.copy_from_slice(&rng.symmetric(0.1).to_le_bytes()[2..]);
    }
    let slots_per_chunk = 2;
    let mut chunks = Vec::new();
    for _ in 0..2 {
        chunks.push(a.backend().alloc(slots_per_chunk * record.bytes)?);
    }
    let mut slots = vec![-1; n_experts];
    (slots[1], slots[4], slots[9]) = (3, 0, 1);
    let table = a.fixed(&slots)?;
    let banks = vec![Arc::new(bank)];
    let pool = ExpertPool { record, n_layers: 1, n_experts, chunks, slots_per_chunk, table, banks };
    for (expert, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        a.backend().write(&pool.slot(*slot as usize), pool.banked(0, expert as u32))?;
    }
    let ids = (0..n_rows).flat_map(|row| {
        (0..top_k).map(move |k| if row % 6 == 5 { -1 } else { ((row * 3 + k * 4 + 1) % n_experts) as i32 })
    });
    Ok(ExpertMlp {
        parts: a.updated(n_rows * top_k * hidden, Fill::Uniform(0.5))?,
        x: a.input(n_rows * hidden, Fill::Uniform(1.0))?,
        ids: a.fixed(&ids.collect::<Vec<i32>>())?,
        weights: a.input(n_rows * top_k, Fill::Uniform(1.0))?,
        experts: Experts::Pool { pool: pool.into(), layer: 0 },
        p: ExpertMlpParams {
            n_rows: n_rows as u32,
            top_k: top_k as u32,
            hidden: hidden as u32,
            intermediate: intermediate as u32,
            n_experts: n_experts as u32,
            in_place: 1,
        },
    }
    .into())
}

/// One row, few rows, few routes an expert, many routes an expert.
#[test]
fn a_bank_in_windows() {
    on_every_path(|device| {
        for n_rows in [1, 4, 30, 200] {
            let reference = Cpu::reference();
            let (mut here, mut there) = (Arena::new(device), Arena::new(&reference));
            let (op, expected) = (banked(&mut here, n_rows).unwrap(), banked(&mut there, n_rows).unwrap());
            if !device.caps().reads_host {
                assert!(device.supports(&op).is_err(), "a bank that the device cannot read");
                continue;
            }
            here.fill(1).unwrap();
            there.fill(1).unwrap();
            device.run(&[op]).unwrap();
            reference.run(&[expected]).unwrap();
            let error = here.compare(&there).unwrap_or_else(|why| panic!("{n_rows} rows: {why}"));
            println!("{n_rows} rows: error {error:.1e}");
            assert!(error <= BOUND, "{n_rows} rows: error {error:.1e}");
        }
    });
}
