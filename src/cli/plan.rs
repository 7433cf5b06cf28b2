//! What is said before a model is loaded: where each part of it will live, with bytes, and how fast it should decode by the rates that
//! were measured here before.

use freetoken_backend::{Backend, Caps};
use serde_json::{Value, json};

use crate::{
    engine::EngineOptions,
    loading::LoadPlan,
    moe::{self, ByteCount, ExpertCost, ExpertPlan, Spread},
};

/// Bytes of each place.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Tiers {
    /// Experts in the device's own memory.
    device: u64,
    /// Experts in host memory that the device reads.
    pinned: u64,
    /// Experts in other host memory.
    ram: u64,
    /// Experts that are on the disk alone.
    disk: u64,
}

impl Tiers {
    fn of(plan: &LoadPlan, caps: &Caps) -> Self {
        let record = plan.demand.record_bytes;
        let n_all = plan.demand.n_experts as u64;
        let (on_device, in_banks) = match plan.experts {
            ExpertPlan::Resident => (n_all, 0),
            ExpertPlan::InPlace => (0, n_all),
            ExpertPlan::Cached { n_slots, n_ring, n_records, .. } => {
                ((n_slots + n_ring) as u64, n_records.map_or(n_all, |n| n as u64))
            }
        };
        let is_cached = plan.experts != ExpertPlan::Resident;
        let disk = if is_cached { n_all - in_banks } else { 0 };
        let (on_device, in_banks, disk) = (on_device * record, in_banks * record, disk * record);
        match (caps.host_memory, caps.reads_host) {
            (true, _) => Tiers { ram: on_device + in_banks, disk, ..Tiers::default() },
            (false, true) => Tiers { device: on_device, pinned: in_banks, ram: 0, disk },
            (false, false) => Tiers { device: on_device, pinned: 0, ram: in_banks, disk },
        }
    }
}

/// A plan for people and for programs.
pub(super) struct Said<'a> {
    plan: &'a LoadPlan,
    is_host: bool,
    tiers: Tiers,
    /// By the cost model, for one sequence whose routes are spread evenly; `None` where the rates are not known.
    tokens_per_second: Option<f64>,
}

impl<'a> Said<'a> {
    /// What a plan comes to on a device.
    pub(super) fn new(plan: &'a LoadPlan, backend: &dyn Backend, options: &EngineOptions) -> Self {
        let caps = backend.caps();
        Said {
            plan,
            is_host: caps.host_memory,
            tiers: Tiers::of(plan, caps),
            tokens_per_second: expected(plan, backend, options),
        }
    }

    /// Bytes of weights that every token needs.
    fn dense_bytes(&self) -> u64 {
        self.plan.demand.dense_bytes
    }

    /// Bytes of caches and activations.
    fn step_bytes(&self) -> u64 {
        match self.plan.experts {
            ExpertPlan::Cached { .. } => self.plan.demand.streamed_step_bytes,
            ExpertPlan::Resident | ExpertPlan::InPlace => self.plan.demand.step_bytes,
        }
    }

    /// One sentence.
    pub(super) fn text(&self) -> String {
        let Tiers { device, pinned, ram, disk } = self.tiers;
        let place = if self.is_host { "in RAM" } else { "on the device" };
        let (dense, step) = (ByteCount(self.dense_bytes()), ByteCount(self.step_bytes()));
        let mut text = format!("{dense} of weights and {step} of caches {place}");
        let experts: Vec<String> = [
            (device, "on the device"),
            (pinned, "in pinned RAM"),
            (ram, "in RAM"),
            (disk, "on the disk alone"),
        ]
        .into_iter()
        .filter(|(bytes, _)| *bytes > 0)
        .map(|(bytes, place)| format!("{} {place}", ByteCount(bytes)))
        .collect();
        if !experts.is_empty() {
            text += &format!("; experts: {}", experts.join(", "));
        }
        text += &match self.tokens_per_second {
            Some(rate) => format!("; about {rate:.1} tokens a second by the rates of an earlier run"),
            None => "; how fast it decodes is not known before it has run here".into(),
        };
        text
    }

    /// The same in bytes.
    pub(super) fn json(&self) -> Value {
        let Tiers { device, pinned, ram, disk } = self.tiers;
        json!({
            "weight_bytes": self.dense_bytes(),
            "cache_bytes": self.step_bytes(),
            "expert_device_bytes": device,
            "expert_pinned_ram_bytes": pinned,
            "expert_ram_bytes": ram,
            "expert_disk_bytes": disk,
            "expected_tokens_per_second": self.tokens_per_second,
        })
    }
}

/// Tokens a second that the cost model expects of one sequence, by the rates that were saved.
fn expected(plan: &LoadPlan, backend: &dyn Backend, options: &EngineOptions) -> Option<f64> {
    let (caps, elastic) = (backend.caps(), &options.elastic);
    let (record, moe) = (plan.record.as_ref()?, plan.inventory.sizes.moe?);
    let host = if caps.host_memory { Some(caps) } else { elastic.host.as_deref().map(Backend::caps) };
    let folder = elastic.probes.as_deref()?;
    let rates = moe::saved_rates(folder, caps, record, host)?;
    let n_all = plan.demand.n_experts.max(1) as f64;
    let (slots, records) = match plan.experts {
        ExpertPlan::Resident => (n_all, 0.0),
        ExpertPlan::InPlace => (0.0, n_all),
        ExpertPlan::Cached { n_slots, n_records, .. } => {
            (n_slots as f64, n_records.map_or(n_all, |n| n as f64))
        }
    };
    let top_k = moe.top_k as f64;
    let on_device = (slots / n_all).min(1.0);
    let in_ram = (records / n_all).min(1.0 - on_device);
    // The CPU reads a bank as fast as anything else.
    let (n_hits, n_in_ram) = match caps.host_memory {
        true => (top_k * (on_device + in_ram), 0.0),
        false => (top_k * on_device, top_k * in_ram),
    };
    let n_disk = top_k - n_hits - n_in_ram;
    let disk_rate = if n_disk > 1e-9 { moe::saved_disk_rate(folder)? } else { f64::MAX };
    let expert =
        ExpertCost { record_bytes: record.weight_bytes() as u64, flops_per_row: record.flops_per_row() };
    let spread = Spread { n_layers: plan.demand.n_layers, n_hits, n_in_ram, n_disk };
    Some(1.0 / rates.expected_decode(expert, &spread, plan.demand.dense_bytes, disk_rate))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{devices, loading, model_files::ModelFiles};

    #[test]
    fn a_plan_says_where_everything_will_live() {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let backend = devices::reference();
        let said = |ram: Option<u64>| {
            let options = EngineOptions { ram, ..EngineOptions::default() };
            let plan = loading::plan(&files.config(), files.checkpoint(), &*backend, &options)?;
            let said = Said::new(&plan, &*backend, &options);
            Ok::<_, loading::LoadError>((said.text(), said.json()))
        };
        let record = 72 << 10;
        let (text, json) = said(None).unwrap();
        assert!(text.contains("experts: 13.5 MiB in RAM; how fast"), "{text}");
        assert_eq!(json["expert_disk_bytes"], 0);
        let (text, json) = said(Some(96 * record)).unwrap();
        assert!(text.contains("in RAM, 7.6 MiB on the disk alone"), "{text}");
        assert_eq!(
            (&json["expert_ram_bytes"], &json["expert_disk_bytes"]),
            (&(96 * record).into(), &(108 * record).into())
        );
        assert_eq!(json["expected_tokens_per_second"], Value::Null);
        let refused = said(Some(7 * record)).unwrap_err().to_string();
        assert!(refused.contains("the least is --ram 0.6 MiB"), "{refused}");
    }
}
