//! Where a case's inputs and outputs live: the same values on every backend, other values every round, and sentinels around
//! everything that is written.

use super::weights;
use crate::{Backend, Buffer, ExpertRecord, Format, Result, View, Weight};

/// Bytes of sentinel on either side of an output, a multiple of any binding alignment.
const GUARD: usize = 256;
const SENTINEL: u8 = 0xa5;

/// What an input holds.
#[derive(Debug, Clone)]
pub enum Fill {
    /// f32, uniform in `-scale ..= scale`.
    Uniform(f32),
    /// f32, `center` plus or minus a tenth.
    Around(f32),
    /// i32, uniform in the range.
    Below(i32),
    /// These bytes, every round.
    Fixed(Vec<u8>),
    /// Codes of weights of this format that reach up to a bound.
    Codes(Format, f32),
    /// Their scales.
    Scales(Format, f32),
    /// Their globals.
    Globals(f32),
    /// Records of experts with such weights.
    Records(ExpertRecord, f32),
}

/// A small generator (SplitMix64): the same numbers everywhere.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Starts a stream.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Uniform in `-scale .. scale`.
    pub fn symmetric(&mut self, scale: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    }
}

struct Input {
    view: View,
    fill: Fill,
    seed: u64,
}

struct Output {
    buffer: Buffer,
    bytes: usize,
    integers: bool,
    initial: Option<(Fill, u64)>,
}

/// Inputs and outputs of a case on one backend.
pub struct Arena<'a> {
    backend: &'a dyn Backend,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
}

impl<'a> Arena<'a> {
    /// An empty arena.
    pub fn new(backend: &'a dyn Backend) -> Self {
        Arena { backend, inputs: Vec::new(), outputs: Vec::new() }
    }

    /// The backend it lives on.
    pub fn backend(&self) -> &'a dyn Backend {
        self.backend
    }

    fn seed(&self) -> u64 {
        (self.inputs.len() + self.outputs.len()) as u64 * 0x1000
    }

    /// An input of `n` f32 or i32 values.
    pub fn input(&mut self, n: usize, fill: Fill) -> Result<View> {
        self.input_bytes(n * 4, fill)
    }

    fn input_bytes(&mut self, bytes: usize, fill: Fill) -> Result<View> {
        let view = self.backend.alloc(bytes)?.whole();
        self.inputs.push(Input { view: view.clone(), fill, seed: self.seed() });
        Ok(view)
    }

    /// An input of these values, the same every round.
    pub fn fixed<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> Result<View> {
        let bytes = bytemuck::cast_slice(values).to_vec();
        self.input_bytes(bytes.len(), Fill::Fixed(bytes))
    }

    /// A weight whose elements reach up to about `most`.
    pub fn weight(&mut self, format: Format, rows: usize, cols: usize, most: f32) -> Result<Weight> {
        let view = self.input_bytes(rows * format.row_bytes(cols), Fill::Codes(format, most))?;
        let mut part = |row_bytes: usize, fill: Fill| match row_bytes {
            0 => Ok(None),
            _ => self.input_bytes(rows * row_bytes, fill).map(Some),
        };
        let scales = part(format.scale_row_bytes(cols), Fill::Scales(format, most))?;
        let globals = part(format.global_row_bytes(), Fill::Globals(most))?;
        Ok(Weight { view, scales, globals, format, rows, cols })
    }

    /// `n` records of experts, one after the other.
    pub fn records(&mut self, record: &ExpertRecord, n: usize, most: f32) -> Result<Buffer> {
        let view = self.input_bytes(n * record.bytes, Fill::Records(record.clone(), most))?;
        Ok(view.buffer().clone())
    }

    /// A norm's weight: around one.
    pub fn norm(&mut self, cols: usize) -> Result<Weight> {
        let view = self.input_bytes(cols * 4, Fill::Around(1.0))?;
        Ok(Weight::plain(view, Format::F32, 1, cols))
    }

    /// An output of `n` f32 values.
    pub fn output(&mut self, n: usize) -> Result<View> {
        self.push_output(n * 4, false, None)
    }

    /// An output of `n` i32 values.
    pub fn output_i32(&mut self, n: usize) -> Result<View> {
        self.push_output(n * 4, true, None)
    }

    /// An output of `n` f32 values that the op updates.
    pub fn updated(&mut self, n: usize, fill: Fill) -> Result<View> {
        self.push_output(n * 4, false, Some(fill))
    }

    /// An output of raw bytes, compared as they are.
    pub fn updated_bytes(&mut self, bytes: usize) -> Result<View> {
        self.push_output(bytes, true, Some(Fill::Fixed(vec![0; bytes])))
    }

    fn push_output(&mut self, bytes: usize, integers: bool, initial: Option<Fill>) -> Result<View> {
        let buffer = self.backend.alloc(GUARD + bytes.next_multiple_of(4) + GUARD)?;
        let view = buffer.view(GUARD..GUARD + bytes);
        let seed = self.seed();
        self.outputs.push(Output { buffer, bytes, integers, initial: initial.map(|fill| (fill, seed)) });
        Ok(view)
    }

    /// Writes this round's inputs, and sentinels where outputs will be.
    pub fn fill(&self, round: u64) -> Result<()> {
        for input in &self.inputs {
            self.backend.write(&input.view, &values(&input.fill, input.view.bytes(), input.seed + round))?;
        }
        for output in &self.outputs {
            let mut bytes = vec![SENTINEL; output.buffer.bytes()];
            if let Some((fill, seed)) = &output.initial {
                bytes[GUARD..GUARD + output.bytes].copy_from_slice(&values(fill, output.bytes, seed + round));
            }
            self.backend.write(&output.buffer.whole(), &bytes)?;
        }
        Ok(())
    }

    /// The largest normalised mean squared error of this arena's outputs against another's, or what is wrong with them.
    pub fn compare(&self, reference: &Arena<'_>) -> std::result::Result<f64, String> {
        let mut worst = 0.0_f64;
        for (i, (here, there)) in self.outputs.iter().zip(&reference.outputs).enumerate() {
            let got = self.read(here)?;
            let want = reference.read(there)?;
            let (before, after) = (&got[..GUARD], &got[GUARD + here.bytes..]);
            if before.iter().chain(after).any(|&b| b != SENTINEL) {
                return Err(format!("output {i}: bytes outside of it were written"));
            }
            let (got, want) = (&got[GUARD..GUARD + here.bytes], &want[GUARD..GUARD + here.bytes]);
            if here.integers {
                if got != want {
                    let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(format!("output {i}: differs from byte {at} on"));
                }
            } else {
                worst = worst.max(normalised_error(&floats(got), &floats(want)));
            }
        }
        Ok(worst)
    }

    fn read(&self, output: &Output) -> std::result::Result<Vec<u8>, String> {
        let mut bytes = vec![0; output.buffer.bytes()];
        self.backend.read(&output.buffer.whole(), &mut bytes).map_err(|e| e.to_string())?;
        Ok(bytes)
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytemuck::allocation::pod_collect_to_vec(bytes)
}

/// `sum (got - want)^2 / sum want^2`; sentinels that both sides left alone are equal, and anything not finite is infinite.
pub(super) fn normalised_error(got: &[f32], want: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0_f64, 0.0_f64);
    for (&a, &b) in got.iter().zip(want) {
        if !a.is_finite() || !b.is_finite() {
            return f64::INFINITY;
        }
        error += (a as f64 - b as f64).powi(2);
        norm += (b as f64).powi(2);
    }
    if error == 0.0 { 0.0 } else { error / norm.max(f64::MIN_POSITIVE) }
}

fn values(fill: &Fill, bytes: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut out = vec![0; bytes];
    let mut words = |value: &mut dyn FnMut() -> [u8; 4]| {
        out.chunks_exact_mut(4).for_each(|word| word.copy_from_slice(&value()));
    };
    match fill {
        Fill::Uniform(scale) => words(&mut || rng.symmetric(*scale).to_le_bytes()),
        Fill::Around(center) => words(&mut || (center + rng.symmetric(0.1)).to_le_bytes()),
        Fill::Below(n) => words(&mut || (rng.below(*n as usize) as i32).to_le_bytes()),
        Fill::Codes(format, most) => weights::codes(*format, *most, &mut rng, &mut out),
        Fill::Scales(format, most) => weights::scales(*format, *most, &mut rng, &mut out),
        Fill::Globals(most) => weights::globals(*most, &mut rng, &mut out),
        Fill::Records(record, most) => weights::records(record, *most, &mut rng, &mut out),
        Fill::Fixed(fixed) => out.copy_from_slice(fixed),
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_normalised() {
        assert_eq!(normalised_error(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((normalised_error(&[1.1, 0.0], &[1.0, 0.0]) - 0.01).abs() < 1e-6);
        assert_eq!(normalised_error(&[f32::NAN], &[1.0]), f64::INFINITY);
    }

    #[test]
    fn rounds_change_values() {
        let fill = Fill::Uniform(1.0);
        assert_eq!(values(&fill, 64, 1), values(&fill, 64, 1));
        assert_ne!(values(&fill, 64, 1), values(&fill, 64, 2));
    }
}
