//! Host banks: the records of every routed expert in host memory, a bank for each MoE layer, where misses come from and where
//! the host computes.

use std::sync::Arc;

use freetoken_backend::{Backend, ExpertPool, ExpertRecord, Experts, HostBuffer, Result};

/// The experts of a model in host memory. All layers have as many, of one layout.
#[derive(Debug, Default)]
pub struct ExpertBanks {
    record: Option<ExpertRecord>,
    n_experts: usize,
    banks: Vec<Arc<HostBuffer>>,
}

impl ExpertBanks {
    /// Adds the bank of the next MoE layer, `[n_experts]` records, and gives the layer's number. Asserts that it is like the
    /// others.
    pub fn push(&mut self, record: ExpertRecord, n_experts: usize, bank: HostBuffer) -> usize {
        assert!(self.record.as_ref().is_none_or(|known| *known == record), "one layout for all layers");
        assert!(self.banks.is_empty() || self.n_experts == n_experts, "as many experts in all layers");
        assert!(bank.as_slice().len() >= n_experts * record.bytes, "a bank holds every expert");
        self.record = Some(record);
        self.n_experts = n_experts;
        self.banks.push(Arc::new(bank));
        self.banks.len() - 1
    }

    /// Layout of an expert; `None` without any.
    pub fn record(&self) -> Option<&ExpertRecord> {
        self.record.as_ref()
    }

    /// Experts of a layer.
    pub fn n_experts(&self) -> usize {
        self.n_experts
    }

    /// A bank for each MoE layer.
    pub fn layers(&self) -> &[Arc<HostBuffer>] {
        &self.banks
    }

    /// Where the experts of each layer are for a device that reads all of them in their banks.
    ///
    /// # Errors
    /// The device's refusal.
    pub fn in_place(self, backend: &dyn Backend) -> Result<Vec<Experts>> {
        let Some(record) = self.record else { return Ok(Vec::new()) };
        let (n_layers, n_experts) = (self.banks.len(), self.n_experts);
        let table = backend.alloc(n_layers * n_experts * 4)?.whole();
        backend.write(&table, bytemuck::cast_slice(&vec![-1_i32; n_layers * n_experts]))?;
        let pool = Arc::new(ExpertPool::without_slots(record, n_experts, table, self.banks));
        Ok(Experts::of_layers(&pool))
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        let record = self.record.as_ref().map_or(0, |record| record.bytes);
        (self.banks.len() * self.n_experts * record) as u64
    }
}
