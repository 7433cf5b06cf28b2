// How weights are stored. Linked in front of every op that reads one; bound as vec4<u32>, 16 bytes at a time.
//
// A vec4 holds 4 elements of f32 and 8 of bf16 or f16, the first in the lowest bits.

const F32: u32 = 0u;
const BF16: u32 = 1u;
const F16: u32 = 2u;
// Of a weight that an op may do without.
const NONE: u32 = 3u;

// Elements that a vec4 holds.
fn per_vec(format: u32) -> u32 {
    return select(8u, 4u, format == F32);
}

fn decode_pair(format: u32, word: u32) -> vec2<f32> {
    if format == BF16 {
        return vec2(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
    }
    return unpack2x16float(word);
}

// Elements 0..4 or 4..8 of a vec4 of a 16-bit format.
fn decode_half(format: u32, v: vec4<u32>, upper: bool) -> vec4<f32> {
    let words = select(v.xy, v.zw, upper);
    return vec4(decode_pair(format, words.x), decode_pair(format, words.y));
}

// Element `i` of an array, `v` being the vec4 it lies in.
fn decode_element(format: u32, v: vec4<u32>, i: u32) -> f32 {
    if format == F32 {
        return bitcast<f32>(v[i & 3u]);
    }
    let pair = decode_pair(format, v[(i >> 1u) & 3u]);
    return select(pair.x, pair.y, (i & 1u) == 1u);
}

// 8 elements of a row.
struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
}
