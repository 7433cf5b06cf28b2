// x[n, :] += sum over k of parts[n, k, :], in the order of k; routes with id -1 are left out. Then, of a shared expert,
// x[n, :] += gates[n] * rows[n, :].
//
// One thread an element of x. Bound by bytes.

override SHARED: bool = false;

struct Params {
    n_rows: u32,
    top_k: u32,
    hidden: u32,
    x_at: u32,
    parts_at: u32,
    ids_at: u32,
    rows_at: u32,
    gates_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> x: array<f32>;
@group(0) @binding(1) var<storage, read> parts: array<f32>;
@group(0) @binding(2) var<storage, read> ids: array<i32>;
@group(0) @binding(3) var<storage, read> rows: array<f32>;
@group(0) @binding(4) var<storage, read> gates: array<f32>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (workgroup.y * workgroups.x + workgroup.x) * 256u + thread;
    if i >= p.n_rows * p.hidden {
        return;
    }
    let row = i / p.hidden;
    var sum = x[p.x_at + i];
    for (var k = 0u; k < p.top_k; k++) {
        let route = row * p.top_k + k;
        if ids[p.ids_at + route] >= 0 {
            sum += parts[p.parts_at + route * p.hidden + i % p.hidden];
        }
    }
    if SHARED {
        sum += gates[p.gates_at + row] * rows[p.rows_at + i];
    }
    x[p.x_at + i] = sum;
}
