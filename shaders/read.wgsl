// Reads memory once and does nothing with it: the roof above every kernel that is bound by bytes.
//
// A workgroup reads 256 x VECS vec4s that lie side by side.

override VECS: u32 = 16u;

struct Params {
    n_vecs: u32,
    // Of vec4s.
    source_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> seen: array<u32>;
@group(0) @binding(1) var<storage, read> source: array<vec4<u32>>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let first = (workgroup.y * workgroups.x + workgroup.x) * 256u * VECS + thread;
    var all = vec4(0u);
    for (var i = 0u; i < VECS; i++) {
        let at = first + 256u * i;
        if at < p.n_vecs {
            all ^= source[p.source_at + at];
        }
    }
    // Never so in practice, which no compiler knows.
    if all.x == 0x9e3779b9u && all.y == 0x7f4a7c15u && all.z == 0xbf58476du && all.w == 0x94d049bbu {
        seen[0] = 1u;
    }
}
