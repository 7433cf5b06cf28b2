//! What a model is made of: every tensor that its architecture asks for, found by loading it with zeros in place of the
//! weights. No weight is read, and nothing here knows an architecture but through [`super::load`].

use std::{cell::RefCell, sync::Arc};

use freetoken_backend::{Backend, ExpertRecord, Experts, Format, HostBytes, os};

use super::{
    ConfigFile, LoadedExperts, ModelError, MoeSizes, Sizes, TensorError, Ungrouped, WeightSource, Weights,
    layout, load,
};
use crate::formats::{
    Dtype, FormatError,
    error::TensorFault,
    ftw::Records,
    quantised::{self, n_weights},
    write::TensorSpec,
};

/// The tensors of a model, in the order in which it asks for them, and its sizes.
#[derive(Debug, Clone)]
pub struct Inventory {
    /// Each tensor once.
    pub tensors: Vec<TensorSpec>,
    /// What an engine must know of the model.
    pub sizes: Sizes,
    /// How routed experts are stored, where there are any.
    pub expert_format: Option<Format>,
}

impl Inventory {
    /// Of the model that a configuration describes, all tensors in BF16. `backend` is one whose memory is host memory.
    ///
    /// # Errors
    /// [`ModelError`] for a configuration that cannot be loaded.
    pub fn new(config: &ConfigFile<'_>, backend: &dyn Backend) -> Result<Self, ModelError> {
        Self::load(config, backend, None)
    }

    /// Of a checkpoint, with the types that its tensors have. `backend` is one whose memory is host memory.
    ///
    /// # Errors
    /// [`ModelError`] for a checkpoint that cannot be loaded.
    pub fn of_checkpoint(
        config: &ConfigFile<'_>,
        checkpoint: &dyn WeightSource,
        backend: &dyn Backend,
    ) -> Result<Self, ModelError> {
        Self::load(config, backend, Some(checkpoint))
    }

    fn load(
        config: &ConfigFile<'_>,
        backend: &dyn Backend,
        checkpoint: Option<&dyn WeightSource>,
    ) -> Result<Self, ModelError> {
        assert!(backend.caps().host_memory, "elsewhere the zeros would be copied");
        let zeros = Zeros {
            checkpoint,
            tensors: RefCell::default(),
            memory: RefCell::new(HostBytes::from_static(&[])),
        };
        let mut heard = |_| ();
        let mut weights = Weights::new(backend, &zeros, &mut heard);
        let sizes = load(config, &mut weights)?.sizes().clone();
        let LoadedExperts::Placed(experts) = weights.into_experts() else {
            unreachable!("no banks were asked for")
        };
        let expert_format = experts.first().map(Experts::format);
        Ok(Inventory { tensors: zeros.tensors.into_inner(), sizes, expert_format })
    }

    /// The same model, of BF16 tensors, as published checkpoints of a format have it.
    ///
    /// # Errors
    /// [`Ungrouped`].
    pub fn stored_as(self, format: Format) -> Result<Self, Ungrouped> {
        let tensors = layout::stored_as(&self.tensors, format)?;
        Ok(Inventory { tensors, expert_format: self.expert_format.map(|_| format), ..self })
    }

    /// Weights of the model, each counted once.
    pub fn n_params(&self) -> u64 {
        self.tensors.iter().map(n_weights).sum()
    }

    /// Weights that one token meets: all but the experts that it is not routed to. The embedding counts whole, as
    /// publishers of models count it.
    pub fn n_active_params(&self) -> u64 {
        let routed: u64 = self.routed().map(n_weights).sum();
        let met = self.sizes.moe.map_or(0, |moe| routed / moe.n_experts as u64 * moe.top_k as u64);
        self.n_params() - routed + met
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(bytes).sum()
    }

    /// Bytes of each layer.
    pub fn layer_bytes(&self) -> Vec<u64> {
        let mut layers = vec![0; self.sizes.n_layers];
        for tensor in &self.tensors {
            if let Some(layer) = layer_of(&tensor.name).and_then(|layer| layers.get_mut(layer)) {
                *layer += bytes(tensor);
            }
        }
        layers
    }

    /// Bytes of one routed expert, where there are any.
    pub fn expert_bytes(&self) -> Option<u64> {
        let MoeSizes { n_layers, n_experts, .. } = self.sizes.moe.filter(|moe| moe.n_layers > 0)?;
        Some(self.routed().map(bytes).sum::<u64>() / (n_layers * n_experts) as u64)
    }

    /// Bytes by element type, most first.
    pub fn formats(&self) -> Vec<(Dtype, u64)> {
        let mut formats: Vec<(Dtype, u64)> = Vec::new();
        for tensor in &self.tensors {
            match formats.iter_mut().find(|(dtype, _)| *dtype == tensor.dtype) {
                Some((_, sum)) => *sum += bytes(tensor),
                None => formats.push((tensor.dtype, bytes(tensor))),
            }
        }
        formats.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        formats
    }

    /// Tensors of routed experts.
    fn routed(&self) -> impl Iterator<Item = &TensorSpec> {
        self.tensors.iter().filter(|tensor| tensor.name.contains(".experts."))
    }
}

fn bytes(tensor: &TensorSpec) -> u64 {
    tensor.bytes() as u64
}

/// The layer in a name such as `model.layers.3.mlp.gate.weight`.
fn layer_of(name: &str) -> Option<usize> {
    name.split_once(".layers.")?.1.split('.').next()?.parse().ok()
}

/// A source that notes what is asked for and answers with zeros that no page backs.
struct Zeros<'a> {
    /// Where names, shapes and types are checked, if anywhere.
    checkpoint: Option<&'a dyn WeightSource>,
    tensors: RefCell<Vec<TensorSpec>>,
    /// As large as the largest tensor so far; smaller ones are its front.
    memory: RefCell<HostBytes>,
}

impl WeightSource for Zeros<'_> {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let (dtype, bytes) = match self.checkpoint {
            Some(checkpoint) => {
                let (dtype, bytes) = checkpoint.tensor(name, shape)?;
                (dtype, bytes.len())
            }
            None => (Dtype::BF16, bf16_bytes(name, shape)?),
        };
        let mut memory = self.memory.borrow_mut();
        if memory.len() < bytes {
            let file = format!("zeros in place of tensor `{name}`");
            *memory = HostBytes::new(Arc::new(
                os::anonymous(bytes).map_err(|source| FormatError::Read { file, source })?,
            ));
        }
        self.tensors.borrow_mut().push(TensorSpec { name: name.into(), dtype, shape: shape.to_vec() });
        Ok((dtype, memory.slice(0..bytes)))
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        self.checkpoint?.spec(name)
    }

    fn records(&self, moe_layer: usize) -> Option<Records<'_>> {
        let records = self.checkpoint?.records(moe_layer)?;
        let ExpertRecord { format, hidden, intermediate, .. } = *records.record();
        for e in 0..records.n_experts() {
            for (projection, shape) in [
                ("gate_proj", [intermediate, hidden]),
                ("up_proj", [intermediate, hidden]),
                ("down_proj", [hidden, intermediate]),
            ] {
                let module = format!("{}.{e}.{projection}", records.module());
                self.tensors.borrow_mut().extend(quantised::tensors(format, &module, shape));
            }
        }
        Some(records)
    }

    fn is_blank(&self) -> bool {
        true
    }
}

fn bf16_bytes(name: &str, shape: &[usize]) -> Result<usize, FormatError> {
    shape.iter().try_fold(2_usize, |bytes, &n| bytes.checked_mul(n)).ok_or_else(|| FormatError::Tensor {
        file: "config.json".into(),
        tensor: name.into(),
        fault: TensorFault::Overflow { shape: format!("{shape:?}") },
    })
}

#[cfg(test)]
mod tests {
    use super::super::published_config;
    use super::*;
    use crate::{devices, model_files::ModelFiles};
    use std::path::Path;

    fn published(name: &str) -> Inventory {
        let fields = published_config(name).unwrap();
        Inventory::new(&ConfigFile::new("config.json", &fields), &*devices::reference()).unwrap()
    }

    /// The totals that the models' authors publish: 30.5 B with 3.3 B active, 35 B with 3 B active, 8.2 B and 8.0 B.
    #[test]
    fn published_models_have_as_many_weights_as_their_authors_say() {
        let q30 = published("qwen3-30b-a3b");
        assert_eq!((q30.n_params(), q30.n_active_params()), (30_532_122_624, 3_353_032_704));
        assert_eq!(q30.expert_bytes(), Some(3 * 2048 * 768 * 2));
        let layers = q30.layer_bytes();
        let ends = 2 * (2 * 151_936 * 2048 + 2048);
        assert_eq!((layers.len(), layers.iter().sum::<u64>()), (48, q30.bytes() - ends));
        assert_eq!(published("qwen3-8b").n_params(), 8_190_735_360);
        let q36 = published("qwen3.6-35b-a3b");
        assert_eq!((q36.n_params(), q36.n_active_params()), (34_660_610_688, 3_454_988_928));
        assert_eq!((q36.sizes.n_kv_layers(), q36.sizes.qkv_width()), (10, 9216));
        assert_eq!(q36.sizes.recurrent.unwrap().state_bytes(), 30 * (32 * 128 * 128 + 3 * 8192) * 4);
        let llama = published("llama-3.1-8b");
        assert_eq!(
            (llama.n_params(), llama.n_active_params(), llama.expert_bytes()),
            (8_030_261_248, 8_030_261_248, None)
        );
    }

    /// The numbers of the demo model's own training report.
    #[test]
    fn a_checkpoint_is_counted_from_its_headers() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
        let files = ModelFiles::open(Some(&dir)).unwrap();
        let demo =
            Inventory::of_checkpoint(&files.config(), files.checkpoint(), &*devices::reference()).unwrap();
        assert_eq!((demo.n_params(), demo.n_active_params()), (9_280_320, 3_087_168));
        assert_eq!(demo.formats(), [(Dtype::BF16, 2 * 9_280_320)]);
        assert_eq!(demo.bytes(), files.checkpoint().total_bytes());
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        let mut fields = published_config("qwen3-8b").unwrap();
        fields.insert("vocab_size".into(), (1 << 24).into());
        fields.insert("hidden_size".into(), (1 << 20).into());
        let sentence =
            Inventory::new(&ConfigFile::new("c", &fields), &*devices::reference()).unwrap_err().to_string();
        assert!(sentence.contains("`model.embed_tokens.weight`"), "{sentence}");
    }
}
