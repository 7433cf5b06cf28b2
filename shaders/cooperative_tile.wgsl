// Rows of halves, as half_rows leaves them, times rows of a weight, on cooperative matrices of 16 x 16 with sums in f32. Linked behind
// what knows rows of weights, in front of an op that gives `x_start` and `tile_row`.
//
// A workgroup has DOWN_SUBGROUPS x ACROSS_SUBGROUPS subgroups of 32 lanes; each computes 64 rows of x times 32 rows of the weight. The columns are
// walked through DEPTH at a time, through workgroup memory; the next ones are loaded while these are multiplied. Rows in workgroup memory
// have 16 bytes of padding, so that neighbours use other banks.
//
// A weight becomes a half too, times a power of two that is the same for the whole tile. 1 does for the tiles of any real model: of bf16
// nothing is lost from 2^-17 on, and 2^-25 at most below. Where the tile holds something larger than a half can, or nothing larger than
// 2^-10, it is computed again with the power that makes its largest weight lie between 2^14 and 2^15.

override ROWS: u32 = 2u;
override COLUMNS: u32 = 4u;

const DEPTH: u32 = 32u;
// vec4s from a row to the next.
const STRIDE: u32 = DEPTH / 4u + 2u;

@group(0) @binding(1) var<storage, read> halves: array<vec4<f16>>;

// Sizes have names, since naga drops nameless ones before overrides that stand behind them.
override SUBGROUPS: u32 = ROWS * COLUMNS;
override THREADS: u32 = 32u * SUBGROUPS;
// Of a thread: vec4s of halves, and eights of weights.
override X_LOADS: u32 = DEPTH / 2u / COLUMNS;
override WEIGHT_LOADS: u32 = DEPTH / 8u / ROWS;
override X_VECS: u32 = 64u * ROWS * STRIDE;
override WEIGHT_VECS: u32 = 32u * COLUMNS * STRIDE;
override RESULTS: u32 = 512u * SUBGROUPS;

// Vulkan wants matrices loaded from, and stored to, multiples of 16 bytes, and NVIDIA drops the rest of an address; drivers put these
// variables one behind the other, so that the size of each is such a multiple too.
var<workgroup> x_tile: array<vec4<f16>, X_VECS>;
var<workgroup> weight_tile: array<vec4<f16>, WEIGHT_VECS>;
// Of each subgroup, 16 rows of 32 sums.
var<workgroup> results: array<f32, RESULTS>;
var<workgroup> largest: array<vec4<f32>, SUBGROUPS>;
var<workgroup> largest_of_all: vec4<f32>;

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

// Two by four matrices... of sums.
struct Sums {
    tile: array<coop_mat16x16<f32, C>, 8>,
}

// The rows that a thread loads from, of the tiles. Neighbours load neighbouring columns.
struct Loads {
    // Element at which a row of halves starts.
    x: array<u32, 16>,
    inside: array<bool, 16>,
    weights: array<Row, 8>,
}

struct Columns {
    x: array<vec4<f16>, 16>,
    weights: array<Two, 8>,
}

const X_THREADS: u32 = DEPTH / 4u;
const WEIGHT_THREADS: u32 = DEPTH / 8u;

// Row of the tile of x that a thread's load belongs to.
fn x_row_of(at: Invocation, load: u32) -> u32 {
    return at.thread / X_THREADS + THREADS / X_THREADS * load;
}

// The same of weights.
fn weight_row_of(at: Invocation, load: u32) -> u32 {
    return at.thread / WEIGHT_THREADS + THREADS / WEIGHT_THREADS * load;
}

// What columns c .. c + DEPTH hold for a thread.
fn load_columns(at: Invocation, loads: ptr<function, Loads>, next: ptr<function, Columns>, c: u32) {
    let x_column = c + 4u * (at.thread % X_THREADS);
    for (var i = 0u; i < X_LOADS; i++) {
        (*next).x[i] = vec4(0.0h);
        if (*loads).inside[i] && x_column < p.in_features {
            (*next).x[i] = halves[((*loads).x[i] + x_column) / 4u];
        }
    }
    let column = c + 8u * (at.thread % WEIGHT_THREADS);
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        (*next).weights[i] = Two(vec4(0u), vec4(0u));
        if column < p.in_features {
            (*next).weights[i] = stored_eight((*loads).weights[i], column);
        }
    }
}

// The sums of the tile over `factor`; the largest weight that this thread met.
fn multiply(at: Invocation, loads: ptr<function, Loads>, sums: ptr<function, Sums>, factor: f32) -> f32 {
    let x_first = at.subgroup / COLUMNS * 64u * STRIDE;
    let weight_first = at.subgroup % COLUMNS * 32u * STRIDE;
    var most = vec4(0.0);
    var next: Columns;
    load_columns(at, loads, &next, 0u);
    for (var c = 0u; c < p.in_features; c += DEPTH) {
        for (var i = 0u; i < X_LOADS; i++) {
            x_tile[x_row_of(at, i) * STRIDE + at.thread % X_THREADS] = next.x[i];
        }
        for (var i = 0u; i < WEIGHT_LOADS; i++) {
            let to = weight_row_of(at, i) * STRIDE + 2u * (at.thread % WEIGHT_THREADS);
            let columns = decode_eight(next.weights[i]);
            most = max(most, max(abs(columns.low), abs(columns.high)));
            weight_tile[to] = vec4<f16>(columns.low * factor);
            weight_tile[to + 1u] = vec4<f16>(columns.high * factor);
        }
        workgroupBarrier();
        load_columns(at, loads, &next, c + DEPTH);
        for (var k = 0u; k < DEPTH / 4u; k += 4u) {
            let w_0 = coopLoad<coop_mat16x16<f16, B>>(&weight_tile[weight_first + k], STRIDE);
            let w_1 = coopLoad<coop_mat16x16<f16, B>>(&weight_tile[weight_first + 16u * STRIDE + k], STRIDE);
            for (var i = 0u; i < 4u; i++) {
                let x = coopLoadT<coop_mat16x16<f16, A>>(&x_tile[x_first + 16u * i * STRIDE + k], STRIDE);
                (*sums).tile[2u * i] = coopMultiplyAdd(x, w_0, (*sums).tile[2u * i]);
                (*sums).tile[2u * i + 1u] = coopMultiplyAdd(x, w_1, (*sums).tile[2u * i + 1u]);
            }
        }
        workgroupBarrier();
    }
    return max(max(most.x, most.y), max(most.z, most.w));
}

fn largest_weight(at: Invocation, own: f32) -> f32 {
    let most = subgroupMax(own);
    if at.lane == 0u {
        largest[at.subgroup] = vec4(most);
    }
    workgroupBarrier();
    if at.thread == 0u {
        var all = largest[0];
        for (var i = 1u; i < ROWS * COLUMNS; i++) {
            all = max(all, largest[i]);
        }
        largest_of_all = all;
    }
    return workgroupUniformLoad(&largest_of_all).x;
}

// The sums of the tile, over what is returned. All threads of the workgroup call it together.
fn tile_sums(at: Invocation, loads: ptr<function, Loads>, sums: ptr<function, Sums>) -> f32 {
    let most = largest_weight(at, multiply(at, loads, sums, 1.0));
    if most == 0.0 || (most >= 0x1p-10 && most <= 65504.0) {
        return 1.0;
    }
    // Far from where a factor or its inverse is no normal number.
    let exponent = clamp(i32(bitcast<u32>(most) >> 23u) - 127 - 14, -100, 100);
    *sums = Sums();
    _ = multiply(at, loads, sums, bitcast<f32>(u32(127 - exponent) << 23u));
    return bitcast<f32>(u32(127 + exponent) << 23u);
}
