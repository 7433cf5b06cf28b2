//! The experts of a checkpoint that stay on the disk: how the record of each is read, again and again. Of tensors it is put together
//! as loading does; nothing is read from a mapping, so that a file that fails is an error and not the end of the process.

use freetoken_backend::ExpertRecord;

use super::{
    TensorError, WeightSource,
    weights::{assemble, matrix_of, plain_rows},
};
use crate::{
    formats::{
        Checkpoint,
        quantised::{HostMatrix, check_record},
        read,
    },
    moe::RecordSource,
};

/// Bytes of a record that are read at a time, where the record is one run of bytes.
const PIECE_BYTES: usize = 1 << 20;

/// The experts of one MoE layer.
#[derive(Debug)]
pub(super) enum StoredLayer {
    /// Each is a record.
    Records,
    /// Each is three matrices, gate, up and down, of these names.
    Apart(Vec<[String; 3]>),
    /// All of them are two tensors, gate_up and down, of these names.
    Stacked([String; 2]),
}

/// The experts of all MoE layers.
#[derive(Debug)]
pub(super) struct StoredExperts {
    pub(super) files: Checkpoint,
    pub(super) record: ExpertRecord,
    pub(super) n_experts: usize,
    pub(super) layers: Vec<StoredLayer>,
}

impl StoredExperts {
    fn read_tensors(&self, layer: &StoredLayer, expert: usize, into: &mut [u8]) -> Result<(), TensorError> {
        let ExpertRecord { hidden, intermediate, .. } = self.record;
        let transfers = match layer {
            StoredLayer::Records => unreachable!("read as a record"),
            StoredLayer::Apart(names) => {
                let of = |name: &str, rows, cols| -> Result<HostMatrix, TensorError> {
                    matrix_of(&self.files, name, [rows, cols], false, &mut |name, shape| {
                        let (dtype, bytes) = WeightSource::tensor(&self.files, name, shape)?;
                        Ok((dtype, self.files.read_here(&bytes)?))
                    })
                };
                let [gate, up, down] = &names[expert];
                let matrices = [
                    of(gate, intermediate, hidden)?,
                    of(up, intermediate, hidden)?,
                    of(down, hidden, intermediate)?,
                ];
                assemble(&self.record, &matrices, into)
            }
            StoredLayer::Stacked(names) => {
                let n = self.n_experts;
                let of = |name: &str, rows: usize, cols: usize, first: usize, n_rows: usize| {
                    let (_, codes) = WeightSource::tensor(&self.files, name, &[n, rows, cols])?;
                    let format = self.record.format;
                    let all = HostMatrix { format, rows: n * rows, cols, codes, scales: None, globals: None };
                    let mut part = plain_rows(&all, first..first + n_rows);
                    part.codes = self.files.read_here(&part.codes)?;
                    Ok::<_, TensorError>(part)
                };
                let gate = 2 * expert * intermediate;
                let [gate_up, down] = names;
                let matrices = [
                    of(gate_up, 2 * intermediate, hidden, gate, intermediate)?,
                    of(gate_up, 2 * intermediate, hidden, gate + intermediate, intermediate)?,
                    of(down, hidden, intermediate, expert * hidden, hidden)?,
                ];
                assemble(&self.record, &matrices, into)
            }
        };
        read::copy(transfers);
        Ok(())
    }
}

impl RecordSource for StoredExperts {
    fn piece_bytes(&self) -> Option<usize> {
        self.layers.iter().all(|layer| matches!(layer, StoredLayer::Records)).then_some(PIECE_BYTES)
    }

    fn read(&self, layer: u32, expert: u32, start: usize, into: &mut [u8]) -> Result<(), String> {
        let (stored, expert) = (&self.layers[layer as usize], expert as usize);
        let read = match stored {
            StoredLayer::Records => {
                let records =
                    self.files.records(layer as usize).expect("looked at when the model was loaded");
                records.read_here(expert, start, into).map_err(TensorError::from)
            }
            _ => self.read_tensors(stored, expert, into),
        };
        read.map_err(|error| error.to_string())
    }

    fn check(&self, layer: u32, expert: u32, record: &[u8]) -> Result<(), String> {
        // Tensors are looked at as they are read.
        let StoredLayer::Records = &self.layers[layer as usize] else { return Ok(()) };
        let module = self.files.records(layer as usize).map_or("", |records| records.module());
        check_record(&self.record, record, &format_args!("{module}.{expert}"))
            .map_err(|error| error.to_string())
    }
}
