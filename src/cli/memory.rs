//! Arguments that divide device memory, and what they came to: what is said at the start and at the end of a run.

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use freetoken_backend::Backend;
use serde_json::{Value, json};

use super::{model::DeviceArgs, terminal::note};
use crate::{
    devices,
    engine::{Engine, EngineOptions},
    model_files,
    moe::{ByteCount, CacheSize, Elastic, ElasticOptions, Mode},
};

/// `--experts`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ExpertsArg {
    /// Wherever each finishes first, by measured speeds.
    Auto,
    /// On the GPU: fetched, or read over the link.
    Gpu,
    /// On the CPU.
    Cpu,
    /// Split between both in every layer.
    Hybrid,
}

/// How device memory is divided.
#[derive(Debug, Clone, Args)]
pub(super) struct MemoryArgs {
    /// Device memory for everything: weights, caches and experts, as 6GiB [default: what is free].
    #[arg(long, value_name = "BYTES")]
    pub(super) vram: Option<ByteCount>,
    /// Device memory for routed experts: 2GiB, 25% of them, or 96slots [default: all of them, or what is left].
    #[arg(long, value_name = "SIZE")]
    pub(super) expert_cache: Option<CacheSize>,
    /// Where decode computes experts that have no place on the device. Long prompts stream them through it in any case.
    #[arg(long, value_enum, default_value = "auto")]
    pub(super) experts: ExpertsArg,
    /// Place experts by counts instead of clocks, so that a seed gives the same text every time.
    #[arg(long)]
    pub(super) deterministic: bool,
}

impl MemoryArgs {
    /// Options of an engine on this device.
    pub(super) fn options(
        &self,
        options: EngineOptions,
        backend: &dyn Backend,
        device: &DeviceArgs,
    ) -> Result<EngineOptions> {
        let is_host = backend.caps().host_memory;
        ensure!(
            !is_host || (self.vram.is_none() && matches!(self.experts, ExpertsArg::Auto | ExpertsArg::Cpu)),
            "--vram and --experts divide work between a GPU and the CPU, and this runs on the CPU: choose a GPU with --backend"
        );
        let all_on_host = (self.experts == ExpertsArg::Cpu && !is_host).then_some(CacheSize::Slots(0));
        Ok(EngineOptions {
            vram: self.vram.map(|count| count.0),
            // One tier, where both would be the same memory.
            state_slots: if is_host { 0 } else { options.state_slots },
            expert_cache: self.expert_cache.or(all_on_host),
            elastic: ElasticOptions {
                mode: match self.experts {
                    ExpertsArg::Auto => Mode::Auto,
                    ExpertsArg::Gpu => Mode::Gpu,
                    // On the CPU as the device there is no second one.
                    ExpertsArg::Cpu if is_host => Mode::Auto,
                    ExpertsArg::Cpu => Mode::Cpu,
                    ExpertsArg::Hybrid => Mode::Hybrid,
                },
                deterministic: self.deterministic,
                host: if is_host {
                    None
                } else {
                    Some(devices::host(backend.caps().precision, device.n_threads())?)
                },
                probes: Some(model_files::home().join("probes")),
                ..ElasticOptions::default()
            },
            ..options
        })
    }

    /// Says what the arguments came to; where they came to nothing, that.
    pub(super) fn say(&self, engine: &Engine) {
        match engine.elastic() {
            Some(elastic) => note(&started(elastic, engine.backend())),
            None if self.experts != ExpertsArg::Auto && !engine.backend().caps().host_memory => {
                note("all experts are on the device: --experts has nothing to divide");
            }
            None => {}
        }
    }
}

/// What there is of slots, banks and rates.
fn started(elastic: &Elastic, backend: &dyn Backend) -> String {
    let (rates, _) = elastic.rates();
    let reads = if backend.caps().reads_host { "can read" } else { "cannot read" };
    let (slots, experts, ring) = (elastic.n_slots(), elastic.n_experts(), elastic.n_ring());
    let (device, banks) = (ByteCount(elastic.device_bytes()), ByteCount(elastic.bank_bytes()));
    let mut text = format!(
        "experts: {slots} of {experts} in slots and {ring} slots more to stream through ({device} on the device), {banks} in \
         host memory, which the device {reads} in place; link {:.1} GB/s",
        rates.link_alone / 1e9
    );
    if elastic.has_host() {
        text += &format!(
            " ({:.1} while the CPU computes), CPU {:.1} GB/s ({:.1} while the link is busy), {:.0} us from question to reply",
            rates.link_shared / 1e9,
            rates.host_alone / 1e9,
            rates.host_shared / 1e9,
            rates.reply_seconds * 1e6
        );
    }
    text
}

/// What was done for experts since the start: a line for people. `None` where all of them are on the device.
pub(super) fn summary(engine: &Engine) -> Option<String> {
    let elastic = engine.elastic()?;
    let sums = elastic.counters();
    let decode = sums.decode;
    let n_used = decode.hits + decode.misses();
    let over_link = (decode.fetched
        + decode.in_place
        + decode.behind
        + sums.prompts.fetched
        + sums.prompts.in_place
        + sums.prefill.n_fetched
        + sums.prefill.n_wasted)
        * elastic.record_bytes() as u64;
    Some(format!(
        "experts: {:.1}% hits in decode; {} fetched, {} read in place, {} on the CPU; prefill {} hits, {} streamed; {} over \
         the link; by the cost model {:.2} s beside other work, {:.2} s not",
        100.0 * decode.hits as f64 / n_used.max(1) as f64,
        decode.fetched,
        decode.in_place,
        decode.host,
        sums.prefill.n_hits,
        sums.prefill.n_fetched,
        ByteCount(over_link),
        decode.hidden_seconds,
        decode.exposed_seconds,
    ))
}

/// The same for `--json`; null where all experts are on the device.
pub(super) fn summary_json(engine: &Engine) -> Value {
    let Some(elastic) = engine.elastic() else { return Value::Null };
    let (rates, observed) = elastic.rates();
    let sums = elastic.counters();
    json!({
        "slots": elastic.n_slots(),
        "ring": elastic.n_ring(),
        "experts": elastic.n_experts(),
        "record_bytes": elastic.record_bytes(),
        "device_bytes": elastic.device_bytes(),
        "bank_bytes": elastic.bank_bytes(),
        "device_reads_banks": engine.backend().caps().reads_host,
        "rates": rates,
        "observed": observed,
        "hits": sums.decode.hits,
        "fetched": sums.decode.fetched,
        "in_place": sums.decode.in_place,
        "host": sums.decode.host,
        "behind": sums.decode.behind,
        "predicted_hidden_seconds": sums.decode.hidden_seconds,
        "predicted_exposed_seconds": sums.decode.exposed_seconds,
        "prompt_fetched": sums.prompts.fetched,
        "prompt_in_place": sums.prompts.in_place,
        "prompt_host": sums.prompts.host,
        "prefill_hits": sums.prefill.n_hits,
        "prefill_fetched": sums.prefill.n_fetched,
        "prefill_wasted": sums.prefill.n_wasted,
        "host_seconds": sums.host_seconds,
        "link_seconds": sums.link_seconds,
        "link_bytes": sums.link_bytes,
    })
}
