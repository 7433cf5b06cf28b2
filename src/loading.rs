//! From a configuration and a source of tensors to an engine: decides where the experts will be before a byte is loaded.

use std::sync::Arc;

use freetoken_backend::{Backend, record};

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
    if matches!(plan, ExpertPlan::Cached { .. }) {
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
    let free = backend.free_bytes().map_err(EngineError::from)?;
    let supply = Supply { free, vram: options.vram, cache: options.expert_cache };
    let sizes = &inventory.sizes;
    let Some(moe) = sizes.moe.filter(|moe| moe.n_layers > 0) else {
        return Ok(ExpertPlan::Resident);
    };
    let format = inventory.expert_format()?;
    let n_experts = moe.n_layers * moe.n_experts;
    let expert_bytes = inventory.expert_bytes().unwrap_or(0) * n_experts as u64;
    let demand = Demand {
        dense_bytes: inventory.bytes() - expert_bytes,
        step_bytes: step_bytes(sizes, caps, options, supply.vram.or(free), false),
        streamed_step_bytes: step_bytes(sizes, caps, options, supply.vram.or(free), true),
        record_bytes: record(format, sizes.hidden, moe.intermediate).bytes as u64,
        n_experts,
    };
    Ok(budget::plan(&demand, &supply)?)
}
