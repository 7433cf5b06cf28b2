//! Host banks: the records of routed experts in host memory, a bank for each MoE layer, where misses come from and where the host
//! computes. They hold every expert, or are memory for those of a disk that fit.

use std::sync::Arc;

use freetoken_backend::{Backend, ExpertPool, ExpertRecord, Experts, FillingBank, HostBuffer, Result};

use super::{RecordReader, RecordSource};

/// The experts of a model in host memory. All layers have as many, of one layout.
#[derive(Debug, Default)]
pub struct ExpertBanks {
    record: Option<ExpertRecord>,
    n_experts: usize,
    banks: Vec<Arc<HostBuffer>>,
    /// The same banks, where they are filled while the model runs, and records of each.
    filling: Vec<(FillingBank, usize)>,
    /// What they are filled from.
    source: Option<Arc<dyn RecordSource>>,
}

impl ExpertBanks {
    /// Adds the bank of the next MoE layer, `[n_experts]` records, and gives the layer's number. Asserts that it is like the
    /// others.
    pub fn push(&mut self, record: ExpertRecord, n_experts: usize, bank: HostBuffer) -> usize {
        assert!(bank.as_slice().len() >= n_experts * record.bytes, "a bank holds every expert");
        assert!(self.filling.is_empty(), "all banks hold every expert, or none does");
        self.add(record, n_experts, Arc::new(bank))
    }

    /// Adds the bank of the next MoE layer: memory for `n_records` of `n_experts`, which lie on a disk. Asserts that it is like the
    /// others.
    pub fn push_part(&mut self, record: ExpertRecord, n_experts: usize, n_records: usize, bank: HostBuffer) {
        assert!(bank.as_slice().len() >= n_records * record.bytes, "a bank holds its records");
        assert_eq!(self.filling.len(), self.banks.len(), "all banks hold every expert, or none does");
        let bank = FillingBank::new(bank);
        self.add(record, n_experts, bank.memory().clone());
        self.filling.push((bank, n_records));
    }

    fn add(&mut self, record: ExpertRecord, n_experts: usize, bank: Arc<HostBuffer>) -> usize {
        assert!(self.record.as_ref().is_none_or(|known| *known == record), "one layout for all layers");
        assert!(self.banks.is_empty() || self.n_experts == n_experts, "as many experts in all layers");
        self.record = Some(record);
        self.n_experts = n_experts;
        self.banks.push(bank);
        self.banks.len() - 1
    }

    /// Where all experts of banks that do not hold them are read.
    pub fn set_source(&mut self, source: Arc<dyn RecordSource>) {
        self.source = Some(source);
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
        assert!(self.filling.is_empty(), "banks that hold every expert");
        let Some(record) = self.record else { return Ok(Vec::new()) };
        let (n_layers, n_experts) = (self.banks.len(), self.n_experts);
        let table = backend.alloc(n_layers * n_experts * 4)?.whole();
        backend.write(&table, bytemuck::cast_slice(&vec![-1_i32; n_layers * n_experts]))?;
        let pool = Arc::new(ExpertPool::without_slots(record, n_experts, table, self.banks));
        Ok(Experts::of_layers(&pool))
    }

    /// What brings from a disk what the banks lack, and records of each bank; `None` where they hold every expert. Asserts that it is
    /// known where they are read.
    ///
    /// # Errors
    /// The system's refusal to start a thread.
    pub fn reader(&mut self) -> Result<Option<(RecordReader, Vec<usize>)>> {
        let record_bytes = self.record.as_ref().map_or(0, |record| record.bytes);
        let (banks, n_records): (Vec<_>, Vec<_>) = std::mem::take(&mut self.filling).into_iter().unzip();
        if banks.is_empty() {
            return Ok(None);
        }
        let source = self.source.take().expect("banks that lack experts have a source of them");
        let reader = RecordReader::new(source, banks, &n_records, record_bytes)?;
        Ok(Some((reader, n_records)))
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.banks.iter().map(|bank| bank.as_slice().len() as u64).sum()
    }
}
