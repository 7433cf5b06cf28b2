// Changes entries of a pool's table, in order: a few, so that one thread does it.
//
// changes: word 0 the number of changes, then pairs of entry and slot. Bound by latency.

struct Params {
    table_at: u32,
    changes_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> table: array<i32>;
@group(0) @binding(1) var<storage, read> changes: array<i32>;

@compute @workgroup_size(1)
fn main() {
    let end = p.changes_at + 1u + 2u * u32(changes[p.changes_at]);
    for (var at = p.changes_at + 1u; at < end; at += 2u) {
        table[p.table_at + u32(changes[at])] = changes[at + 1u];
    }
}
