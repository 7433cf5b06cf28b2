// out[n, :] = table[ids[n], :]
//
// One thread an element. Of a table larger than a binding, a dispatch sees the rows first_row .. first_row + n_window_rows and
// leaves other ids alone. Bound by bytes.

override FORMAT: u32 = 1u;

struct Params {
    n_rows: u32,
    hidden: u32,
    first_row: u32,
    n_window_rows: u32,
    out_at: u32,
    ids_at: u32,
    table_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> table: array<vec4<u32>>;

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
    let row = u32(ids[p.ids_at + i / p.hidden]) - p.first_row;
    if row >= p.n_window_rows {
        return;
    }
    let element = p.table_at + row * p.hidden + i % p.hidden;
    out[p.out_at + i] = decode_element(FORMAT, table[element / per_vec(FORMAT)], element);
}
