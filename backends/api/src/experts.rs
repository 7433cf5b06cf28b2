//! Routed experts: the record that one expert is, and where a program finds it.

use std::sync::Arc;

use crate::{Banks, Buffer, Format, HostBuffer, TableRow, View, Weight};

/// Records start and end at a multiple of this many bytes.
const RECORD_ALIGN: usize = 4096;

/// Layout of one expert: one contiguous run of bytes, the same in a file, in RAM, in a slot and under every kernel, so
/// that one expert is one copy. Banks lie in the order codes, scales, globals of gate_up, then those of down, each at a multiple
/// of 256 bytes; gate rows come before up rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertRecord {
    /// Format of all banks.
    pub format: Format,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the expert.
    pub intermediate: usize,
    /// Bytes of `gate_up`, `[2 * intermediate, hidden]`.
    pub gate_up: Banks,
    /// Bytes of `down`, `[hidden, intermediate]`.
    pub down: Banks,
    /// Size of the record, padding included.
    pub bytes: usize,
}

/// Layout of an expert of this format and shape.
pub fn record(format: Format, hidden: usize, intermediate: usize) -> ExpertRecord {
    let gate_up = Banks::new(0, format, 2 * intermediate, hidden);
    let down = Banks::new(gate_up.next(), format, hidden, intermediate);
    let bytes = down.end().next_multiple_of(RECORD_ALIGN);
    ExpertRecord { format, hidden, intermediate, gate_up, down, bytes }
}

impl ExpertRecord {
    /// Floating-point operations of a row, a multiply-add counting two.
    pub fn flops_per_row(&self) -> f64 {
        6.0 * self.hidden as f64 * self.intermediate as f64
    }

    /// Bytes of the gate rows.
    pub fn gate(&self) -> Banks {
        self.gate_up.rows(0..self.intermediate, 2 * self.intermediate)
    }

    /// Bytes of the up rows.
    pub fn up(&self) -> Banks {
        self.gate_up.rows(self.intermediate..2 * self.intermediate, 2 * self.intermediate)
    }

    /// Bytes a kernel reads of it: all but the padding.
    pub fn weight_bytes(&self) -> usize {
        self.gate_up.weight_bytes() + self.down.weight_bytes()
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
    /// Slots; chunk `c` holds slots `c * slots_per_chunk ..`, one after the other. The last one may be shorter.
    pub chunks: Vec<Buffer>,
    /// Slots of each chunk.
    pub slots_per_chunk: usize,
    /// i32 `[n_layers, n_experts]`: the slot an expert is in, `n_slots + r` where it is read in record `r` of its layer's bank, or
    /// -1. Written by the compute lane only.
    pub table: View,
    /// One bank a layer, where misses come from: the records of all experts, in order, or of those that host memory has room for.
    /// Empty when every expert has a slot.
    pub banks: Vec<Arc<HostBuffer>>,
}

impl ExpertPool {
    /// A pool without slots: every expert lies in its bank alone. `table` holds a -1 for each.
    pub fn without_slots(
        record: ExpertRecord,
        n_experts: usize,
        table: View,
        banks: Vec<Arc<HostBuffer>>,
    ) -> Self {
        let (n_layers, chunks) = (banks.len(), Vec::new());
        ExpertPool { record, n_layers, n_experts, chunks, slots_per_chunk: 1, table, banks }
    }

    /// The same slots behind another table, of the layers of `banks`, or of one layer without a bank.
    pub fn behind(&self, table: View, banks: Vec<Arc<HostBuffer>>) -> Self {
        ExpertPool {
            record: self.record.clone(),
            n_layers: banks.len().max(1),
            n_experts: self.n_experts,
            chunks: self.chunks.clone(),
            slots_per_chunk: self.slots_per_chunk,
            table,
            banks,
        }
    }

    /// Numbers of slots: no slot has this number or one above. A last chunk that is shorter holds fewer.
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

    /// A layer's row of the table on the device, i32 `[n_experts]`.
    pub fn table_row(&self, layer: u32) -> View {
        let start = self.entry(layer, 0) * 4;
        self.table.slice(start..start + self.n_experts * 4)
    }

    /// A layer's row of the table.
    pub fn row(&self, layer: u32) -> TableRow {
        TableRow {
            n_experts: self.n_experts,
            n_slots: self.n_slots(),
            n_records: self.n_records(layer),
            first_entry: self.entry(layer, 0),
            n_entries: self.n_layers * self.n_experts,
        }
    }

    /// Records of a layer's host bank; 0 without one.
    pub fn n_records(&self, layer: u32) -> usize {
        self.banks.get(layer as usize).map_or(0, |bank| bank.as_slice().len() / self.record.bytes)
    }

    /// A record of a layer's host bank.
    pub fn banked(&self, layer: u32, record: u32) -> &[u8] {
        let start = record as usize * self.record.bytes;
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
    /// Those of each layer of a pool.
    pub fn of_layers(pool: &Arc<ExpertPool>) -> Vec<Experts> {
        (0..pool.n_layers as u32).map(|layer| Experts::Pool { pool: pool.clone(), layer }).collect()
    }

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

    /// How they are stored. Asserts that there is one.
    pub fn format(&self) -> Format {
        match self {
            Experts::InPlace(experts) => experts.first().expect("a layer has experts").gate.format,
            Experts::Pool { pool, .. } => pool.record.format,
        }
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
        for format in [Format::F32, Format::Bf16, Format::Fp8, Format::Nvfp4, Format::Mxfp4] {
            for (hidden, intermediate) in [(2048, 768), (64, 32), (128, 96), (32, 32)] {
                let r = record(format, hidden, intermediate);
                let n = 2 * intermediate;
                assert_eq!(r.gate_up.codes, 0..n * format.row_bytes(hidden));
                assert_eq!(r.gate_up.scales.len(), n * format.scale_row_bytes(hidden));
                assert_eq!(r.gate_up.globals.len(), n * format.global_row_bytes());
                assert_eq!(r.down.codes.len(), hidden * format.row_bytes(intermediate));
                assert_eq!(r.down.scales.len(), hidden * format.scale_row_bytes(intermediate));
                let of = |b: &Banks| [b.codes.clone(), b.scales.clone(), b.globals.clone()];
                let banks: Vec<_> = [of(&r.gate_up), of(&r.down)].concat();
                let banks: Vec<_> = banks.into_iter().filter(|bank| !bank.is_empty()).collect();
                for (bank, next) in banks.iter().zip(&banks[1..]) {
                    assert_eq!(next.start, bank.end.next_multiple_of(256), "{format}");
                }
                let end = banks[banks.len() - 1].end;
                assert_eq!(r.bytes, end.next_multiple_of(RECORD_ALIGN));
                assert_eq!(r.weight_bytes(), banks.iter().map(|bank| bank.len()).sum::<usize>());
                assert_eq!((r.gate().codes.end, r.up().codes.end), (r.up().codes.start, r.gate_up.codes.end));
                assert_eq!(
                    (r.gate().scales.end, r.up().scales.end),
                    (r.up().scales.start, r.gate_up.scales.end)
                );
            }
        }
    }

    /// One NVFP4 expert of Qwen3-30B-A3B: 4.5 bits a weight, and globals.
    #[test]
    fn a_published_shape_takes_what_it_should() {
        let r = record(Format::Nvfp4, 2048, 768);
        assert_eq!(r.weight_bytes(), 3 * 2048 * 768 * 9 / 16 + 4 * (2 * 768 + 2048));
    }
}
