// A window of 4 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> chunk_1: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read> chunk_2: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read> chunk_3: array<vec4<u32>>;

fn chunk_vec(chunk: u32, i: u32) -> vec4<u32> {
    switch chunk {
        case 1u: { return chunk_1[i]; }
        case 2u: { return chunk_2[i]; }
        case 3u: { return chunk_3[i]; }
        default: { return chunk_0[i]; }
    }
}
