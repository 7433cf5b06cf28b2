// A tile of a product on cooperative matrices of 16 x 16, with sums in f32: rows of halves, as half_rows leaves them, times rows of a
// weight. Linked behind what knows rows of weights, in front of an op that gives `is_paired`, `held` and `finished`.
//
// A workgroup of four subgroups of 32 lanes computes 64 rows of x times 128 rows of the weight, 32 a subgroup. The columns are walked
// through DEPTH at a time, through workgroup memory; the next ones are loaded while these are multiplied. Rows in workgroup memory have
// 16 bytes of padding, so that neighbours use other banks. Sums have names instead of indices: NVIDIA's compiler keeps them in registers
// then, which is two to three times as fast. Loads have no conditions: what lies behind the last row or column repeats it, and counts for nothing.
//
// A weight becomes a half too, times a power of two that is the same for the whole tile. First that is 1: of bf16 nothing is lost from
// 2^-17 on, and 2^-25 at most below. A tile that holds something larger than a half can, or nothing larger than 2^-10, is computed again
// with the power that makes its largest weight lie between 2^14 and 2^15. Bound by the cooperative matrices, and by bringing halves to them.

const X_ROWS: u32 = 64u;
const WEIGHT_ROWS: u32 = 128u;
const SUBGROUPS: u32 = 4u;
const THREADS: u32 = 128u;
const DEPTH: u32 = 32u;
// vec4s from a row to the next.
const STRIDE: u32 = DEPTH / 4u + 2u;

// In place of x.
@group(0) @binding(1) var<storage, read> halves: array<vec4<f16>>;

// Threads that share a row when they load it, four columns of halves or eight weights each; loads of a thread.
const X_THREADS: u32 = DEPTH / 4u;
const X_LOADS: u32 = X_ROWS * X_THREADS / THREADS;
const WEIGHT_THREADS: u32 = DEPTH / 8u;
const WEIGHT_LOADS: u32 = WEIGHT_ROWS * WEIGHT_THREADS / THREADS;

// Vulkan wants matrices loaded from, and stored to, multiples of 16 bytes, and NVIDIA drops the rest of an address; drivers put these
// variables one behind the other, so that the size of each is such a multiple too.
var<workgroup> x_tile: array<vec4<f16>, X_ROWS * STRIDE>;
var<workgroup> weight_tile: array<vec4<f16>, WEIGHT_ROWS * STRIDE>;
// Of each subgroup, 16 rows of 32 sums.
var<workgroup> results: array<f32, 512u * SUBGROUPS>;
// Of a row of the tile, which the op fills: what its sums are multiplied with, and the element of `out` that they start at, or OUTSIDE.
var<workgroup> row_factors: array<f32, X_ROWS>;
var<workgroup> row_places: array<u32, X_ROWS>;
var<workgroup> largest: array<vec4<f32>, SUBGROUPS>;
var<workgroup> largest_of_all: vec4<f32>;

const OUTSIDE: u32 = 0xffffffffu;

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

// The rows that a thread loads from: elements at which rows of halves start, and rows of the weight.
struct Loads {
    x: array<u32, X_LOADS>,
    weights: array<Row, WEIGHT_LOADS>,
}

// What it loads.
struct Columns {
    x: array<vec4<f16>, X_LOADS>,
    weights: array<Two, WEIGHT_LOADS>,
}

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
    let x_column = min(c + 4u * (at.thread % X_THREADS), p.in_features - 4u);
    for (var i = 0u; i < X_LOADS; i++) {
        (*next).x[i] = halves[((*loads).x[i] + x_column) / 4u];
    }
    let column = min(c + 8u * (at.thread % WEIGHT_THREADS), p.in_features - 8u);
    for (var i = 0u; i < WEIGHT_LOADS; i++) {
        (*next).weights[i] = stored_eight((*loads).weights[i], column);
    }
}

// 16 rows of x times the 32 rows of the weight.
struct Pair {
    left: coop_mat16x16<f32, C>,
    right: coop_mat16x16<f32, C>,
}

struct Sums {
    a: Pair,
    b: Pair,
    c: Pair,
    d: Pair,
}

// Adds what 16 columns make, of the 16 rows that start at a vec4 of the tile.
fn add(sums: Pair, x_at: u32, left: coop_mat16x16<f16, B>, right: coop_mat16x16<f16, B>) -> Pair {
    let x = coopLoadT<coop_mat16x16<f16, A>>(&x_tile[x_at], STRIDE);
    return Pair(coopMultiplyAdd(x, left, sums.left), coopMultiplyAdd(x, right, sums.right));
}

struct Product {
    sums: Sums,
    // The largest weight that the thread met.
    most: f32,
}

fn multiply(at: Invocation, loads: ptr<function, Loads>, factor: f32) -> Product {
    let first = 32u * at.subgroup * STRIDE;
    var sums: Sums;
    var most = vec4(0.0);
    var next: Columns;
    load_columns(at, loads, &next, 0u);
    for (var c = 0u; c < p.in_features; c += DEPTH) {
        for (var i = 0u; i < X_LOADS; i++) {
            x_tile[x_row_of(at, i) * STRIDE + at.thread % X_THREADS] = next.x[i];
        }
        let own_factor = select(0.0, factor, c + 8u * (at.thread % WEIGHT_THREADS) < p.in_features);
        for (var i = 0u; i < WEIGHT_LOADS; i++) {
            let to = weight_row_of(at, i) * STRIDE + 2u * (at.thread % WEIGHT_THREADS);
            let columns = decode_eight(next.weights[i]);
            most = max(most, max(abs(columns.low), abs(columns.high)));
            weight_tile[to] = vec4<f16>(columns.low * own_factor);
            weight_tile[to + 1u] = vec4<f16>(columns.high * own_factor);
        }
        workgroupBarrier();
        load_columns(at, loads, &next, c + DEPTH);
        for (var k = 0u; k < DEPTH / 4u; k += 4u) {
            let left = coopLoad<coop_mat16x16<f16, B>>(&weight_tile[first + k], STRIDE);
            let right = coopLoad<coop_mat16x16<f16, B>>(&weight_tile[first + 16u * STRIDE + k], STRIDE);
            sums.a = add(sums.a, k, left, right);
            sums.b = add(sums.b, 16u * STRIDE + k, left, right);
            sums.c = add(sums.c, 32u * STRIDE + k, left, right);
            sums.d = add(sums.d, 48u * STRIDE + k, left, right);
        }
        workgroupBarrier();
    }
    return Product(sums, max(max(most.x, most.y), max(most.z, most.w)));
}

fn largest_weight(at: Invocation, own: f32) -> f32 {
    let most = subgroupMax(own);
    if at.lane == 0u {
        largest[at.subgroup] = vec4(most);
    }
    workgroupBarrier();
    if at.thread == 0u {
        var all = largest[0];
        for (var i = 1u; i < SUBGROUPS; i++) {
            all = max(all, largest[i]);
        }
        largest_of_all = all;
    }
    return workgroupUniformLoad(&largest_of_all).x;
}

// Writes what 16 rows of the tile, from `first` on, become. Loads come before stores, which would hold them up.
fn write(at: Invocation, sums: Pair, scale: f32, first: u32, first_output: u32, n_outputs: u32) {
    let from_result = 512u * at.subgroup;
    coopStoreT(sums.left, &results[from_result], 32u);
    coopStoreT(sums.right, &results[from_result + 16u], 32u);
    workgroupBarrier();
    let width = select(32u, 16u, is_paired());
    let column = at.lane % width;
    let output = first_output + at.subgroup * width + column;
    var place: array<u32, 16>;
    var before: array<f32, 16>;
    for (var i = 0u; i < width / 2u; i++) {
        place[i] = row_places[first + at.lane / width + 32u / width * i];
        if output >= n_outputs {
            place[i] = OUTSIDE;
        }
        if place[i] != OUTSIDE {
            before[i] = held(place[i] + output);
        }
    }
    for (var i = 0u; i < width / 2u; i++) {
        let row = at.lane / width + 32u / width * i;
        let factor = scale * row_factors[first + row];
        let result = from_result + 32u * row + column;
        var up = 0.0;
        if is_paired() {
            up = results[result + 16u] * factor;
        }
        if place[i] != OUTSIDE {
            out[place[i] + output] = finished(output, results[result] * factor, up, before[i]);
        }
    }
    workgroupBarrier();
}

// Computes the tile, of outputs from `first_output` on. All threads of the workgroup call it together.
fn compute(at: Invocation, loads: ptr<function, Loads>, first_output: u32, n_outputs: u32) {
    var product = multiply(at, loads, 1.0);
    var scale = 1.0;
    let most = largest_weight(at, product.most);
    if most != 0.0 && (most < 0x1p-10 || most > 65504.0) {
        // Far from where a factor or its inverse is no normal number.
        let exponent = clamp(exponent_of(bitcast<u32>(most)) - 14, -100, 100);
        product = multiply(at, loads, power_of_two(-exponent));
        scale = power_of_two(exponent);
    }
    write(at, product.sums.a, scale, 0u, first_output, n_outputs);
    write(at, product.sums.b, scale, 16u, first_output, n_outputs);
    write(at, product.sums.c, scale, 32u, first_output, n_outputs);
    write(at, product.sums.d, scale, 48u, first_output, n_outputs);
}
