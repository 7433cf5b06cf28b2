// A window of 1 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;

fn chunk_vec(chunk: u32, i: u32) -> vec4<u32> {
    return chunk_0[i];
}
