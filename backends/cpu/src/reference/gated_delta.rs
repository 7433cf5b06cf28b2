//! See [`freetoken_backend::GatedDelta`]: the recurrence, row by row.

use freetoken_backend::{GatedDelta, Span};

use super::{rms_scale, sigmoid, silu};
use crate::memory::{slice, slice_mut};

pub(super) fn gated_delta(op: &GatedDelta) {
    let p = &op.p;
    let (heads, dk, dv) = (p.n_value_heads as usize, p.key_dim as usize, p.value_dim as usize);
    let (keys, group) = (p.n_key_heads as usize * dk, (p.n_value_heads / p.n_key_heads) as usize);
    let constants = slice::<f32>(&op.constants.view);
    for &Span { first, end, slot, resumes } in &slice::<Span>(&op.spans)[..p.n_sequences as usize] {
        for head in (0..heads).filter(|_| first < end) {
            let place = (slot as usize * heads + head) * dk * dv;
            let stored = &mut slice_mut::<f32>(&op.state)[place..][..dk * dv];
            let mut state: Vec<f64> =
                stored.iter().map(|&s| if resumes == 1 { s as f64 } else { 0.0 }).collect();
            for row in first as usize..end as usize {
                let qkv = &slice::<f32>(&op.qkv)[row * p.qkv_width() as usize..];
                let q = unit(&qkv[head / group * dk..][..dk], (dk as f64).powf(-0.5));
                let k = unit(&qkv[keys + head / group * dk..][..dk], 1.0);
                let v = &qkv[2 * keys + head * dv..][..dv];
                let ba = &slice::<f32>(&op.ba)[row * p.ba_width as usize + p.ba_start as usize..];
                let beta = sigmoid(ba[head]) as f64;
                let decay = (log_decay(constants[head], ba[heads + head] + constants[heads + head])).exp();

                state.iter_mut().for_each(|s| *s *= decay);
                let mut read = vec![0.0_f64; dv];
                for (column, out) in read.iter_mut().enumerate() {
                    let known: f64 = (0..dk).map(|i| state[i * dv + column] * k[i]).sum();
                    let u = beta * (v[column] as f64 - known);
                    for i in 0..dk {
                        state[i * dv + column] += k[i] * u;
                        *out += state[i * dv + column] * q[i];
                    }
                }

                let read: Vec<f32> = read.iter().map(|&o| o as f32).collect();
                let scale = rms_scale(&read, p.eps);
                let z = &slice::<f32>(&op.z)[row * p.z_width as usize + p.z_start as usize + head * dv..];
                let out = &mut slice_mut::<f32>(&op.out)[(row * heads + head) * dv..][..dv];
                for (i, out) in out.iter_mut().enumerate() {
                    *out = read[i] * scale * constants[2 * heads + i] * silu(z[i]);
                }
            }
            stored.iter_mut().zip(state).for_each(|(stored, s)| *stored = s as f32);
        }
    }
}

/// `x / sqrt(sum x^2 + 1e-6) * scale`
fn unit(x: &[f32], scale: f64) -> Vec<f64> {
    let squares: f64 = x.iter().map(|&x| x as f64 * x as f64).sum();
    x.iter().map(|&x| x as f64 / (squares + 1e-6).sqrt() * scale).collect()
}

/// `-exp(a_log) * softplus(x)`: the logarithm of what is left of the state.
pub(crate) fn log_decay(a_log: f32, x: f32) -> f64 {
    let x = x as f64;
    // From there on the two are the same in f32.
    let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
    -(a_log as f64).exp() * softplus
}
