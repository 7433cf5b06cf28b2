// A window of 8 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> chunk_1: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read> chunk_2: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read> chunk_3: array<vec4<u32>>;
@group(0) @binding(9) var<storage, read> chunk_4: array<vec4<u32>>;
@group(0) @binding(10) var<storage, read> chunk_5: array<vec4<u32>>;
@group(0) @binding(11) var<storage, read> chunk_6: array<vec4<u32>>;
@group(0) @binding(12) var<storage, read> chunk_7: array<vec4<u32>>;

fn chunk_vec(chunk: u32, i: u32) -> vec4<u32> {
    switch chunk {
        case 1u: { return chunk_1[i]; }
        case 2u: { return chunk_2[i]; }
        case 3u: { return chunk_3[i]; }
        case 4u: { return chunk_4[i]; }
        case 5u: { return chunk_5[i]; }
        case 6u: { return chunk_6[i]; }
        case 7u: { return chunk_7[i]; }
        default: { return chunk_0[i]; }
    }
}
