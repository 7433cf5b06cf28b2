// The weight of a norm, which rows may do without. Linked in front of kernels that bind `norm`, whose parameters say where it begins.

override NORM: u32 = 3u;

// Columns 4 v .. 4 v + 4, where rows are wide.
fn norm_four(v: u32) -> vec4<f32> {
    switch NORM {
        case NONE: { return vec4(1.0); }
        case F32: { return bitcast<vec4<f32>>(norm[p.norm_at / 4u + v]); }
        default: { return decode_half(NORM, norm[p.norm_at / 8u + v / 2u], (v & 1u) == 1u); }
    }
}
