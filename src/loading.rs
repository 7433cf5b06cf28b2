//! From a configuration and a source of tensors to an engine: decides where the experts will be before a byte is loaded.

use std::sync::Arc;

use freetoken_backend::{Backend, os, record};

use crate::{
    devices,
    engine::{Engine, EngineError, EngineOptions, step_bytes},
    models::{self, ConfigFile, Inventory, ModelError, WeightSource, Weights},
    moe::{
        BudgetError, ExpertPlan,
        budget::{self, Demand, Supply},
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
    let mut weights = Weights::new(&*backend, source, progress);
    if plan != ExpertPlan::Resident {
        weights = weights.with_banks();
    }
    let model = models::load(config, &mut weights)?;
    let experts = weights.into_experts();
    Ok(Engine::new(backend, model, experts, plan, options)?)
}

/// Where the experts of a model go on a device.
fn plan(
    config: &ConfigFile<'_>,
    source: &dyn WeightSource,
    backend: &dyn Backend,
    options: &EngineOptions,
) -> Result<ExpertPlan, LoadError> {
    let caps = backend.caps();
    if caps.host_memory && options.expert_cache.is_none() {
        return Ok(ExpertPlan::Resident);
    }
    let inventory = Inventory::of_checkpoint(config, source, &*devices::reference())?;
    let sizes = &inventory.sizes;
    let free = backend.free_bytes().map_err(EngineError::from)?;
    let (vram, cache) = (options.vram, options.expert_cache);
    let supply = Supply { free, vram, cache, host: os::available_memory() };
    let n_experts = sizes.moe.map_or(0, |moe| moe.n_layers * moe.n_experts);
    let expert_bytes = inventory.expert_bytes().unwrap_or(0) * n_experts as u64;
    let record_bytes = match (sizes.moe, inventory.expert_format) {
        (Some(moe), Some(format)) => record(format, sizes.hidden, moe.intermediate).bytes as u64,
        _ => 0,
    };
    let demand = Demand {
        dense_bytes: inventory.bytes() - expert_bytes,
        step_bytes: step_bytes(sizes, caps, options, vram.or(free), false),
        streamed_step_bytes: step_bytes(sizes, caps, options, vram.or(free), true),
        record_bytes,
        n_experts,
    };
    let may_read = options.elastic.in_place && caps.reads_host;
    if caps.unified_memory && may_read && cache.is_none() && vram.is_none() && n_experts > 0 {
        budget::check_host(&demand, &supply)?;
        return Ok(ExpertPlan::InPlace);
    }
    Ok(budget::plan(&demand, &supply)?)
}
