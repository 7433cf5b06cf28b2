//! From a configuration and a source of tensors to an engine: decides where the experts will be before a byte is loaded.

use std::sync::Arc;

use freetoken_backend::{Backend, ExpertRecord, os, record as record_of};

use crate::{
    devices,
    engine::{Engine, EngineError, EngineOptions, step_bytes},
    models::{self, ConfigFile, Inventory, ModelError, WeightSource, Weights},
    moe::{
        BudgetError, ExpertPlan, Mode,
        budget::{self, Demand, Supply},
        ram,
    },
};

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its configuration or a weight is wrong.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// It does not fit.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The engine could not be made.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Loads the weights onto a device, and what does not fit of the experts into host memory; `progress` hears the bytes of each
/// tensor.
///
/// # Errors
/// [`LoadError`], one sentence.
pub fn load(
    config: &ConfigFile<'_>,
    source: &dyn WeightSource,
    backend: Arc<dyn Backend>,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Engine, LoadError> {
    let plan = plan(config, source, &*backend, options)?;
    load_as(&plan, config, source, backend, options, progress)
}

/// The same by a plan that was made for it.
///
/// # Errors
/// [`LoadError`], one sentence.
pub fn load_as(
    plan: &LoadPlan,
    config: &ConfigFile<'_>,
    source: &dyn WeightSource,
    backend: Arc<dyn Backend>,
    options: &EngineOptions,
    progress: &mut dyn FnMut(u64),
) -> Result<Engine, LoadError> {
    let LoadPlan { experts: plan, demand, .. } = plan;
    let mut options = options.clone();
    let mut weights = Weights::new(&*backend, source, progress);
    if let ExpertPlan::Cached { n_records: Some(n_records), .. } = *plan {
        weights = weights.with_part_in_banks(ram::divide(n_records, demand.n_layers));
        if backend.caps().host_memory && options.expert_cache.is_none() {
            // What is in memory is the device's, what comes from the disk the host's, and both are one.
            options.elastic.host.get_or_insert_with(|| backend.clone());
            options.elastic.mode = Mode::Share(1.0);
        }
    } else if *plan != ExpertPlan::Resident {
        weights = weights.with_banks();
    }
    let model = models::load(config, &mut weights)?;
    let experts = weights.into_experts();
    Ok(Engine::new(backend, model, experts, *plan, &options)?)
}

/// What a model takes, what there is, and where its experts go.
#[derive(Debug, Clone)]
pub struct LoadPlan {
    /// Where the experts go.
    pub experts: ExpertPlan,
    /// What the model takes.
    pub demand: Demand,
    /// What there is.
    pub supply: Supply,
    /// What the model is made of.
    pub inventory: Inventory,
    /// One expert, where there are any.
    pub record: Option<ExpertRecord>,
}

/// Where the experts of a model go on a device; reads no weights.
///
/// # Errors
/// [`LoadError`]: one sentence, with what would fit where it does not.
pub fn plan(
    config: &ConfigFile<'_>,
    source: &dyn WeightSource,
    backend: &dyn Backend,
    options: &EngineOptions,
) -> Result<LoadPlan, LoadError> {
    let caps = backend.caps();
    let inventory = Inventory::of_checkpoint(config, source, &*devices::reference())?;
    let sizes = &inventory.sizes;
    let free = backend.free_bytes().map_err(EngineError::from)?;
    let EngineOptions { vram, expert_cache: cache, ram, .. } = *options;
    let (n_layers, n_experts) = sizes.moe.map_or((0, 0), |moe| (moe.n_layers, moe.n_layers * moe.n_experts));
    let expert_bytes = inventory.expert_bytes().unwrap_or(0) * n_experts as u64;
    let record = sizes.moe.zip(inventory.expert_format);
    let record = record.map(|(moe, format)| record_of(format, sizes.hidden, moe.intermediate));
    let record_bytes = record.as_ref().map_or(0, |record| record.bytes as u64);
    let demand = Demand {
        dense_bytes: inventory.bytes() - expert_bytes,
        step_bytes: step_bytes(sizes, caps, options, vram.or(free), false),
        streamed_step_bytes: step_bytes(sizes, caps, options, vram.or(free), true),
        record_bytes,
        n_experts,
        n_layers,
    };
    let may_read = options.elastic.in_place && caps.reads_host;
    let is_one_memory = caps.host_memory || caps.unified_memory && may_read;
    let beside = if is_one_memory { demand.dense_bytes + demand.step_bytes } else { 0 };
    let host = os::available_memory().map(|free| free.saturating_sub(beside));
    let supply = Supply { free, vram, cache, host, ram, disk: source.files().is_some() };
    let experts = if is_one_memory && cache.is_none() && vram.is_none() && n_experts > 0 {
        // Experts that no file has are in this memory already.
        let is_there = caps.host_memory && !supply.disk;
        let part = if is_there { None } else { budget::plan_one_memory(&demand, &supply)? };
        part.unwrap_or(if caps.host_memory { ExpertPlan::Resident } else { ExpertPlan::InPlace })
    } else if caps.host_memory && cache.is_none() {
        ExpertPlan::Resident
    } else {
        budget::plan(&demand, &supply)?
    };
    Ok(LoadPlan { experts, demand, supply, inventory, record })
}
