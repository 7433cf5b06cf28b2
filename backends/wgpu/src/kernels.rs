//! The table of kernels: which WGSL files one is, what it binds, and the values that its constants take. Knows no device.

/// What a kernel is linked with on a device, for a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Linkage {
    /// Teams are subgroups.
    pub(crate) subgroups: bool,
    /// Chunks of an expert pool.
    pub(crate) chunks: Chunks,
    /// Rows of codes meet x in workgroup memory.
    pub(crate) staged: bool,
}

/// How a kernel binds a window of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Chunks {
    /// It reads none.
    None,
    /// A binding each: 1, 2, 4 or 8.
    Apart(u32),
    /// One array of so many.
    Array(u32),
}

/// A file that is linked in front of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// How weights are stored.
    Format,
    /// How the threads of a workgroup meet.
    Team,
    /// A window of chunks, bound behind everything else. Comes first: it may enable an extension.
    Chunks,
    /// The weight of a norm.
    Norm,
    /// What the kernels of matmul share.
    Matmul,
    /// What the kernels of expert_mlp share.
    Experts,
    /// Rows of a weight, behind what says where they lie.
    Rows,
    /// Four of them times a row of x, or two.
    Products,
    /// What enables cooperative matrices. Comes first of all.
    Cooperative,
    /// Rows of halves times rows of a weight.
    CooperativeTile,
    /// A tile of rows of x times one of rows of a weight.
    Tile,
    /// Where the kernels of attention find a token.
    AttentionCache,
    /// What the kernels share that compute attention of many rows.
    AttentionQueries,
    /// What results of attention are multiplied with.
    AttentionGates,
    /// The n-th largest of many.
    Select,
}

/// One WGSL file with an entry point `main`.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Stem of the file.
    pub(crate) name: &'static str,
    text: &'static str,
    links: &'static [Link],
    /// Bindings that it writes; they come first.
    pub(crate) n_written: usize,
    /// Bindings that it reads, chunks excluded.
    pub(crate) n_read: usize,
    /// 32-bit words of its parameters, offsets of the bindings included.
    pub(crate) n_params: usize,
    /// Its override constants, and values that cover what ops give them.
    pub(crate) constants: &'static [(&'static str, &'static [u32])],
}

impl Kernel {
    /// Whether its expert records lie in a window of chunks.
    pub(crate) fn has_chunks(&self) -> bool {
        self.links.contains(&Link::Chunks)
    }

    /// Whether it multiplies rows of weights with a row of x or two, which formats with scales do otherwise.
    pub(crate) fn has_products(&self) -> bool {
        self.links.contains(&Link::Products)
    }

    /// The module: the files one after the other, as they are.
    pub(crate) fn module(&self, linkage: Linkage) -> String {
        let file = |link: &Link| match link {
            Link::Format => include_str!("../../../shaders/format.wgsl"),
            Link::Team if linkage.subgroups => include_str!("../../../shaders/team_subgroup.wgsl"),
            Link::Team => include_str!("../../../shaders/team_workgroup.wgsl"),
            Link::Select => include_str!("../../../shaders/select.wgsl"),
            Link::Norm => include_str!("../../../shaders/norm.wgsl"),
            Link::Matmul => include_str!("../../../shaders/matmul.wgsl"),
            Link::Rows => include_str!("../../../shaders/rows.wgsl"),
            Link::Products if linkage.staged => include_str!("../../../shaders/staged.wgsl"),
            Link::Products => include_str!("../../../shaders/direct.wgsl"),
            Link::Cooperative => include_str!("../../../shaders/cooperative.wgsl"),
            Link::CooperativeTile => include_str!("../../../shaders/cooperative_tile.wgsl"),
            Link::Experts => include_str!("../../../shaders/experts.wgsl"),
            Link::Tile => include_str!("../../../shaders/tile.wgsl"),
            Link::AttentionCache => include_str!("../../../shaders/attention_cache.wgsl"),
            Link::AttentionQueries => include_str!("../../../shaders/attention_queries.wgsl"),
            Link::AttentionGates => include_str!("../../../shaders/attention_gates.wgsl"),
            Link::Chunks => match linkage.chunks {
                Chunks::Apart(1) => include_str!("../../../shaders/chunks_1.wgsl"),
                Chunks::Apart(2) => include_str!("../../../shaders/chunks_2.wgsl"),
                Chunks::Apart(4) => include_str!("../../../shaders/chunks_4.wgsl"),
                Chunks::Apart(8) => include_str!("../../../shaders/chunks_8.wgsl"),
                Chunks::Array(_) => include_str!("../../../shaders/chunks_array.wgsl"),
                other => unreachable!("no window of {other:?}"),
            },
        };
        self.links.iter().map(file).chain([self.text]).collect()
    }
}

/// A weight's format, `NONE` where there is none.
const OPTIONAL: &[u32] = &[0, 1, 2, 3];
const FORMAT: &[u32] = &[0, 1, 2];
/// The same of what matmuls and experts take.
const ANY_FORMAT: &[u32] = &[0, 1, 2, 4, 5, 6];
/// The same of what becomes halves.
const HALVED_FORMAT: &[u32] = &[1, 2, 4, 5, 6];
const FLAG: &[u32] = &[0, 1];
/// None, together, apart.
const GLU: &[u32] = &[0, 1, 2];

macro_rules! kernels {
    ($($item:ident = $file:literal [$($link:ident),*] writes $written:literal reads $read:literal params $params:literal {
        $($constant:ident: $values:expr),* $(,)?
    })*) => {
        $(pub(crate) static $item: Kernel = Kernel {
            name: $file,
            text: include_str!(concat!("../../../shaders/", $file, ".wgsl")),
            links: &[$(Link::$link),*],
            n_written: $written,
            n_read: $read,
            n_params: $params,
            constants: &[$((stringify!($constant), $values)),*],
        };)*

        /// All of them.
        #[cfg(test)]
        static ALL: &[&Kernel] = &[$(&$item),*];
    };
}

kernels! {
    EMPTY = "empty" [] writes 1 reads 1 params 1 {}
    READ = "read" [] writes 1 reads 1 params 2 { VECS: &[16] }
    MULTIPLY = "multiply" [] writes 1 reads 0 params 2 {}
    EMBED = "embed" [Format] writes 1 reads 2 params 7 { FORMAT: FORMAT }
    MATMUL_GEMV = "matmul_gemv" [Format, Team, Norm, Matmul, Rows, Products] writes 1 reads 7 params 15 {
        WORKGROUP: &[256], FORMAT: ANY_FORMAT, NORM: OPTIONAL, BIAS: OPTIONAL, GLU: GLU, GATHER: FLAG,
        ACCUMULATE: FLAG, SPLIT: FLAG, MANY: FLAG, OUTPUTS: &[16],
    }
    MATMUL_FEW = "matmul_few" [Format, Team, Norm, Matmul, Rows] writes 1 reads 7 params 15 {
        WORKGROUP: &[128], FORMAT: ANY_FORMAT, NORM: OPTIONAL, BIAS: OPTIONAL, GLU: GLU, GATHER: FLAG,
        ACCUMULATE: FLAG, QUADS: &[2, 4], OUTPUTS: &[16],
    }
    MATMUL_TILED = "matmul_tiled" [Format, Norm, Matmul, Rows, Tile] writes 1 reads 7 params 15 {
        FORMAT: ANY_FORMAT, NORM: OPTIONAL, BIAS: OPTIONAL, GLU: GLU, GATHER: FLAG, ACCUMULATE: FLAG, WIDE: FLAG,
        OUTPUTS: &[64, 128],
    }
    MATMUL_COOPERATIVE = "matmul_cooperative" [Cooperative, Format, Norm, Matmul, Rows, CooperativeTile]
        writes 1 reads 7 params 15 {
        FORMAT: HALVED_FORMAT, NORM: &[3], BIAS: OPTIONAL, GLU: GLU, GATHER: &[0], ACCUMULATE: FLAG,
    }
    HALF_ROWS = "half_rows" [Format, Team, Norm] writes 2 reads 4 params 7 {
        WORKGROUP: &[128], NORM: OPTIONAL, GATHER: FLAG, WEIGHTED: FLAG,
    }
    ROPE_CACHE = "rope_cache" [Format, Team] writes 2 reads 6 params 14 {
        WORKGROUP: &[64], KV_BF16: FLAG, GATED: FLAG, Q_NORM: OPTIONAL, K_NORM: OPTIONAL,
    }
    ATTENTION = "attention" [Format, AttentionCache, AttentionGates] writes 2 reads 6 params 14 {
        KV_BF16: FLAG, HEAD_DIM: &[16, 128], HEADS: &[1, 8], TOKENS: &[16, 64], SPLITS: &[1, 64], GATED: FLAG,
    }
    ATTENTION_TILED = "attention_tiled" [Format, AttentionCache, AttentionQueries, AttentionGates]
        writes 1 reads 6 params 14 {
        KV_BF16: FLAG, HEAD_DIM: &[16, 72, 256], HEADS: &[1, 8], VALUES: &[4, 64], GATED: FLAG,
    }
    ATTENTION_COOPERATIVE = "attention_cooperative"
        [Cooperative, Format, AttentionCache, AttentionQueries, AttentionGates]
        writes 1 reads 6 params 14 {
        HEAD_DIM: &[16, 80, 128, 256], HEADS: &[1, 8, 128], TOKENS: &[16, 32], GATED: FLAG,
    }
    ATTENTION_MERGE = "attention_merge" [AttentionGates] writes 1 reads 3 params 5 {
        SPLITS: &[2, 64], HEAD_DIM: &[8, 128], GATED: FLAG,
    }
    SHORT_CONV = "short_conv" [Format] writes 2 reads 4 params 9 { FORMAT: FORMAT, KERNEL: &[2, 4, 8] }
    GATED_DELTA = "gated_delta" [] writes 2 reads 4 params 14 {
        KEY_DIM: &[16, 24, 128, 4096], COLUMNS: &[1, 32], LANES: &[1, 8, 256], WIDE: FLAG,
    }
    GATED_DELTA_NORM = "gated_delta_norm" [Team] writes 1 reads 3 params 11 { WORKGROUP: &[256] }
    ROUTE_SCORES = "route_scores" [Format, Team] writes 3 reads 4 params 9 {
        WORKGROUP: &[256], ROUTER: FORMAT, NORM: FORMAT, GATE: OPTIONAL, WIDE: FLAG, SPLIT: FLAG,
        EXPERTS: &[10], BLOCK: &[4, 10],
    }
    ROUTE = "route" [Team] writes 2 reads 2 params 5 {
        WORKGROUP: &[256], RENORMALIZE: FLAG, EXPERTS: &[10, 1024],
    }
    EXPERT_MLP_FEW = "expert_mlp_few" [Chunks, Format, Team, Experts, Rows, Products] writes 1 reads 4 params 22 {
        WORKGROUP: &[64, 256], FORMAT: ANY_FORMAT, DOWN: FLAG, WALK: &[0, 1, 2], OUTPUTS: &[8], SPLIT: FLAG,
    }
    EXPERT_MLP_COMBINE = "expert_mlp_combine" [Chunks, Format, Team, Experts, Rows, Products] writes 1 reads 4 params 22 {
        WORKGROUP: &[64, 256], FORMAT: FORMAT, TOP_K: &[3, 8], OUTPUTS: &[4],
    }
    EXPERT_MLP_GROUP = "expert_mlp_group" [] writes 1 reads 1 params 3 { EXPERTS: &[10, 1024], TILE: &[16, 64] }
    EXPERT_MLP_TILED = "expert_mlp_tiled" [Chunks, Format, Experts, Rows, Tile] writes 1 reads 4 params 22 {
        FORMAT: ANY_FORMAT, DOWN: FLAG, WIDE: FLAG, OUTPUTS: &[64, 128],
    }
    EXPERT_MLP_COOPERATIVE = "expert_mlp_cooperative" [Cooperative, Chunks, Format, Experts, Rows, CooperativeTile]
        writes 1 reads 4 params 22 {
        FORMAT: HALVED_FORMAT, DOWN: FLAG, OUTPUTS: &[64, 128],
    }
    TABLE_CHANGES = "table_changes" [] writes 1 reads 1 params 2 {}
    COMBINE = "combine" [] writes 1 reads 4 params 8 { SHARED: FLAG }
    EDIT_LOGITS = "edit_logits" [] writes 1 reads 1 params 4 {}
    TOP_LOGITS_SLICE = "top_logits_slice" [Team, Select] writes 2 reads 2 params 4 {
        WORKGROUP: &[256], K: &[1, 256], SLICE: &[2048],
    }
    TOP_LOGITS = "top_logits" [Team, Select] writes 3 reads 3 params 6 { WORKGROUP: &[256, 1024], K: &[1, 256] }
}

#[cfg(test)]
mod tests {
    use naga::{
        back::{pipeline_constants::process_overrides, spv},
        front::wgsl,
        valid::{Capabilities, ValidationFlags, Validator},
    };

    use super::*;

    /// Every combination of the constants' values.
    fn combinations(constants: &[(&'static str, &'static [u32])]) -> Vec<Vec<(&'static str, u32)>> {
        constants.iter().fold(vec![Vec::new()], |combinations, (name, values)| {
            let with = |c: &Vec<_>| {
                values.iter().map(|v| [c.clone(), vec![(*name, *v)]].concat()).collect::<Vec<_>>()
            };
            combinations.iter().flat_map(with).collect()
        })
    }

    #[test]
    fn every_variant_is_valid_wgsl() {
        for kernel in ALL {
            let cooperative = kernel.links.contains(&Link::Cooperative);
            for (subgroups, staged) in [(false, false), (true, false), (false, true), (true, true)] {
                if staged && !kernel.has_products() {
                    continue;
                }
                let windows = [1, 2, 4, 8].map(Chunks::Apart).into_iter().chain([Chunks::Array(16)]);
                for chunks in if kernel.has_chunks() { windows.collect() } else { vec![Chunks::None] } {
                    let text = kernel.module(Linkage { subgroups, chunks, staged });
                    let module = wgsl::parse_str(&text)
                        .unwrap_or_else(|e| panic!("{}:\n{}", kernel.name, e.emit_to_string(&text)));
                    let mut able = Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32;
                    if subgroups || cooperative {
                        able |= Capabilities::SUBGROUP;
                    }
                    if cooperative {
                        able |= Capabilities::COOPERATIVE_MATRIX | Capabilities::SHADER_FLOAT16;
                    }
                    if matches!(chunks, Chunks::Array(_)) {
                        able |= Capabilities::STORAGE_BUFFER_BINDING_ARRAY
                            | Capabilities::STORAGE_BUFFER_BINDING_ARRAY_NON_UNIFORM_INDEXING;
                    }
                    let mut validator = Validator::new(ValidationFlags::all(), able);
                    let info = validator
                        .validate(&module)
                        .unwrap_or_else(|e| panic!("{}:\n{}", kernel.name, e.emit_to_string(&text)));
                    let params =
                        module.types.iter().find(|(_, t)| t.name.as_deref() == Some("Params")).unwrap().1;
                    assert_eq!(
                        params.inner.size(module.to_ctx()) as usize,
                        4 * kernel.n_params,
                        "{}",
                        kernel.name
                    );
                    for constants in combinations(kernel.constants) {
                        let values =
                            constants.iter().map(|(name, v)| (name.to_string(), f64::from(*v))).collect();
                        let (module, info) = process_overrides(&module, &info, None, &values)
                            .unwrap_or_else(|e| panic!("{} {constants:?}: {e}", kernel.name));
                        // No software adapter runs these: as far as a driver's input they are followed here.
                        if cooperative {
                            spv::write_vec(&module, &info, &spv::Options::default(), None)
                                .unwrap_or_else(|e| panic!("{} {constants:?}: {e}", kernel.name));
                        }
                    }
                }
            }
        }
    }
}
