// How weights are stored. Linked in front of every op that reads one; bound as vec4<u32>, 16 bytes at a time.
//
// A vec4 holds 4 elements of f32, 8 of bf16 or f16, 16 codes of fp8 and 32 of nvfp4 or mxfp4, the first in the lowest bits.

const F32: u32 = 0u;
const BF16: u32 = 1u;
const F16: u32 = 2u;
// Of a weight that an op may do without.
const NONE: u32 = 3u;
// From here on elements are codes, and groups of them have scales.
const FP8: u32 = 4u;
const NVFP4: u32 = 5u;
const MXFP4: u32 = 6u;

// Elements that a vec4 holds.
fn per_vec(format: u32) -> u32 {
    if format < FP8 {
        return select(8u, 4u, format == F32);
    }
    return select(32u, 16u, format == FP8);
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

// Codes become halves by moving their bits: exponent and mantissa to the top of the half's mantissa and the foot of its exponent. What
// comes out is too small by a power of two, and the smallest codes are subnormal halves, which drivers keep. Each pair moves from where it
// lies in one step.

// e4m3 codes at bits 0 and 16, over 2^8.
fn e4m3_pair(codes: u32) -> vec2<f32> {
    return unpack2x16float(((codes << 7u) & 0x3f803f80u) | ((codes << 8u) & 0x80008000u));
}

// The four e4m3 codes of a word, over 2^8.
fn e4m3_four(word: u32) -> vec4<f32> {
    let even = e4m3_pair(word);
    let odd = unpack2x16float(((word >> 1u) & 0x3f803f80u) | (word & 0x80008000u));
    return vec4(even.x, odd.x, even.y, odd.y);
}

// e2m1 codes at bits 0 and 16, over 2^14.
fn e2m1_pair(codes: u32) -> vec2<f32> {
    return unpack2x16float(((codes << 9u) & 0x0e000e00u) | ((codes << 12u) & 0x80008000u));
}

// The eight e2m1 codes of a word, over 2^14.
fn e2m1_eight(word: u32) -> Eight {
    let a = e2m1_pair(word);
    let b = unpack2x16float(((word << 5u) & 0x0e000e00u) | ((word << 8u) & 0x80008000u));
    let c = unpack2x16float(((word << 1u) & 0x0e000e00u) | ((word << 4u) & 0x80008000u));
    let d = unpack2x16float(((word >> 3u) & 0x0e000e00u) | (word & 0x80008000u));
    return Eight(vec4(a.x, b.x, c.x, d.x), vec4(a.y, b.y, c.y, d.y));
}

// The four e2m1 codes in the lower half of a word, over 2^14.
fn e2m1_four(word: u32) -> vec4<f32> {
    let bytes = (word & 0xffu) | ((word & 0xff00u) << 8u);
    let even = e2m1_pair(bytes);
    let odd = e2m1_pair(bytes >> 4u);
    return vec4(even.x, odd.x, even.y, odd.y);
}

// 2^i, of an exponent that normal numbers have.
fn power_of_two(i: i32) -> f32 {
    return bitcast<f32>(u32(127 + i) << 23u);
}

// The exponent of a number that is not negative, by its bits.
fn exponent_of(bits: u32) -> i32 {
    return i32(bits >> 23u) - 127;
}
