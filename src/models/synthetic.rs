//! Weights that are made up: each tensor a pure function of seed, name and shape, so that a checkpoint of any size is
//! written piece by piece, or made in memory, and is the same each time.
//!
//! One deviation for all matrices would make every token choose the same experts: attention adds a vector to the residual
//! stream that is the same for all tokens, each layer makes it grow, and soon it dominates. So the matrices that write to the
//! residual stream get a small deviation and the embedding a large one. With a routing law, dimension 0 of every embedding
//! holds a constant, and column 0 of the routers turns it into a bias for each expert, in another order in every layer.

use std::{
    collections::HashMap,
    fmt, io,
    ops::Range,
    str::FromStr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use freetoken_backend::{HostBytes, os};
use half::bf16;

use super::{MoeSizes, Sizes, TensorError, WeightSource};
use crate::formats::{Dtype, FormatError, quantised::n_weights, write::TensorSpec};

/// Standard deviation of the embedding.
const EMBED_DEVIATION: f32 = 0.5;
/// Of matrices that read the residual stream, and of the head.
const DEVIATION: f32 = 0.02;
/// Of matrices that write to it.
const RESIDUAL_DEVIATION: f32 = 4e-4;
/// Of the experts' down projections.
const EXPERT_DOWN_DEVIATION: f32 = 1e-3;
/// What dimension 0 of every embedding is where experts follow a law: large beside the other dimensions, so that a
/// small bias weight does, and small beside all of them together.
const BIAS_INPUT: f32 = 4.0 * EMBED_DEVIATION;
/// No expert is chosen by a larger share of the tokens: its bias would have no bound.
const MAX_SHARE: f64 = 0.98;
/// Bytes that one call of a thread makes; a multiple of a random word's.
const PIECE: usize = 1 << 20;
/// How the name of the embedding ends.
const EMBEDDING: &str = "embed_tokens.weight";
/// Elements that a random word gives.
const BLOCK: usize = 4;
/// What the counter of the generator advances by: SplitMix64's odd number near 2^64 divided by the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Standard deviation of random codes: of e2m1, and of e4m3 without the upper half of its exponents.
const E2M1_DEVIATION: f32 = 2.926;
const E4M3_DEVIATION: f32 = 0.598;
/// The bit of an e4m3 that the codes leave out: of the largest exponents two codes are no number.
const E4M3_LARGE: u8 = 0x40;
/// Tensors in memory start at a multiple of this many bytes.
const TENSOR_ALIGN: usize = 64;

/// How popular the experts of a layer are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RoutingLaw {
    /// All alike.
    Uniform,
    /// The r-th most popular expert is chosen in proportion to `r^-s`, as far as a token may choose it only once.
    Zipf(f64),
}

impl FromStr for RoutingLaw {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let exponent =
            text.strip_prefix("zipf:").and_then(|s| s.parse().ok()).filter(|s| (0.0..=4.0).contains(s));
        match exponent {
            Some(s) => Ok(RoutingLaw::Zipf(s)),
            None if text == "uniform" => Ok(RoutingLaw::Uniform),
            None => Err(format!(
                "`{text}` is not a routing law: uniform, or zipf:S with S from 0 to 4, such as zipf:1.0"
            )),
        }
    }
}

impl fmt::Display for RoutingLaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RoutingLaw::Uniform => f.write_str("uniform"),
            RoutingLaw::Zipf(s) => write!(f, "zipf:{s:?}"),
        }
    }
}

impl RoutingLaw {
    /// Share of the tokens that choose each expert, most popular first; their sum is `top_k`.
    pub fn shares(self, moe: &MoeSizes) -> Vec<f64> {
        let uniform = moe.top_k as f64 / moe.n_experts as f64;
        let RoutingLaw::Zipf(s) = self else { return vec![uniform; moe.n_experts] };
        if uniform >= MAX_SHARE {
            return vec![uniform; moe.n_experts];
        }
        let shares =
            |scale: f64| (1..=moe.n_experts).map(move |rank| (scale * (rank as f64).powf(-s)).min(MAX_SHARE));
        let (mut low, mut high) = (0.0, (moe.n_experts as f64).powf(s));
        for _ in 0..64 {
            let middle = (low + high) / 2.0;
            if shares(middle).sum::<f64>() < moe.top_k as f64 { low = middle } else { high = middle }
        }
        shares(high).collect()
    }
}

/// The `z` that a standard normal variable exceeds with probability `p`, within 0.03 (Shore, 1982).
fn upper_quantile(p: f64) -> f64 {
    let (p, sign) = if p > 0.5 { (1.0 - p, -1.0) } else { (p, 1.0) };
    sign * 5.55556 * (1.0 - (p / (1.0 - p)).powf(0.1186))
}

/// A generator of weights.
#[derive(Debug, Clone)]
pub struct Synthetic {
    seed: u64,
    /// Column 0 of a router, most popular expert first; empty where no law is asked for.
    biases: Vec<f32>,
}

impl Synthetic {
    /// Weights that belong to a seed, all experts alike.
    pub fn new(seed: u64) -> Self {
        Synthetic { seed, biases: Vec::new() }
    }

    /// The same with experts that follow a law, where a model of these sizes has any.
    pub fn with_routing(mut self, law: RoutingLaw, sizes: &Sizes) -> Self {
        self.biases = match (law, &sizes.moe) {
            (RoutingLaw::Zipf(_), Some(moe)) => {
                // A router's other columns give logits of this deviation, in units of what one in column 0 gives.
                let unit = DEVIATION * (sizes.hidden as f32 - 1.0).sqrt() * EMBED_DEVIATION / BIAS_INPUT;
                law.shares(moe).into_iter().map(|share| -upper_quantile(share) as f32 * unit).collect()
            }
            _ => Vec::new(),
        };
        self
    }

    /// Makes `out.len()` elements of a tensor from element `start` on, a multiple of 4.
    pub fn fill(&self, tensor: &TensorSpec, start: usize, out: &mut [bf16]) {
        assert!(start.is_multiple_of(BLOCK), "pieces start at a block of the generator");
        let name = &tensor.name;
        if tensor.shape.len() == 1 {
            let is_zero = name.ends_with("bias") || is_less_one(name);
            return out.fill(if is_zero { bf16::ZERO } else { bf16::ONE });
        }
        let deviation = deviation(name);
        uniform(self.key(name).wrapping_add(((start / BLOCK) as u64).wrapping_mul(STEP)), deviation, out);
        if self.biases.is_empty() {
            return;
        }
        if name.ends_with(EMBEDDING) {
            set_column_0(tensor, start, out, |_| BIAS_INPUT);
        } else if name.ends_with("mlp.gate.weight") {
            let ranks = self.ranks(name);
            set_column_0(tensor, start, out, |expert| self.biases[ranks[expert]]);
        }
    }

    /// The rank of each expert of a router: an order that only seed and name decide.
    fn ranks(&self, name: &str) -> Vec<usize> {
        let key = self.key(name);
        let mut experts: Vec<usize> = (0..self.biases.len()).collect();
        experts.sort_by_key(|&expert| mix(key ^ expert as u64));
        let mut ranks = vec![0; experts.len()];
        experts.iter().enumerate().for_each(|(rank, &expert)| ranks[expert] = rank);
        ranks
    }

    /// FNV-1a of the name, mixed with the seed.
    fn key(&self, name: &str) -> u64 {
        let fnv = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        mix(name.bytes().fold(0xcbf2_9ce4_8422_2325, fnv) ^ mix(self.seed))
    }

    /// A part of a tensor of a quantised weight, from byte `start` on, a multiple of 8: codes that belong to seed and name, and scales,
    /// all alike, that give the weights the deviation of their kind.
    fn fill_quantised(&self, tensor: &TensorSpec, start: usize, out: &mut [u8]) {
        let is_scale = n_weights(tensor) == 0;
        match tensor.dtype {
            Dtype::F32 => {
                // That of nvfp4 has groups with scales of their own below it, which are ones.
                let is_nvfp4 = tensor.name.ends_with(".weight_scale_2");
                let codes = if is_nvfp4 { E2M1_DEVIATION } else { E4M3_DEVIATION };
                let scale = deviation(&tensor.name) / codes;
                out.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&scale.to_le_bytes()));
            }
            // 1 as an e4m3.
            Dtype::F8_E4M3 if is_scale => out.fill(0x38),
            Dtype::U8 if is_scale => {
                // The nearest power of two.
                out.fill((127.0 + (deviation(&tensor.name) / E2M1_DEVIATION).log2().round()) as u8);
            }
            dtype => {
                let mask = if dtype == Dtype::F8_E4M3 { !E4M3_LARGE } else { 0xff };
                let counter = self.key(&tensor.name).wrapping_add(((start / 8) as u64).wrapping_mul(STEP));
                for (i, out) in out.chunks_mut(8).enumerate() {
                    let word = mix(counter.wrapping_add((i as u64).wrapping_mul(STEP))).to_le_bytes();
                    out.iter_mut().zip(word).for_each(|(out, byte)| *out = byte & mask);
                }
            }
        }
    }

    /// Makes a part of a tensor, from byte `start` on, a multiple of 8, with all cores. Asserts that the part of a BF16 tensor lies as its
    /// elements must.
    pub fn fill_parallel(&self, tensor: &TensorSpec, start: usize, out: &mut [u8]) {
        self.fill_pieces(pieces(tensor, start, out), &mut |_| ());
    }

    /// Fills pieces with all cores; the calling thread tells of the bytes in between.
    fn fill_pieces<'p>(&self, pieces: impl Iterator<Item = Piece<'p>> + Send, progress: &mut dyn FnMut(u64)) {
        let (pieces, filled) = (Mutex::new(pieces), AtomicU64::new(0));
        let fill_next = || {
            let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            piece.map(|Piece { tensor, start, out }| {
                match tensor.dtype {
                    Dtype::BF16 => self.fill(tensor, start / size_of::<bf16>(), bytemuck::cast_slice_mut(out)),
                    _ => self.fill_quantised(tensor, start, out),
                }
                filled.fetch_add(out.len() as u64, Ordering::Relaxed);
            })
        };
        thread::scope(|scope| {
            for _ in 1..os::physical_cores().len() {
                scope.spawn(|| while fill_next().is_some() {});
            }
            while fill_next().is_some() {
                progress(filled.swap(0, Ordering::Relaxed));
            }
        });
        progress(filled.into_inner());
    }
}

/// Standard deviation of a matrix, by the name of any tensor of it.
fn deviation(name: &str) -> f32 {
    let (is_embedding, is_down) = (name.ends_with(EMBEDDING), name.contains(".down_proj"));
    let writes_residual = is_down || [".o_proj.", ".out_proj."].iter().any(|module| name.contains(module));
    if is_embedding {
        EMBED_DEVIATION
    } else if is_down && name.contains(".experts.") {
        EXPERT_DOWN_DEVIATION
    } else if writes_residual {
        RESIDUAL_DEVIATION
    } else {
        DEVIATION
    }
}

/// Whether a norm's weight is stored less one, as [`super::Spelling`] says of the families that nest their names: all norms but that
/// of the delta net.
fn is_less_one(name: &str) -> bool {
    name.starts_with("model.language_model.")
        && name.ends_with("norm.weight")
        && !name.contains(".linear_attn.")
}

/// Uniform elements of mean 0, from a SplitMix64 generator (Steele et al., OOPSLA 2014) whose counter begins at `counter`.
fn uniform(counter: u64, deviation: f32, out: &mut [bf16]) {
    let scale = deviation * 12_f32.sqrt() / 65_536.0;
    let fill = |block: usize, out: &mut [bf16]| {
        let word = mix(counter.wrapping_add((block as u64).wrapping_mul(STEP)));
        for (lane, out) in out.iter_mut().enumerate() {
            let centred = f32::from((word >> (16 * lane)) as i16) + 0.5;
            // Rounds as bf16::from_f32 does, without its branch for NaN.
            *out = bf16::from_bits((((centred * scale).to_bits() + 0x8000) >> 16) as u16);
        }
    };
    let n_blocks = out.len() / BLOCK;
    let mut blocks = out.chunks_exact_mut(BLOCK);
    for (block, out) in (&mut blocks).enumerate() {
        fill(block, out);
    }
    fill(n_blocks, blocks.into_remainder());
}

/// The output function of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Bytes of a tensor that one thread makes.
struct Piece<'a> {
    tensor: &'a TensorSpec,
    start: usize,
    out: &'a mut [u8],
}

fn pieces<'a>(tensor: &'a TensorSpec, start: usize, out: &'a mut [u8]) -> impl Iterator<Item = Piece<'a>> {
    let starts = (start..).step_by(PIECE);
    starts.zip(out.chunks_mut(PIECE)).map(move |(start, out)| Piece { tensor, start, out })
}

/// Sets column 0 of the rows that begin in `out`, which begins at element `start` of the matrix.
fn set_column_0(tensor: &TensorSpec, start: usize, out: &mut [bf16], value: impl Fn(usize) -> f32) {
    let cols = tensor.shape[1];
    for row in start.div_ceil(cols)..(start + out.len()).div_ceil(cols) {
        out[row * cols - start] = bf16::from_f32(value(row));
    }
}

/// A made-up checkpoint in memory.
pub struct SyntheticCheckpoint {
    memory: HostBytes,
    /// Tensor name to its type, its shape and its place in `memory`.
    tensors: HashMap<String, (Dtype, Vec<usize>, Range<usize>)>,
}

impl SyntheticCheckpoint {
    /// Makes tensors in BF16, and those of quantised weights, with all cores; `progress` hears the bytes.
    ///
    /// # Errors
    /// The system's refusal of so much memory.
    pub fn generate(
        synthetic: &Synthetic,
        tensors: &[TensorSpec],
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<Self> {
        let mut places = HashMap::new();
        let mut end = 0;
        for tensor in tensors {
            let bytes = tensor.bytes();
            places.insert(tensor.name.clone(), (tensor.dtype, tensor.shape.clone(), end..end + bytes));
            end = (end + bytes).next_multiple_of(TENSOR_ALIGN);
        }
        let mut memory = os::anonymous(end.max(1))?;
        let mut rest = &mut memory.as_mut()[..end];
        let mut outs = Vec::new();
        for tensor in tensors {
            let bytes = tensor.bytes();
            let out = rest.split_off_mut(..bytes.next_multiple_of(TENSOR_ALIGN));
            outs.push((tensor, &mut out.expect("the memory holds all tensors")[..bytes]));
        }
        synthetic.fill_pieces(outs.into_iter().flat_map(|(tensor, out)| pieces(tensor, 0, out)), progress);
        Ok(SyntheticCheckpoint { memory: HostBytes::new(Arc::new(memory)), tensors: places })
    }
}

impl WeightSource for SyntheticCheckpoint {
    fn tensor(&self, name: &str, shape: &[usize]) -> Result<(Dtype, HostBytes), TensorError> {
        let (dtype, found, range) = self.tensors.get(name).ok_or_else(|| FormatError::MissingTensor {
            dir: "the made-up checkpoint".into(),
            tensor: name.into(),
            n_tensors: self.tensors.len(),
            nearest: None,
        })?;
        if found != shape {
            return Err(TensorError::Shape {
                name: name.into(),
                found: found.clone(),
                expected: shape.to_vec(),
            });
        }
        Ok((*dtype, self.memory.slice(range.clone())))
    }

    fn spec(&self, name: &str) -> Option<(Dtype, Vec<usize>)> {
        self.tensors.get(name).map(|(dtype, shape, _)| (*dtype, shape.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        devices,
        models::{ConfigFile, Inventory, published_config},
    };

    /// A model of the shape of Qwen3-30B-A3B, small.
    fn inventory() -> Inventory {
        let mut fields = published_config("qwen3-30b-a3b").unwrap();
        for (field, value) in
            [("vocab_size", 999), ("hidden_size", 96), ("num_hidden_layers", 2), ("num_experts", 16)]
        {
            fields.insert(field.into(), value.into());
        }
        Inventory::new(&ConfigFile::new("config.json", &fields), &*devices::reference()).unwrap()
    }

    fn whole(synthetic: &Synthetic, tensor: &TensorSpec) -> Vec<bf16> {
        let mut out = vec![bf16::NAN; tensor.shape.iter().product()];
        synthetic.fill(tensor, 0, &mut out);
        out
    }

    #[test]
    fn a_tensor_is_the_same_in_one_piece_in_many_and_in_memory() {
        let inventory = inventory();
        let synthetic = Synthetic::new(7).with_routing(RoutingLaw::Zipf(1.0), &inventory.sizes);
        let mut made = 0;
        let checkpoint =
            SyntheticCheckpoint::generate(&synthetic, &inventory.tensors, &mut |bytes| made += bytes)
                .unwrap();
        assert_eq!(made, inventory.bytes());
        for tensor in &inventory.tensors {
            let expected = whole(&synthetic, tensor);
            let mut pieces = vec![bf16::NAN; expected.len()];
            for (i, out) in pieces.chunks_mut(404).enumerate() {
                synthetic.fill(tensor, 404 * i, out);
            }
            assert!(pieces == expected, "{}", tensor.name);
            let (_, bytes) = checkpoint.tensor(&tensor.name, &tensor.shape).unwrap();
            assert!(bytes.as_slice() == bytemuck::cast_slice::<_, u8>(&expected), "{}", tensor.name);
        }
        assert!(
            checkpoint.tensor("model.norm.weight", &[3]).is_err() && checkpoint.tensor("x", &[3]).is_err()
        );
    }

    #[test]
    fn each_kind_of_tensor_has_its_deviation() {
        let inventory = inventory();
        let synthetic = Synthetic::new(7);
        for (name, mean, deviation) in [
            ("model.embed_tokens.weight", 0.0, EMBED_DEVIATION),
            ("lm_head.weight", 0.0, DEVIATION),
            ("model.norm.weight", 1.0, 0.0),
            ("model.layers.1.input_layernorm.weight", 1.0, 0.0),
            ("model.layers.0.self_attn.q_norm.weight", 1.0, 0.0),
            ("model.layers.0.self_attn.v_proj.weight", 0.0, DEVIATION),
            ("model.layers.1.self_attn.o_proj.weight", 0.0, RESIDUAL_DEVIATION),
            ("model.layers.1.mlp.experts.3.gate_proj.weight", 0.0, DEVIATION),
            ("model.layers.0.mlp.experts.15.down_proj.weight", 0.0, EXPERT_DOWN_DEVIATION),
        ] {
            let tensor = inventory.tensors.iter().find(|tensor| tensor.name == name).unwrap();
            let values = whole(&synthetic, tensor);
            let n = values.len() as f32;
            let found = values.iter().map(|v| v.to_f32()).sum::<f32>() / n;
            let squares = values.iter().map(|v| (v.to_f32() - mean).powi(2)).sum::<f32>();
            assert!((found - mean).abs() <= 0.02 * deviation, "{name}: mean {found}");
            assert!(
                ((squares / n).sqrt() - deviation).abs() <= 0.02 * deviation,
                "{name}: {}",
                (squares / n).sqrt()
            );
        }
    }

    #[test]
    fn norms_that_are_stored_less_one_are_zeros() {
        let synthetic = Synthetic::new(7);
        let first = |name: &str, shape: &[usize]| {
            let tensor = TensorSpec { name: name.into(), dtype: Dtype::BF16, shape: shape.to_vec() };
            whole(&synthetic, &tensor)[0].to_f32()
        };
        let layer = "model.language_model.layers.3";
        assert_eq!(first(&format!("{layer}.input_layernorm.weight"), &[8]), 0.0);
        assert_eq!(first(&format!("{layer}.self_attn.q_norm.weight"), &[8]), 0.0);
        assert_eq!(first(&format!("{layer}.linear_attn.norm.weight"), &[8]), 1.0);
        assert_eq!(first("model.layers.3.input_layernorm.weight", &[8]), 1.0);
        // What writes to the residual stream is small, stacked or not.
        for name in ["mlp.experts.down_proj", "linear_attn.out_proj.weight"] {
            assert!(
                first(&format!("{layer}.{name}"), &[2, 4]).abs() <= 2.0 * EXPERT_DOWN_DEVIATION,
                "{name}"
            );
        }
    }

    #[test]
    fn seeds_and_names_decide() {
        let inventory = inventory();
        let [a, b] = [1, 2].map(Synthetic::new);
        let named = |end| inventory.tensors.iter().find(|tensor| tensor.name.ends_with(end)).unwrap();
        let (q, k) = (named("q_proj.weight"), named("k_proj.weight"));
        assert_ne!(whole(&a, q), whole(&b, q));
        assert_ne!(whole(&a, q)[..9], whole(&a, k)[..9]);
        assert_eq!(whole(&a, q), whole(&a.clone(), q));
    }

    #[test]
    fn shares_follow_their_law() {
        let moe = MoeSizes { n_layers: 1, n_experts: 128, top_k: 8, intermediate: 1 };
        assert_eq!(RoutingLaw::Uniform.shares(&moe), [0.0625; 128]);
        let shares = RoutingLaw::Zipf(1.0).shares(&moe);
        assert!((shares.iter().sum::<f64>() - 8.0).abs() < 1e-9);
        assert_eq!(shares[0], MAX_SHARE);
        assert!((shares[20] / shares[62] - 3.0).abs() < 1e-9, "ranks 21 and 63");
        let all = MoeSizes { top_k: 128, ..moe };
        assert_eq!(RoutingLaw::Zipf(1.0).shares(&all), [1.0; 128]);
    }

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, z) in [(0.5, 0.0), (0.158_655, 1.0), (0.022_750, 2.0), (0.841_345, -1.0), (0.98, -2.0537)] {
            assert!((upper_quantile(p) - z).abs() < 0.03, "{p}: {}", upper_quantile(p));
        }
    }

    #[test]
    fn laws_are_read_and_written() {
        for text in ["uniform", "zipf:1.0", "zipf:0.5"] {
            assert_eq!(text.parse::<RoutingLaw>().unwrap().to_string(), text);
        }
        for text in ["", "zipf", "zipf:", "zipf:-1", "zipf:NaN", "zipf:5", "Uniform"] {
            assert!(text.parse::<RoutingLaw>().unwrap_err().contains("is not a routing law"), "{text}");
        }
    }
}
