// A window of 1 chunks of an expert pool.

@group(0) @binding(5) var<storage, read> chunk_0: array<vec4<u32>>;

fn code_vec(chunk: u32, i: u32) -> vec4<u32> {
    return chunk_0[i];
}

fn code_word(chunk: u32, i: u32) -> u32 {
    return chunk_0[i / 4u][i % 4u];
}

struct Two {
    first: vec4<u32>,
    second: vec4<u32>,
}

// Two that lie side by side, in one choice of the chunk: compilers of software drivers take long over many.
fn code_two(chunk: u32, i: u32) -> Two {
    return Two(chunk_0[i], chunk_0[i + 1u]);
}
