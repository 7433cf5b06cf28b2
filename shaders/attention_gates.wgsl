// What results of attention are multiplied with where it is GATED. Linked in front of kernels whose parameters say where `gate` lies.

override HEAD_DIM: u32 = 128u;
override GATED: bool = false;

// The sigmoid of the gates behind a head's query, for elements i .. i + 4 of the head.
fn gates(row: u32, head: u32, i: u32) -> vec4<f32> {
    let at = p.gate_at + row * p.gate_width + (2u * head + 1u) * HEAD_DIM + i;
    return 1.0 / (1.0 + exp(-vec4(gate[at], gate[at + 1u], gate[at + 2u], gate[at + 3u])));
}
