//! Where the kernels of expert_mlp find experts: in the slots of a pool, through a table, and in a layer's host bank where the device
//! reads it.

use freetoken_backend::ExpertPool;

use crate::{
    device::Gpu,
    dispatch::Recorder,
    host::WgpuHostMemory,
    memory::{Slot, buffer},
};

/// Dispatches over which a bank may be spread, each binding as many windows of it as the device allows.
const MAX_BANK_DISPATCHES: usize = 4;
/// What no table says: nothing is read from a bank.
pub(crate) const NEVER: i32 = i32::MAX;

/// Where experts are found: a table of slots, the chunks that hold them, and the layer's bank.
pub(crate) struct Places {
    /// i32: the slot of each expert of a layer, or less than 0, from `first_entry` on.
    pub(crate) table: Slot,
    /// The layer's first entry.
    pub(crate) first_entry: u32,
    /// Slots, in order.
    pub(crate) chunks: Vec<Slot>,
    /// Slots of a chunk.
    pub(crate) slots_per_chunk: usize,
    /// Experts that the table says this of are read from `bank`.
    pub(crate) banked: i32,
    /// Where they are read.
    pub(crate) bank: Bank,
}

/// A layer's host bank as kernels bind it.
#[derive(Default)]
pub(crate) struct Bank {
    /// The records of all experts, in order.
    pub(crate) windows: Vec<Slot>,
    /// Records of a window.
    pub(crate) per_window: usize,
}

impl Places {
    /// All slots of a pool, through its own table.
    pub(crate) fn of_pool(pool: &ExpertPool, layer: u32, recorder: &Recorder<'_>) -> Self {
        Places {
            table: recorder.words(&pool.table, pool.n_layers * pool.n_experts),
            first_entry: pool.entry(layer, 0) as u32,
            chunks: pool.chunks.iter().map(|chunk| Slot::whole(buffer(chunk))).collect(),
            slots_per_chunk: pool.slots_per_chunk,
            banked: NEVER,
            bank: Bank::default(),
        }
    }
}

impl Bank {
    /// The bank of a layer; the error says why the device cannot read it.
    pub(crate) fn of_pool(pool: &ExpertPool, layer: u32, gpu: &Gpu) -> Result<Self, String> {
        let bank = pool.banks.get(layer as usize).and_then(|bank| bank.downcast::<WgpuHostMemory>());
        let Some(buffer) = bank.and_then(WgpuHostMemory::buffer) else {
            return Err("its bank lies in memory that the device does not read".into());
        };
        if pool.n_records(layer) < pool.n_experts {
            return Err(
                "kernels look for an expert in the record of its number, and the bank has fewer".into()
            );
        }
        let bytes = pool.record.bytes;
        let per_window = gpu.max_binding() / bytes;
        let most = MAX_BANK_DISPATCHES * gpu.max_window();
        if per_window * most < pool.n_experts {
            let wanted = pool.n_experts * bytes;
            return Err(format!("its bank has {wanted} bytes, too many for {most} bindings of the device"));
        }
        let window = |first: usize| {
            let n = per_window.min(pool.n_experts - first);
            Slot::part(buffer, (first * bytes) as u64, (n * bytes) as u64, gpu.align())
        };
        let windows = (0..pool.n_experts).step_by(per_window).map(window).collect();
        Ok(Bank { windows, per_window })
    }
}
