//! Rows of x as halves with a power of two each: what kernels of cooperative matrices multiply. Belongs to matmul and to expert_mlp.

use std::mem;

use freetoken_backend::Weight;

use super::matmul::THREADS;
use crate::{
    dispatch::{Call, Recorder},
    kernels::HALF_ROWS,
    memory::Slot,
};

/// What to make halves of.
pub(super) struct Rows<'a> {
    pub(super) n: u32,
    /// A multiple of 4, of rows that start at 16 bytes.
    pub(super) cols: u32,
    pub(super) x: &'a Slot,
    /// The row of `x` that each is; they follow each other where absent.
    pub(super) gathered: Option<&'a Slot>,
    pub(super) norm: Option<&'a Weight>,
    /// Of the norm.
    pub(super) eps: f32,
    /// What each is multiplied with.
    pub(super) weights: Option<&'a Slot>,
}

/// f16 `[n, cols]`, and f32 `[n]`: what products of a row are multiplied with. Until the next ones are made.
pub(super) struct HalfRows {
    pub(super) halves: Slot,
    pub(super) scales: Slot,
}

pub(super) fn record(rows: &Rows<'_>, recorder: &mut Recorder<'_>) -> HalfRows {
    let &Rows { n, cols, x, gathered, norm, eps, weights } = rows;
    let bytes = [2 * n as usize * cols as usize, 4 * n as usize];
    let halves = recorder.scratch.get(recorder.gpu, "half_rows.halves", bytes[0]);
    let scales = recorder.scratch.get(recorder.gpu, "half_rows.scales", bytes[1]);
    let made = HalfRows { halves: Slot::whole(&halves), scales: Slot::whole(&scales) };
    let (norm, norm_at, norm_format) = recorder.optional(norm);
    let or_nothing = |slot: Option<&Slot>| slot.cloned().unwrap_or_else(|| recorder.nothing());
    let (gather, weighted) = (gathered.is_some() as u32, weights.is_some() as u32);
    let (gathered, weights) = (or_nothing(gathered), or_nothing(weights));
    let whole = mem::replace(&mut recorder.work, 6 * u64::from(n) * u64::from(cols));
    recorder.call(Call {
        kernel: &HALF_ROWS,
        constants: vec![
            ("WORKGROUP", THREADS),
            ("NORM", norm_format),
            ("GATHER", gather),
            ("WEIGHTED", weighted),
        ],
        params: &[n, cols, eps.to_bits(), x.at(4), gathered.at(4), norm_at, weights.at(4)],
        slots: vec![made.halves.clone(), made.scales.clone(), x.clone(), gathered, norm, weights],
        chunks: &[],
        workgroups: recorder.grid(n as usize),
    });
    recorder.work = whole;
    made
}

#[cfg(test)]
mod tests {
    use freetoken_backend::{Backend, Format, Precision, View, conformance::Rng};

    use super::*;
    use crate::{Options, Select, Wgpu, adapters, commands::Commands, device::State};

    fn written<T: bytemuck::NoUninit>(device: &Wgpu, values: &[T]) -> View {
        let view = device.alloc(size_of_val(values)).unwrap().whole();
        device.write(&view, bytemuck::cast_slice(values)).unwrap();
        view
    }

    /// The value of bits of an f16.
    fn half(bits: u16) -> f64 {
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023) / 1024.0);
        let size = match exponent {
            0 => fraction * 2.0_f64.powi(-14),
            _ => (1.0 + fraction) * 2.0_f64.powi(exponent - 15),
        };
        if bits >> 15 == 0 { size } else { -size }
    }

    /// Software adapters cannot multiply halves, but they can make them: rows of any size, gathered, normed and weighted.
    #[test]
    fn halves_and_scales_are_the_rows() {
        let (n, cols, x_rows) = (9, 76, 12);
        let mut rng = Rng::new(1);
        // From 1e-12 to 1e10.
        let x: Vec<f32> =
            (0..x_rows * cols).map(|i| rng.symmetric(10f32.powi(2 * (i / cols) as i32 - 12))).collect();
        let gathered: Vec<i32> = (0..n).map(|i| (i * 5 % x_rows) as i32).collect();
        let norm: Vec<f32> = (0..cols).map(|_| 1.0 + rng.symmetric(0.5)).collect();
        let weights: Vec<f32> = (0..n).map(|_| rng.symmetric(2.0)).collect();
        for facts in adapters().iter().filter(|facts| facts.refusal.is_none()) {
            let device = Wgpu::open(&Select::Index(facts.index), &Options::new(Precision::F32)).unwrap();
            let views = [&x, &norm, &weights].map(|values| written(&device, values));
            let ids = written(&device, &gathered);
            let scale = Weight::plain(views[1].clone(), Format::F32, 1, cols);
            let gpu = device.gpu();
            let state = &mut *device.lock();
            let dispatches = device.dispatches(state, |recorder| {
                let rows = Rows {
                    n: n as u32,
                    cols: cols as u32,
                    x: &recorder.words(&views[0], x.len()),
                    gathered: Some(&recorder.words(&ids, n)),
                    norm: Some(&scale),
                    eps: 0.0,
                    weights: Some(&recorder.words(&views[2], n)),
                };
                record(&rows, recorder);
            });
            let State { lanes, staging, scratch, .. } = state;
            let mut commands = Commands::new(lanes, gpu);
            commands.dispatch(&dispatches);
            commands.submit();
            drop(commands);
            let (mut halves, mut scales) = (vec![0_u16; n * cols], vec![0_f32; n]);
            let made = scratch.get(gpu, "half_rows.halves", 0);
            staging.download(lanes, &made, 0, bytemuck::cast_slice_mut(&mut halves)).unwrap();
            let made = scratch.get(gpu, "half_rows.scales", 0);
            staging.download(lanes, &made, 0, bytemuck::cast_slice_mut(&mut scales)).unwrap();
            for row in 0..n {
                let x = &x[gathered[row] as usize * cols..][..cols];
                let rms = (x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / cols as f64).sqrt();
                let scaled = |i: usize| f64::from(x[i]) * f64::from(norm[i]) / rms * f64::from(weights[row]);
                let most = (0..cols).map(|i| scaled(i).abs()).fold(0.0, f64::max);
                for i in 0..cols {
                    let got = half(halves[row * cols + i]) * f64::from(scales[row]);
                    // Half of a unit in eleven bits, and what sums in f32 lose.
                    let bound = most / 2040.0;
                    assert!(
                        (got - scaled(i)).abs() < bound,
                        "{}: {row} {i}: {got} {}",
                        facts.name,
                        scaled(i)
                    );
                }
            }
        }
    }
}
