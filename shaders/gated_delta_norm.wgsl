// What stands behind the gated delta rule: out = out / sqrt(mean(out^2) + eps) * norm * silu(z), over each head of each row of a span.
//
// A workgroup is one row and as many value heads as it has teams. Bound by launch: there is little work.

struct Params {
    n_rows: u32,
    n_sequences: u32,
    n_heads: u32,
    value_dim: u32,
    z_width: u32,
    // Blocks of heads, one a team.
    n_blocks: u32,
    eps: f32,
    out_at: u32,
    // Of the first column that is read.
    z_at: u32,
    norm_at: u32,
    spans_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> z: array<f32>;
@group(0) @binding(2) var<storage, read> norm: array<f32>;
@group(0) @binding(3) var<storage, read> spans: array<i32>;

// What is in no span is padding, and left alone.
fn is_padding(row: u32) -> bool {
    for (var i = 0u; i < p.n_sequences; i++) {
        let span = p.spans_at + 4u * i;
        if u32(spans[span]) <= row && row < u32(spans[span + 1u]) {
            return false;
        }
    }
    return true;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let index = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    let row = index / p.n_blocks;
    if row >= p.n_rows || is_padding(row) {
        return;
    }
    for (var first = index % p.n_blocks * teams_of(at); first < p.n_heads; first += p.n_blocks * teams_of(at)) {
        let head = min(first + team_of(at), p.n_heads - 1u);
        let own = p.out_at + (row * p.n_heads + head) * p.value_dim;
        var squares = 0.0;
        for (var i = lane_of(at); i < p.value_dim; i += lanes_of(at)) {
            squares += out[own + i] * out[own + i];
        }
        squares = team_sum(at, vec4(squares, 0.0, 0.0, 0.0)).x;
        let scale = inverseSqrt(squares / f32(p.value_dim) + p.eps);
        if first + team_of(at) < p.n_heads {
            for (var i = lane_of(at); i < p.value_dim; i += lanes_of(at)) {
                let gate = z[p.z_at + row * p.z_width + head * p.value_dim + i];
                out[own + i] *= scale * norm[p.norm_at + i] * (gate / (1.0 + exp(-gate)));
            }
        }
    }
}
