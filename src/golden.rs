//! Golden checks: a checkpoint with the outputs that an independent implementation computed from it (`tests/golden`), and
//! what this engine computes on a device. `cargo test` and `freetoken selftest --golden` run the same code.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use anyhow::{Context, Result, ensure};
use freetoken_backend::{Backend, Caps, Precision};
use serde_json::Value;

use crate::{
    chat::template::Prompt,
    engine::{Division, Engine, EngineOptions, Sequence, sampling::SamplingParams},
    formats::{json, safetensors::Shard},
    model_files::ModelFiles,
    moe::{CacheSize, Elastic, ElasticCounters, ElasticOptions, Mode, Rates},
};

/// One thing that was compared.
#[derive(Debug, Clone)]
pub struct Check {
    /// What.
    pub name: String,
    /// What was seen, in words.
    pub seen: String,
    /// Whether it is within the bound.
    pub passed: bool,
}

/// What a golden checkpoint showed.
#[derive(Debug, Clone, Default)]
pub struct GoldenReport {
    /// In the order in which they were made.
    pub checks: Vec<Check>,
    /// What was done for experts behind a cache.
    pub experts: Option<ElasticCounters>,
}

impl GoldenReport {
    /// Whether something was compared and all of it is within bounds.
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.passed)
    }

    fn within(&mut self, name: String, got: f64, bound: f64) {
        let passed = got <= bound;
        self.checks.push(Check { name, seen: format!("{got:.2e}, bound {bound:.1e}"), passed });
    }

    fn equal<T: PartialEq + std::fmt::Debug>(&mut self, name: String, got: &[T], want: &[T]) {
        let first = got.iter().zip(want).position(|(a, b)| a != b);
        let seen = match first {
            _ if got == want => format!("{} equal", want.len()),
            Some(i) => format!("differ from place {i} on: {:?} instead of {:?}", got[i], want[i]),
            None => format!("{} instead of {}", got.len(), want.len()),
        };
        self.checks.push(Check { name, seen, passed: got == want });
    }
}

impl std::fmt::Display for GoldenReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for check in &self.checks {
            writeln!(
                f,
                "{:<12} {:<44} {}",
                if check.passed { "ok" } else { "FAILED" },
                check.name,
                check.seen
            )?;
        }
        let passed = self.checks.iter().filter(|check| check.passed).count();
        write!(f, "{passed} passed, {} failed", self.checks.len() - passed)
    }
}

/// Tensors of `expected.safetensors`.
struct Expected(BTreeMap<String, (Vec<usize>, Vec<u8>)>);

impl Expected {
    fn open(dir: &Path) -> Result<Self> {
        let shard = Shard::open(&dir.join("expected.safetensors"))?;
        let tensor = |name: &String| {
            let tensor = shard.tensor(name).expect("named by the shard itself");
            (name.clone(), (tensor.shape.clone(), tensor.bytes.as_slice().to_vec()))
        };
        Ok(Expected(shard.entries().keys().map(tensor).collect()))
    }

    fn get<T: bytemuck::Pod>(&self, name: &str) -> Option<Vec<T>> {
        self.0.get(name).map(|(_, bytes)| bytemuck::allocation::pod_collect_to_vec(bytes))
    }
}

/// Where experts are while a golden checkpoint is checked: the outputs must not tell.
#[derive(Debug, Clone, Copy)]
pub struct Placement {
    /// For reports.
    pub name: &'static str,
    /// The cache; `None`: all experts on the device, and no route points.
    pub cache: Option<CacheSize>,
    /// Where misses are computed.
    pub mode: Mode,
    /// Whether the device may read host memory.
    pub in_place: bool,
    /// Whether the host may compute.
    pub host: bool,
    /// Whether the cache is made smaller and larger on the way.
    pub resized: bool,
    /// How many experts host memory holds, the others being on the disk; `None`: all of them.
    pub ram: Option<Ram>,
}

/// Host memory that does not hold every expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ram {
    /// It holds half of them.
    Half,
    /// It holds as few as it may.
    Least,
}

impl Placement {
    const fn new(name: &'static str, cache: Option<CacheSize>, mode: Mode) -> Self {
        Placement { name, cache, mode, in_place: true, host: true, resized: false, ram: None }
    }

    const fn without_in_place(self) -> Self {
        Placement { in_place: false, ..self }
    }

    const fn without_host(self) -> Self {
        Placement { host: false, ..self }
    }

    const fn with_ram(self, ram: Ram) -> Self {
        Placement { ram: Some(ram), ..self }
    }
}

const NO_SLOTS: Option<CacheSize> = Some(CacheSize::Slots(0));

/// Every place that an expert can have.
pub const PLACEMENTS: &[Placement] = &[
    Placement::new("resident", None, Mode::Auto).without_in_place(),
    Placement::new("in place where memory is one, else resident", None, Mode::Auto),
    Placement::new("in two slots", Some(CacheSize::Slots(2)), Mode::Auto),
    Placement::new("on the host", NO_SLOTS, Mode::Cpu).without_in_place(),
    Placement::new("fetched", Some(CacheSize::Percent(75.0)), Mode::Gpu).without_in_place().without_host(),
    // Without slots, since a device with slots would rather fetch.
    Placement::new("in place", NO_SLOTS, Mode::Gpu).without_host(),
    Placement::new("half fetched, half on the host", Some(CacheSize::Percent(55.0)), Mode::Share(0.5)),
    Placement { resized: true, ..Placement::new("in slots that come and go", NO_SLOTS, Mode::Share(0.7)) },
    // On a device of its own memory these two are resident.
    Placement::new("half in memory, half on the disk", None, Mode::Auto).with_ram(Ram::Half),
    Placement::new("nearly all on the disk", None, Mode::Auto).with_ram(Ram::Least),
    Placement::new("in slots, in memory and on the disk", Some(CacheSize::Percent(30.0)), Mode::Auto)
        .with_ram(Ram::Half),
    Placement::new("in slots, nearly all others on the disk", Some(CacheSize::Percent(30.0)), Mode::Hybrid)
        .with_ram(Ram::Least),
    Placement::new("on the host, half from the disk", NO_SLOTS, Mode::Cpu)
        .without_in_place()
        .with_ram(Ram::Half),
    Placement::new("fetched, half from the disk", Some(CacheSize::Percent(60.0)), Mode::Gpu)
        .without_in_place()
        .without_host()
        .with_ram(Ram::Half),
    Placement::new("in place, half from the disk", NO_SLOTS, Mode::Gpu).without_host().with_ram(Ram::Half),
    Placement {
        resized: true,
        ..Placement::new("in slots that come and go over a disk", NO_SLOTS, Mode::Share(0.7))
    }
    .with_ram(Ram::Half),
];

/// Rates of no machine, so that nothing is measured for a model that small.
pub const RATES: Rates = Rates {
    link_alone: 2e10,
    link_shared: 1.8e10,
    host_alone: 3e10,
    host_shared: 2.5e10,
    device_read: 3e11,
    host_flops: 1e11,
    reply_seconds: 1e-5,
    wake_seconds: 1e-5,
    combine_seconds: 0.0,
    fetch_seconds: 0.0,
    copy_lane: false,
};

impl Placement {
    /// Whether the device can do without what the placement forbids.
    pub fn suits(&self, caps: &Caps) -> bool {
        self.cache.is_none() || self.host || !self.in_place || caps.reads_host
    }

    /// The options of an engine that places experts so. `host` computes beside the device.
    pub fn options(&self, options: EngineOptions, host: &Arc<dyn Backend>) -> EngineOptions {
        EngineOptions {
            expert_cache: self.cache,
            elastic: ElasticOptions {
                mode: self.mode,
                in_place: self.in_place,
                host: self.host.then(|| host.clone()),
                rates: Some(RATES),
                ..ElasticOptions::default()
            },
            ..options
        }
    }
}

impl Ram {
    /// The budget of a model.
    ///
    /// # Errors
    /// A plan that cannot be made.
    pub fn bytes(self, files: &ModelFiles, backend: &dyn Backend, options: &EngineOptions) -> Result<u64> {
        let demand = files.plan(backend, options)?.demand;
        let n_records = match self {
            Ram::Half => demand.n_experts / 2,
            // An expert of each layer, and two for a ring, where that is of the same memory.
            Ram::Least => demand.n_layers + 2,
        };
        Ok(n_records as u64 * demand.record_bytes)
    }
}

/// Checks one golden directory on a device. The report says what differs; an error means that nothing could be compared.
///
/// # Errors
/// A missing or broken file, or the device's refusal.
pub fn run(dir: &Path, backend: &Arc<dyn Backend>) -> Result<GoldenReport> {
    run_placed(dir, backend, backend, &PLACEMENTS[0])
}

/// The same with the experts where `placement` says; `host` computes beside the device.
///
/// # Errors
/// A missing or broken file, or the device's refusal.
pub fn run_placed(
    dir: &Path,
    backend: &Arc<dyn Backend>,
    host: &Arc<dyn Backend>,
    placement: &Placement,
) -> Result<GoldenReport> {
    let facts: Value = json::read(&dir.join("expected.json"), json::CONFIG_LIMIT)?;
    let files = ModelFiles::open(Some(dir))?;
    let expected = Expected::open(dir)?;
    let options =
        EngineOptions { context: 512, max_sequences: 4, max_chunk: Some(256), ..EngineOptions::default() };
    let options = placement.options(options, host);
    let ram = placement.ram.map(|ram| ram.bytes(&files, &**backend, &options)).transpose()?;
    let options = EngineOptions { ram, ..options };
    let mut engine = files.engine(backend.clone(), &options, &mut |_| ())?;
    let mut report = GoldenReport::default();
    let mut best = BestTokens::default();
    let prompts = facts["prompts"].as_array().context("expected.json: `prompts` is missing")?;
    for (i, prompt) in prompts.iter().filter_map(Value::as_str).enumerate() {
        if placement.resized {
            let n_experts = engine.elastic().map_or(0, Elastic::n_experts);
            let expert_slots = Some([5 * n_experts / 8, n_experts, n_experts / 3][i % 3]);
            engine.divide(Division { expert_slots, ..Division::default() }, &mut [])?;
        }
        let tokens: Vec<u32> = expected.get(&format!("{prompt}.input_ids")).context("no input_ids")?;
        match backend.caps().precision {
            Precision::F32 => exact(&mut engine, prompt, &tokens, &expected, &facts, &mut report)?,
            Precision::Auto => {
                close(&mut engine, prompt, &tokens, &expected, &facts, &mut best, &mut report)?
            }
        }
    }
    if best.n > 0 {
        best.report(&facts, &mut report)?;
    }
    text(&files, &mut engine, &facts, &mut report)?;
    report.experts = engine.elastic().map(Elastic::counters);
    Ok(report)
}

fn tolerance(facts: &Value, name: &str) -> Result<f64> {
    facts["tolerance"][name].as_f64().with_context(|| format!("expected.json: `tolerance.{name}` is missing"))
}

/// In f32: hidden states, routes, logits by every way of prefilling, greedy tokens.
fn exact(
    engine: &mut Engine,
    prompt: &str,
    tokens: &[u32],
    expected: &Expected,
    facts: &Value,
    report: &mut GoldenReport,
) -> Result<()> {
    let mut sequence = Sequence::new(tokens, SamplingParams::GREEDY, tokens.len());
    let trace = engine.trace(&mut sequence, tokens.len())?;
    engine.release(&mut sequence);
    for (layer, hidden) in trace.hidden.iter().enumerate() {
        let name = format!("{prompt}.hidden.{layer}");
        if let Some(want) = expected.get::<f32>(&name) {
            let largest = want.iter().fold(0.0_f64, |max, v| max.max(v.abs() as f64));
            report.within(name, max_difference(hidden, &want) / largest, tolerance(facts, "hidden_rel_f32")?);
        }
        if let Some(want) = expected.get::<i32>(&format!("{prompt}.router_ids.{layer}")) {
            let (ids, weights) = &trace.routes[layer];
            report.equal(format!("{prompt}.router_ids.{layer}"), ids, &want);
            let name = format!("{prompt}.router_weights.{layer}");
            let want: Vec<f32> = expected.get(&name).context("no router weights")?;
            report.within(name, max_difference(weights, &want), tolerance(facts, "router_weights_abs_f32")?);
        }
    }
    let want: Vec<f32> = expected.get(&format!("{prompt}.logits")).context("no logits")?;
    for (way, chunk) in
        [("in one go", usize::MAX), ("in chunks of 64", 64), ("in chunks of 7", 7), ("one by one", 1)]
    {
        let got = logits(engine, tokens, chunk)?;
        let name = format!("{prompt}.logits {way}");
        report.within(name, max_difference(&got, &want), tolerance(facts, "logits_abs_f32")?);
    }
    let want: Vec<u32> = expected.get(&format!("{prompt}.greedy_ids")).context("no greedy ids")?;
    report.equal(format!("{prompt}.greedy_ids"), &greedy(engine, tokens, want.len())?, &want);
    Ok(())
}

/// How often another token is best than the one expected, over all prompts of a checkpoint: of a short one alone, chance decides.
#[derive(Default)]
struct BestTokens {
    n: usize,
    n_others: usize,
}

impl BestTokens {
    /// Counts the rows of logits, `[n, vocab]`.
    fn count(&mut self, got: &[f32], want: &[f32], vocab: usize) {
        let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
        for (got, want) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)) {
            self.n += 1;
            self.n_others += (best(got) != best(want)) as usize;
        }
    }

    /// Twice as often as in the independent implementation with bf16 activations, and a hundredth more.
    fn report(&self, facts: &Value, report: &mut GoldenReport) -> Result<()> {
        let agreement =
            facts["transformers_in_bf16"]["argmax_agreement"].as_f64().context("no argmax agreement")?;
        let differ = self.n_others as f64 / self.n as f64;
        report.within("best token differs".into(), differ, 2.0 * (1.0 - agreement) + 0.01);
        Ok(())
    }
}

/// In the fast mode, where a rounding may change a route: the logits' root mean square error and the best tokens.
fn close(
    engine: &mut Engine,
    prompt: &str,
    tokens: &[u32],
    expected: &Expected,
    facts: &Value,
    best: &mut BestTokens,
    report: &mut GoldenReport,
) -> Result<()> {
    let want: Vec<f32> = expected.get(&format!("{prompt}.logits")).context("no logits")?;
    let got = logits(engine, tokens, usize::MAX)?;
    ensure!(got.len() == want.len(), "{prompt}.logits: {} values instead of {}", got.len(), want.len());
    let squares: f64 = got.iter().zip(&want).map(|(a, b)| (*a as f64 - *b as f64).powi(2)).sum();
    let rms = (squares / want.len() as f64).sqrt();
    report.within(format!("{prompt}.logits root mean square"), rms, tolerance(facts, "logits_rms_bf16")?);
    best.count(&got, &want, want.len() / tokens.len());
    Ok(())
}

/// Token ids of texts, and the chat template.
fn text(files: &ModelFiles, engine: &mut Engine, facts: &Value, report: &mut GoldenReport) -> Result<()> {
    let check = &facts["tokenizer_check"];
    let tokenizer = files.tokenizer()?;
    let ids = |value: &Value| -> Result<Vec<u32>> { Ok(serde_json::from_value(value.clone())?) };
    for (i, case) in check["encode"].as_array().into_iter().flatten().enumerate() {
        let text = case["text"].as_str().context("tokenizer_check: no text")?;
        report.equal(format!("tokenizer.encode.{i}"), &tokenizer.encode(text, false)?, &ids(&case["ids"])?);
    }
    let Some(template) = files.template() else { return Ok(()) };
    let chat = &check["chat"];
    let messages = chat["messages"].as_array().context("tokenizer_check: no chat")?;
    let rendered = template.render(&Prompt {
        messages,
        tools: None,
        add_generation_prompt: true,
        kwargs: &serde_json::Map::new(),
        now: jiff::civil::date(2026, 1, 5).at(12, 0, 0, 0),
    })?;
    report.equal(
        "chat.rendered".into(),
        &[rendered.as_str()],
        &[chat["rendered"].as_str().unwrap_or_default()],
    );
    let tokens = tokenizer.encode(&rendered, false)?;
    report.equal("chat.ids".into(), &tokens, &ids(&chat["ids"])?);
    if engine.backend().caps().precision == Precision::F32 {
        let want = ids(&chat["greedy_ids"])?;
        report.equal("chat.greedy_ids".into(), &greedy(engine, &tokens, want.len())?, &want);
    }
    Ok(())
}

fn max_difference(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let difference = |(a, b): (&f32, &f32)| (*a as f64 - *b as f64).abs();
    got.iter()
        .zip(want)
        .map(difference)
        .fold(0.0, |max, d| if d.is_nan() { f64::INFINITY } else { max.max(d) })
}

/// Logits of all tokens, `[n, vocab]`, prefilled in chunks.
///
/// # Errors
/// The engine's.
pub fn logits(engine: &mut Engine, tokens: &[u32], chunk: usize) -> Result<Vec<f32>> {
    let mut sequence = Sequence::new(tokens, SamplingParams::GREEDY, tokens.len());
    let mut all = Vec::new();
    let scored = engine.score(&mut sequence, chunk, |row| -> Result<()> {
        all.extend_from_slice(row);
        Ok(())
    });
    engine.release(&mut sequence);
    scored.map(|()| all)
}

/// The best continuation of `n` tokens, the end of the sequence ignored.
///
/// # Errors
/// The engine's.
pub fn greedy(engine: &mut Engine, tokens: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut sequence = Sequence::new(tokens, SamplingParams::GREEDY, tokens.len() + n);
    let mut drawn = [0];
    let mut ids = Vec::new();
    if n > 0 {
        ids.extend(engine.prefill(&mut sequence, &mut |_| true)?);
    }
    while ids.len() < n {
        sequence.push(*ids.last().context("a first token")?);
        engine.decode(&mut [&mut sequence], &mut drawn)?;
        ids.push(drawn[0]);
    }
    engine.release(&mut sequence);
    Ok(ids)
}
