enable wgpu_binding_array;

// Any number of chunks of an expert pool, where the device binds an array of them.

override CHUNKS: u32 = 2u;

struct Chunk {
    vecs: array<vec4<u32>>,
}

@group(0) @binding(5) var<storage, read> chunks: binding_array<Chunk>;

// A driver may look up what threads that have left would read: no index is outside.
fn inside(chunk: u32) -> u32 {
    return min(chunk, CHUNKS - 1u);
}

fn code_vec(chunk: u32, i: u32) -> vec4<u32> {
    return chunks[inside(chunk)].vecs[i];
}

fn code_word(chunk: u32, i: u32) -> u32 {
    return chunks[inside(chunk)].vecs[i / 4u][i % 4u];
}

struct Two {
    first: vec4<u32>,
    second: vec4<u32>,
}

// Two that lie side by side.
fn code_two(chunk: u32, i: u32) -> Two {
    let c = inside(chunk);
    return Two(chunks[c].vecs[i], chunks[c].vecs[i + 1u]);
}
