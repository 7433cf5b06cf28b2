// Rows of a weight of any format, decoded and scaled. Linked behind what knows where words lie: `code_vec`, `code_two`, `code_word`,
// `scale_word` and `global_word` of a chunk.

override FORMAT: u32 = 1u;

// Where the parts of a matrix begin: codes in elements, scales in bytes, globals in words.
struct Banks {
    codes: u32,
    scales: u32,
    globals: u32,
}

struct Row {
    chunk: u32,
    // vec4 of the chunk that the places below are counted from.
    record: u32,
    // Element.
    first: u32,
    // Byte.
    scales: u32,
    // What the scales are multiplied with: the row's global, and the power of two that decoded codes and scales lack.
    factor: f32,
}

// Four rows that meet the same x.
struct Four {
    a: Row,
    b: Row,
    c: Row,
    d: Row,
}

// Row `r` of a matrix with so many columns.
fn row_of(chunk: u32, record: u32, banks: Banks, r: u32, cols: u32) -> Row {
    var row = Row(chunk, record, banks.codes + r * cols, 0u, 1.0);
    switch FORMAT {
        case FP8: {
            row.scales = banks.scales + r * ((cols + 127u) / 128u * 4u);
            row.factor = 0x1p8;
        }
        case NVFP4: {
            row.scales = banks.scales + r * (cols / 16u);
            row.factor = 0x1p22 * bitcast<f32>(global_word(chunk, 4u * record + banks.globals + r));
        }
        case MXFP4: {
            row.scales = banks.scales + r * (cols / 32u);
            row.factor = 0x1p14;
        }
        default: {}
    }
    return row;
}

// The byte of the row's scales that belongs to a column of a 4-bit format, and what lies behind it in its word.
fn scale_bytes(row: Row, c: u32) -> u32 {
    let byte = row.scales + select(c / 16u, c / 32u, FORMAT == MXFP4);
    return scale_word(row.chunk, 4u * row.record + byte / 4u) >> (8u * (byte % 4u));
}

fn e8m0(code: u32) -> f32 {
    return bitcast<f32>((code & 255u) << 23u);
}

// The scales of a vec4 of codes that starts at column `c`, as they are stored, the first in the lowest bits.
fn stored_scales(row: Row, c: u32) -> u32 {
    if FORMAT == FP8 {
        return scale_word(row.chunk, 4u * row.record + row.scales / 4u + c / 128u);
    }
    // A vec4 of nvfp4 has two groups, whose scales never lie in two words.
    return scale_bytes(row, c);
}

// Those of the two halves of the vec4, for decoded codes.
fn scales_of(row: Row, stored: u32) -> vec2<f32> {
    switch FORMAT {
        case FP8: { return vec2(row.factor * bitcast<f32>(stored)); }
        case NVFP4: { return row.factor * e4m3_pair((stored & 255u) | ((stored & 0xff00u) << 8u)); }
        default: { return vec2(row.factor * e8m0(stored)); }
    }
}

// The scale of a column, for decoded codes.
fn scale_of(row: Row, c: u32) -> f32 {
    return scales_of(row, stored_scales(row, c)).x;
}

// Rows are wide where they start at 16 bytes and hold a multiple of 8 elements in whole vec4s.

// The vec4 that holds column `c` of a wide row.
fn vec_of(row: Row, c: u32) -> u32 {
    return row.record + row.first / per_vec(FORMAT) + c / per_vec(FORMAT);
}

// Columns c .. c + 4 of a wide row.
fn four(row: Row, c: u32) -> vec4<f32> {
    let at = vec_of(row, c);
    let word = 4u * (row.record + row.first / per_vec(FORMAT));
    switch FORMAT {
        case F32: { return bitcast<vec4<f32>>(code_vec(row.chunk, at)); }
        case FP8: { return scale_of(row, c) * e4m3_four(code_word(row.chunk, word + c / 4u)); }
        case NVFP4, MXFP4: {
            return scale_of(row, c) * e2m1_four(code_word(row.chunk, word + c / 8u) >> (4u * (c & 4u)));
        }
        default: { return decode_half(FORMAT, code_vec(row.chunk, at), (c & 4u) != 0u); }
    }
}

// Columns c .. c + 8 of a wide row, as they lie there; of codes the scale stands behind them.
fn stored_eight(row: Row, c: u32) -> Two {
    let at = vec_of(row, c);
    let word = 4u * (row.record + row.first / per_vec(FORMAT));
    switch FORMAT {
        case F32: { return code_two(row.chunk, at); }
        case FP8: {
            let codes = vec2(code_word(row.chunk, word + c / 4u), code_word(row.chunk, word + c / 4u + 1u));
            return Two(vec4(codes, 0u, 0u), vec4(bitcast<u32>(scale_of(row, c))));
        }
        case NVFP4, MXFP4: {
            return Two(vec4(code_word(row.chunk, word + c / 8u)), vec4(bitcast<u32>(scale_of(row, c))));
        }
        default: { return Two(code_vec(row.chunk, at), vec4(0u)); }
    }
}

fn decode_eight(v: Two) -> Eight {
    switch FORMAT {
        case F32: { return Eight(bitcast<vec4<f32>>(v.first), bitcast<vec4<f32>>(v.second)); }
        case FP8: {
            let scale = bitcast<f32>(v.second.x);
            return Eight(scale * e4m3_four(v.first.x), scale * e4m3_four(v.first.y));
        }
        case NVFP4, MXFP4: {
            let scale = bitcast<f32>(v.second.x);
            let codes = e2m1_eight(v.first.x);
            return Eight(scale * codes.low, scale * codes.high);
        }
        default: { return Eight(decode_half(FORMAT, v.first, false), decode_half(FORMAT, v.first, true)); }
    }
}

// Columns c .. c + 8 of a wide row.
fn eight(row: Row, c: u32) -> Eight {
    return decode_eight(stored_eight(row, c));
}

// Column `c` of any row.
fn element(row: Row, c: u32) -> f32 {
    let at = row.first + c;
    switch FORMAT {
        case FP8: {
            return scale_of(row, c) * e4m3_pair(code_word(row.chunk, 4u * row.record + at / 4u) >> (8u * (at % 4u))).x;
        }
        case NVFP4, MXFP4: {
            return scale_of(row, c) * e2m1_pair(code_word(row.chunk, 4u * row.record + at / 8u) >> (4u * (at % 8u))).x;
        }
        default: { return decode_element(FORMAT, code_vec(row.chunk, row.record + at / per_vec(FORMAT)), at); }
    }
}
