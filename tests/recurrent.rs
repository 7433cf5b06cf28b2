//! A recurrent model computes the same whatever the chunks, the company and the interruptions of a sequence, and however its
//! checkpoint is written.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test fails by a panic and may report")]

mod on_every_device;

use std::{collections::HashMap, path::Path, sync::Arc};

use freetoken::{
    engine::{Engine, EngineError, EngineOptions, Sequence, sampling::SamplingParams},
    formats::{Dtype, safetensors::Shard},
    golden, loading,
    model_files::ModelFiles,
    models::{ConfigFile, TensorError, WeightSource},
};
use freetoken_backend::{Backend, HostBytes, Precision};
use freetoken_cpu::{Cpu, CpuOptions};

/// Between the same sums in another order, of logits up to about 10.
const BOUND: f32 = 1e-4;

fn dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_5_moe-f32"))
}

fn cpu() -> Arc<dyn Backend> {
    Arc::new(Cpu::new(CpuOptions { threads: Some(2), precision: Precision::F32 }).unwrap())
}

fn options(max_sequences: usize) -> EngineOptions {
    EngineOptions { context: 256, max_sequences, max_chunk: Some(256), ..EngineOptions::default() }
}

fn engine(max_sequences: usize) -> Engine {
    engine_on(&cpu(), options(max_sequences))
}

fn engine_on(backend: &Arc<dyn Backend>, options: EngineOptions) -> Engine {
    ModelFiles::open(Some(dir())).unwrap().engine(backend.clone(), &options, &mut |_| ()).unwrap()
}

/// Tokens of a prompt, and the best ones behind it.
fn prompt(name: &str) -> (Vec<u32>, Vec<u32>) {
    let expected = Shard::open(&dir().join("expected.safetensors")).unwrap();
    let ids = |what: &str| {
        let tensor = expected.tensor(&format!("{name}.{what}")).unwrap();
        bytemuck::allocation::pod_collect_to_vec(tensor.bytes.as_slice())
    };
    (ids("input_ids"), ids("greedy_ids"))
}

fn sequence(tokens: &[u32]) -> Sequence {
    Sequence::new(tokens, SamplingParams::GREEDY, 256)
}

/// Computes a chunk of what is pending, but never the last token. Whether there was any.
fn compute(engine: &mut Engine, sequence: &mut Sequence, chunk: usize) -> bool {
    let n = chunk.min(sequence.pending().len() - 1);
    if n > 0 {
        engine.compute(sequence, n).unwrap();
    }
    n > 0
}

/// Logits behind the last token, the others computed in chunks.
fn last_logits(engine: &mut Engine, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let mut sequence = sequence(tokens);
    while compute(engine, &mut sequence, chunk) {}
    let mut logits = Vec::new();
    let scored = engine.score(&mut sequence, 1, |row| -> Result<(), EngineError> {
        logits.extend_from_slice(row);
        Ok(())
    });
    scored.unwrap();
    engine.release(&mut sequence);
    logits
}

/// The best tokens behind what is known.
fn greedy(engine: &mut Engine, sequence: &mut Sequence, n: usize) -> Vec<u32> {
    let mut ids = vec![engine.prefill(sequence, &mut |_| true).unwrap().unwrap()];
    while ids.len() < n {
        sequence.push(ids[ids.len() - 1]);
        let mut drawn = [0];
        engine.decode(&mut [sequence], &mut drawn).unwrap();
        ids.push(drawn[0]);
    }
    ids
}

fn difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn chunks_of_any_size_leave_the_same_state() {
    let mut engine = engine(1);
    let (tokens, _) = prompt("p150");
    let whole = last_logits(&mut engine, &tokens, 149);
    for chunk in [1, 2, 3, 63, 64, 65, 128] {
        let error = difference(&last_logits(&mut engine, &tokens, chunk), &whole);
        assert!(error < BOUND, "chunks of {chunk}: {error:e}");
    }
    // One token less is another state.
    assert!(difference(&last_logits(&mut engine, &tokens[1..], 64), &whole) > 100.0 * BOUND);
}

#[test]
fn sequences_do_not_see_each_other() {
    let mut engine = engine(3);
    let [(first, first_best), (second, second_best)] = [prompt("p150"), prompt("p37")];
    let (mut a, mut b) = (sequence(&first), sequence(&second));
    while compute(&mut engine, &mut a, 17) {
        compute(&mut engine, &mut b, 5);
    }
    // In two rows, in either order, and beside a third one that comes and goes.
    let (mut drawn_a, mut drawn_b) = (Vec::new(), Vec::new());
    for step in 0..first_best.len() {
        let mut other = sequence(&first[step..step + 5]);
        engine.compute(&mut other, 4).unwrap();
        let mut drawn = [0; 3];
        if step % 2 == 0 {
            engine.decode(&mut [&mut a, &mut b], &mut drawn[..2]).unwrap();
        } else {
            engine.decode(&mut [&mut b, &mut other, &mut a], &mut drawn).unwrap();
            drawn = [drawn[2], drawn[0], 0];
        }
        engine.release(&mut other);
        a.push(drawn[0]);
        b.push(drawn[1]);
        drawn_a.push(drawn[0]);
        drawn_b.push(drawn[1]);
    }
    assert_eq!((drawn_a, drawn_b), (first_best, second_best));
}

/// What a new sequence finds of a prompt, and the best tokens behind it. It ends, and is kept.
fn served(engine: &mut Engine, tokens: &[u32], n: usize) -> (usize, Vec<u32>) {
    let mut sequence = sequence(tokens);
    let n_found = engine.adopt(&mut sequence).unwrap();
    let ids = greedy(engine, &mut sequence, n);
    engine.end(&mut sequence).unwrap();
    (n_found, ids)
}

/// A prompt is kept in the middle and at its end, and others go on from there: from slots of the device, from host memory, and
/// from nothing, as they would alone.
fn goes_on_from_kept_states(backend: &Arc<dyn Backend>) {
    let (tokens, best) = prompt("p150");
    let other: Vec<u32> = tokens[..100].iter().chain(&tokens[..30]).copied().collect();
    let alone = served(&mut engine_on(backend, options(2)), &other, 6);
    for (state_slots, n_host) in [(0, 4), (1, 3), (4, 0), (0, 0)] {
        let n_bytes = engine_on(backend, options(1)).state_bytes();
        let options = EngineOptions { state_slots, state_cache: n_host * n_bytes, ..options(2) };
        let mut engine = engine_on(backend, options);
        let mut first = sequence(&tokens);
        for n in [96, 48] {
            engine.compute(&mut first, n).unwrap();
            engine.keep(&first).unwrap();
        }
        // Somebody else works beside it.
        let mut beside = sequence(&tokens[3..50]);
        engine.compute(&mut beside, 40).unwrap();
        assert_eq!(greedy(&mut engine, &mut first, best.len()), best);
        engine.end(&mut first).unwrap();
        engine.end(&mut beside).unwrap();
        let is_kept = state_slots + n_host > 0;
        let n_kept = |n: usize| if is_kept { n } else { 0 };
        let (n_found, ids) = served(&mut engine, &other, 6);
        assert_eq!((n_found, &ids), (n_kept(96), &alone.1), "{state_slots} slots");
        let (n_found, ids) = served(&mut engine, &tokens, best.len());
        assert_eq!((n_found, &ids), (n_kept(144), &best), "{state_slots} slots");
        let kept = engine.kept_states().unwrap();
        let hits = [kept.counters.slot_hits, kept.counters.host_hits];
        let expected = match (state_slots, n_host) {
            (0, 0) => [0, 0],
            (0, _) | (1, _) => [0, 2],
            _ => [2, 0],
        };
        assert_eq!(hits, expected, "{kept:?}");
        assert_eq!(kept.n_in_slots + kept.n_in_host, state_slots + n_host, "{kept:?}");
    }
}

#[test]
fn a_kept_state_is_gone_on_from_wherever_it_is() {
    on_every_device::run(Precision::F32, |device| goes_on_from_kept_states(&device));
}

#[test]
fn a_prompt_that_does_not_go_on_begins_anew() {
    let mut engine = engine(1);
    let (tokens, best) = prompt("p37");
    let mut a = sequence(&tokens[..30]);
    greedy(&mut engine, &mut a, 3);
    assert_eq!(a.n_computed(), 32);
    engine.rebase(&mut a, &tokens);
    assert_eq!(a.n_computed(), 0, "two tokens were others");
    assert_eq!(greedy(&mut engine, &mut a, best.len()), best);

    let mut longer = a.tokens().to_vec();
    longer.push(7);
    let n = a.n_computed();
    engine.rebase(&mut a, &longer);
    assert_eq!(a.n_computed(), n);
    engine.rebase(&mut a, &longer[..20]);
    assert_eq!(a.n_computed(), 0);
}

#[test]
fn there_are_as_many_states_as_sequences() {
    let mut engine = engine(2);
    let mut sequences: Vec<Sequence> = (0..3).map(|i| sequence(&[1 + i, 2, 3])).collect();
    let [a, b, c] = &mut sequences[..] else { unreachable!("three of them") };
    engine.compute(a, 2).unwrap();
    engine.compute(b, 2).unwrap();
    let refused = engine.compute(c, 2).unwrap_err();
    assert!(matches!(refused, EngineError::StatesFull { n: 2 }), "{refused}");
    engine.release(a);
    engine.compute(c, 2).unwrap();
    engine.release(b);
    engine.release(c);
}

/// The golden checkpoint written in other ways.
struct Rewritten {
    tensors: HashMap<String, (Dtype, Vec<usize>, HostBytes)>,
}

impl Rewritten {
    /// `name`: what a tensor is called.
    fn new(name: impl Fn(&str) -> String) -> Self {
        let shard = Shard::open(&dir().join("model.safetensors")).unwrap();
        let tensors = shard.entries().keys().map(|old| {
            let tensor = shard.tensor(old).unwrap();
            (name(old), (tensor.dtype, tensor.shape.clone(), tensor.bytes.clone()))
        });
        Rewritten { tensors: tensors.collect() }
    }

    /// Experts one by one.
    fn with_experts_apart(mut self) -> Self {
        let stacked: Vec<String> =
            self.tensors.keys().filter(|name| name.contains(".experts.")).cloned().collect();
        for name in stacked {
            let (dtype, shape, bytes) = self.tensors.remove(&name).unwrap();
            let (module, what) = name.rsplit_once('.').unwrap();
            let parts: &[&str] =
                if what == "gate_up_proj" { &["gate_proj", "up_proj"] } else { &["down_proj"] };
            let (rows, n) = (shape[1] / parts.len(), bytes.len() / shape[0] / parts.len());
            for (i, place) in (0..shape[0] * parts.len()).map(|i| (i, bytes.slice(i * n..(i + 1) * n))) {
                let name = format!("{module}.{}.{}.weight", i / parts.len(), parts[i % parts.len()]);
                self.tensors.insert(name, (dtype, vec![rows, shape[2]], place));
            }
        }
        self
    }

    /// Some matrices in bf16, as where others are quantised.
    fn with_bf16(mut self, names: &[&str]) -> Self {
        for (_, (dtype, _, bytes)) in
            self.tensors.iter_mut().filter(|(name, _)| names.iter().any(|end| name.ends_with(end)))
        {
            let values: Vec<f32> = bytemuck::allocation::pod_collect_to_vec(bytes.as_slice());
            let halves: Vec<u8> =
                values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect();
            (*dtype, *bytes) = (Dtype::BF16, HostBytes::new(Arc::new(halves)));
        }
        self
    }

    fn engine(&self, config: serde_json::Value) -> Engine {
        let fields = config.as_object().unwrap().clone();
        let config = ConfigFile::new("config.json", &fields);
        loading::load(&config, self, cpu(), &options(1), &mut |_| ()).unwrap()
    }
}

impl WeightSource for Rewritten {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let (dtype, found, bytes) = self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        assert_eq!(found, shape, "{name}");
        Ok((*dtype, bytes.clone()))
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        self.tensors.get(name).map(|(dtype, shape, _)| (*dtype, shape.clone()))
    }
}

#[test]
fn a_checkpoint_may_be_written_in_several_ways() {
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir().join("config.json")).unwrap()).unwrap();
    let (tokens, best) = prompt("p37");
    let flat = |name: &str| name.replace("model.language_model.", "model.");
    let text = &config["text_config"];

    let mut engine = Rewritten::new(str::to_owned).with_experts_apart().engine(config.clone());
    assert_eq!(golden::greedy(&mut engine, &tokens, best.len()).unwrap(), best);
    let mut engine = Rewritten::new(flat).engine(text.clone());
    assert_eq!(golden::greedy(&mut engine, &tokens, best.len()).unwrap(), best);

    // b and a apart from q, k, v and z, and all together: the same values in both.
    let ba = ["in_proj_b.weight", "in_proj_a.weight"];
    let rounded = Rewritten::new(str::to_owned).with_bf16(&ba);
    let mut apart = rounded.engine(config.clone());
    let widened = rounded.tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let bytes = match dtype {
            Dtype::BF16 => {
                let bits: Vec<u16> = bytemuck::allocation::pod_collect_to_vec(bytes.as_slice());
                let wide: Vec<u8> = bits.iter().flat_map(|&b| (u32::from(b) << 16).to_le_bytes()).collect();
                HostBytes::new(Arc::new(wide))
            }
            _ => bytes.clone(),
        };
        (name.clone(), (Dtype::F32, shape.clone(), bytes))
    });
    let mut together = Rewritten { tensors: widened.collect() }.engine(config);
    let logits = [&mut apart, &mut together].map(|engine| last_logits(engine, &tokens, 36));
    assert!(difference(&logits[0], &logits[1]) < BOUND);
}
