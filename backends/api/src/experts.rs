//! Routed experts: the record that one expert is, and where a program finds it.

use std::{ops::Range, sync::Arc};

use crate::{Buffer, Format, HostBuffer, View, Weight};

/// Banks start at a multiple of this many bytes.
const BANK_ALIGN: usize = 256;
/// Records start and end at a multiple of this many bytes.
const RECORD_ALIGN: usize = 4096;

/// Layout of one expert: one contiguous run of bytes, the same in a file, in RAM, in a slot and under every kernel, so
/// that one expert is one copy. Banks lie in the order gate_up, down; gate rows come before up rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRecord {
    /// Format of all banks.
    pub format: Format,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the expert.
    pub intermediate: usize,
    /// Bytes of `gate_up`, `[2 * intermediate, hidden]`.
    pub gate_up: Range<usize>,
    /// Bytes of `down`, `[hidden, intermediate]`.
    pub down: Range<usize>,
    /// Size of the record, padding included.
    pub bytes: usize,
}

/// Layout of an expert of this format and shape.
pub fn record(format: Format, hidden: usize, intermediate: usize) -> ExpertRecord {
    let gate_up = 0..2 * intermediate * format.row_bytes(hidden);
    let start = gate_up.end.next_multiple_of(BANK_ALIGN);
    let down = start..start + hidden * format.row_bytes(intermediate);
    let bytes = down.end.next_multiple_of(RECORD_ALIGN);
    ExpertRecord { format, hidden, intermediate, gate_up, down, bytes }
}

impl ExpertRecord {
    /// Bytes of the gate rows.
    pub fn gate(&self) -> Range<usize> {
        self.gate_up.start..self.gate_up.start + self.gate_up.len() / 2
    }

    /// Bytes of the up rows.
    pub fn up(&self) -> Range<usize> {
        self.gate().end..self.gate_up.end
    }

    /// Bytes a kernel reads of it: all but the padding.
    pub fn weight_bytes(&self) -> usize {
        self.gate_up.len() + self.down.len()
    }
}

/// One expert whose matrices lie apart, where the checkpoint has them.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// `[intermediate, hidden]`
    pub gate: Weight,
    /// `[intermediate, hidden]`
    pub up: Weight,
    /// `[hidden, intermediate]`
    pub down: Weight,
}

/// One pool of slots over all layers, in chunks below the binding limit, and the host banks behind it.
#[derive(Debug)]
pub struct ExpertPool {
    /// Layout of one slot.
    pub record: ExpertRecord,
    /// MoE layers that share the pool.
    pub n_layers: usize,
    /// Experts of a layer.
    pub n_experts: usize,
    /// Slots; chunk `c` holds slots `c * slots_per_chunk ..`, one after the other.
    pub chunks: Vec<Buffer>,
    /// Slots of each chunk.
    pub slots_per_chunk: usize,
    /// i32 `[n_layers, n_experts]`: the slot an expert is in, or -1. Written by the compute lane only.
    pub table: View,
    /// One bank a layer, `[n_experts]` records, where misses come from. Empty when every expert has a slot.
    pub banks: Vec<Arc<HostBuffer>>,
}

impl ExpertPool {
    /// Slots of all chunks.
    pub fn n_slots(&self) -> usize {
        self.chunks.len() * self.slots_per_chunk
    }

    /// The record in a slot.
    pub fn slot(&self, slot: usize) -> View {
        let start = slot % self.slots_per_chunk * self.record.bytes;
        self.chunks[slot / self.slots_per_chunk].view(start..start + self.record.bytes)
    }

    /// Place of an expert's entry in the table, in entries.
    pub fn entry(&self, layer: u32, expert: u32) -> usize {
        layer as usize * self.n_experts + expert as usize
    }

    /// The record of an expert in its layer's host bank.
    pub fn banked(&self, layer: u32, expert: u32) -> &[u8] {
        let start = expert as usize * self.record.bytes;
        &self.banks[layer as usize].as_slice()[start..start + self.record.bytes]
    }
}

/// The routed experts of one layer, and where a program finds them.
#[derive(Debug, Clone)]
pub enum Experts {
    /// Each expert where the checkpoint has it; index: expert id. For devices whose memory is host memory.
    InPlace(Arc<[ExpertWeights]>),
    /// Records in slots of a pool.
    Pool {
        /// The pool that all layers share.
        pool: Arc<ExpertPool>,
        /// Row of the pool's table: counts MoE layers, not layers.
        layer: u32,
    },
}

impl Experts {
    /// Number of experts.
    pub fn n_experts(&self) -> usize {
        match self {
            Experts::InPlace(experts) => experts.len(),
            Experts::Pool { pool, .. } => pool.n_experts,
        }
    }

    /// Whether some may be in the host's banks only.
    pub fn is_cached(&self) -> bool {
        matches!(self, Experts::Pool { pool, .. } if !pool.banks.is_empty())
    }

    /// Bytes a kernel reads of one expert.
    pub fn expert_bytes(&self) -> usize {
        match self {
            Experts::InPlace(experts) => {
                experts.first().map_or(0, |e| e.gate.bytes() + e.up.bytes() + e.down.bytes())
            }
            Experts::Pool { pool, .. } => pool.record.weight_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_keeps_its_alignments() {
        for (hidden, intermediate) in [(2048, 768), (64, 32), (100, 7), (1, 1)] {
            let r = record(Format::Bf16, hidden, intermediate);
            assert_eq!(r.gate_up.len(), 4 * hidden * intermediate);
            assert_eq!(r.down.len(), 2 * hidden * intermediate);
            assert_eq!(r.down.start % BANK_ALIGN, 0);
            assert_eq!(r.bytes % RECORD_ALIGN, 0);
            assert!(r.down.start >= r.gate_up.end && r.bytes >= r.down.end);
            assert!(r.bytes - r.down.end < RECORD_ALIGN);
            assert_eq!((r.gate().end, r.up().end), (r.gate_up.len() / 2, r.gate_up.len()));
        }
    }
}
