// How much of a shared expert a row takes: out[n] = sigmoid(weight . normed[n]). Behind the router, which binds all that a device is sure
// to allow.
//
// A workgroup is one row. Bound by launch: there is little work.

override FORMAT: u32 = 1u;

struct Params {
    n_rows: u32,
    hidden: u32,
    out_at: u32,
    normed_at: u32,
    weight_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> normed: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<u32>>;

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let row = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    if row >= p.n_rows {
        return;
    }
    var part = 0.0;
    for (var i = at.thread; i < p.hidden; i += WORKGROUP) {
        let w = p.weight_at + i;
        part += normed[p.normed_at + row * p.hidden + i] * decode_element(FORMAT, weight[w / per_vec(FORMAT)], w);
    }
    let sum = workgroup_sum(at, part);
    if at.thread == 0u {
        out[p.out_at + row] = 1.0 / (1.0 + exp(-sum));
    }
}
