// Does nothing: what a dispatch costs that waits for the one before it. It binds what the others bind, so that it is ordered like them.

struct Params {
    unused: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> to: array<u32>;
@group(0) @binding(1) var<storage, read> source: array<u32>;

@compute @workgroup_size(64)
fn main() {}
