// A window of 8 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> chunk_1: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read> chunk_2: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read> chunk_3: array<vec4<u32>>;
@group(0) @binding(9) var<storage, read> chunk_4: array<vec4<u32>>;
@group(0) @binding(10) var<storage, read> chunk_5: array<vec4<u32>>;
@group(0) @binding(11) var<storage, read> chunk_6: array<vec4<u32>>;
@group(0) @binding(12) var<storage, read> chunk_7: array<vec4<u32>>;

fn code_vec(chunk: u32, i: u32) -> vec4<u32> {
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

fn code_word(chunk: u32, i: u32) -> u32 {
    switch chunk {
        case 1u: { return chunk_1[i / 4u][i % 4u]; }
        case 2u: { return chunk_2[i / 4u][i % 4u]; }
        case 3u: { return chunk_3[i / 4u][i % 4u]; }
        case 4u: { return chunk_4[i / 4u][i % 4u]; }
        case 5u: { return chunk_5[i / 4u][i % 4u]; }
        case 6u: { return chunk_6[i / 4u][i % 4u]; }
        case 7u: { return chunk_7[i / 4u][i % 4u]; }
        default: { return chunk_0[i / 4u][i % 4u]; }
    }
}

struct Two {
    first: vec4<u32>,
    second: vec4<u32>,
}

// Two that lie side by side, in one choice of the chunk: compilers of software drivers take long over many.
fn code_two(chunk: u32, i: u32) -> Two {
    switch chunk {
        case 1u: { return Two(chunk_1[i], chunk_1[i + 1u]); }
        case 2u: { return Two(chunk_2[i], chunk_2[i + 1u]); }
        case 3u: { return Two(chunk_3[i], chunk_3[i + 1u]); }
        case 4u: { return Two(chunk_4[i], chunk_4[i + 1u]); }
        case 5u: { return Two(chunk_5[i], chunk_5[i + 1u]); }
        case 6u: { return Two(chunk_6[i], chunk_6[i + 1u]); }
        case 7u: { return Two(chunk_7[i], chunk_7[i + 1u]); }
        default: { return Two(chunk_0[i], chunk_0[i + 1u]); }
    }
}
