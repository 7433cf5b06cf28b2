// A window of 2 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> chunk_1: array<vec4<u32>>;

fn chunk_vec(chunk: u32, i: u32) -> vec4<u32> {
    switch chunk {
        case 1u: { return chunk_1[i]; }
        default: { return chunk_0[i]; }
    }
}
