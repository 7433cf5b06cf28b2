//! Depth without the work: tokens that count as computed, with keys and values that are made up. For measuring what depth costs, where
//! nobody asks what is said.

use freetoken_backend::{Format, PAGE_TOKENS};
use half::bf16;

use super::{Engine, EngineError, Sequence};

/// Pages that are written at a time.
const PAGES: usize = 64;

impl Engine {
    /// Counts the next `n` pending tokens of a sequence as computed. Their keys and values are numbers between -1 and 1, and a recurrent
    /// state is all zeros.
    ///
    /// # Errors
    /// [`EngineError`]; the tokens then stay pending.
    pub fn make_up(&mut self, sequence: &mut Sequence, n: usize) -> Result<(), EngineError> {
        self.make_room(sequence, n)?;
        if self.is_recurrent() {
            self.take_state(sequence)?;
            for part in self.state_parts(sequence) {
                self.backend.write(&part, &vec![0; part.bytes()])?;
            }
        }
        let first = sequence.n_computed() / PAGE_TOKENS;
        for cache in &self.batch.kv {
            let page_bytes = cache.view.bytes() / cache.n_pages;
            let numbers = numbers(cache.format, PAGES * page_bytes);
            // Pages that lie one behind the other are one write.
            for pages in
                sequence.pages[first..].chunk_by(|a, b| a + 1 == *b).flat_map(|run| run.chunks(PAGES))
            {
                let start = pages[0] as usize * page_bytes;
                let part = cache.view.slice(start..start + pages.len() * page_bytes);
                self.backend.write(&part, &numbers[..part.bytes()])?;
            }
        }
        sequence.advance(n);
        Ok(())
    }
}

/// As many numbers between -1 and 1 as take so many bytes, the same each time: multiples of the golden ratio, without their integers.
fn numbers(format: Format, bytes: usize) -> Vec<u8> {
    let number = |i: usize| (i as f64 * 1.618_033_988_749_895).fract() as f32 * 2.0 - 1.0;
    let of_width = |width: usize| (0..bytes / width).map(number);
    match format {
        Format::Bf16 => of_width(2).flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
        _ => of_width(4).flat_map(f32::to_le_bytes).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{devices, engine::EngineOptions, engine::sampling::SamplingParams, model_files::ModelFiles};

    /// A sequence goes on behind what is made up, which it reads, and gives everything back.
    #[test]
    fn a_sequence_decodes_behind_tokens_that_are_made_up() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/qwen3_5_moe-f32");
        let options = EngineOptions { context: 200, max_sequences: 1, ..EngineOptions::default() };
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let mut engine = files.engine(devices::reference(), &options, &mut |_| ()).unwrap();
        let vocab = engine.model().sizes().vocab;
        let mut logits_behind = |n: usize| {
            let tokens: Vec<u32> = (0..n as u32 + 1).map(|token| token % 300).collect();
            let mut sequence = Sequence::new(&tokens, SamplingParams::GREEDY, 200);
            engine.make_up(&mut sequence, n).unwrap();
            assert_eq!((sequence.n_computed(), sequence.pages.len()), (n, n.div_ceil(PAGE_TOKENS)));
            engine.decode(&mut [&mut sequence], &mut [0]).unwrap();
            let mut logits = vec![0.0; vocab];
            engine.logits(0, &mut logits).unwrap();
            assert!(logits.iter().all(|logit| logit.is_finite()));
            assert!(engine.make_up(&mut sequence, 0).is_ok() && sequence.pending().is_empty());
            sequence.push(1);
            let mut more = Sequence::new(&[0; 200], SamplingParams::GREEDY, 200);
            assert!(engine.make_up(&mut more, 200).is_err(), "there is no room for both");
            assert_eq!(more.n_computed(), 0);
            engine.release(&mut more);
            engine.release(&mut sequence);
            logits
        };
        let (short, long) = (logits_behind(20), logits_behind(130));
        assert_ne!(short, long, "attention reads what is made up");
        assert_eq!(short, logits_behind(20));
    }
}
