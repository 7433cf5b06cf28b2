// 64 rows of x times WEIGHTS rows of a weight: what the tiled kernels share. Linked behind what binds x and the weight.
//
// A workgroup of 16 x 16 threads takes DEPTH columns at a time through workgroup memory, where columns lie one behind the other, rows in
// vec4s: a thread has four rows of x, and of the weight four or twice four, so that three vec4s are read for 32 multiply-adds. The vec4s of
// a column are swapped so that threads that store different columns use different banks. Sums are named and never indexed by a variable,
// and nothing is loaded ahead: what keeps registers few keeps threads many, and those hide what loads cost. Bound by f32 multiply-adds and
// the reads of workgroup memory.

// Whether rows of the weight, of x and of the norm are wide.
override WIDE: bool = true;

const ROWS: u32 = 64u;
const DEPTH: u32 = 16u;

var<workgroup> x_tile: array<vec4<f32>, ROWS * DEPTH / 4u>;
var<workgroup> weight_tile: array<vec4<f32>, WEIGHTS * DEPTH / 4u>;

// Sums of a thread: column i of a matrix is a row of x, component j a row of the weight, of its upper half 64 rows behind.
struct Sums {
    low: mat4x4<f32>,
    high: mat4x4<f32>,
}

// Columns c .. c + 4 of the row of x that starts at element `row`.
fn x_four(row: u32, inside: bool, c: u32) -> vec4<f32> {
    if !inside || c >= p.in_features {
        return vec4(0.0);
    }
    let at = row + c;
    if WIDE {
        return x[at / 4u];
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = x[(at + i) / 4u][(at + i) % 4u];
    }
    return v;
}

// Columns c .. c + 8 of a row of the weight.
fn weight_eight(row: Row, c: u32) -> Eight {
    var v: Eight;
    if c >= p.in_features {
        return v;
    }
    if WIDE {
        return eight(row, c);
    }
    for (var i = 0u; i < min(8u, p.in_features - c); i++) {
        if i < 4u {
            v.low[i] = element(row, c + i);
        } else {
            v.high[i - 4u] = element(row, c + i);
        }
    }
    return v;
}

// What vec4s of a column are swapped with.
fn turn(c: u32) -> u32 {
    return c / 4u * 2u;
}

// Puts columns c .. c + 4 of a row there.
fn put_x(row: u32, c: u32, v: vec4<f32>) {
    let at = c * (ROWS / 4u) + ((row / 4u) ^ turn(c));
    x_tile[at][row % 4u] = v.x;
    x_tile[at + ROWS / 4u][row % 4u] = v.y;
    x_tile[at + 2u * (ROWS / 4u)][row % 4u] = v.z;
    x_tile[at + 3u * (ROWS / 4u)][row % 4u] = v.w;
}

fn put_weight(row: u32, c: u32, v: vec4<f32>) {
    let at = c * (WEIGHTS / 4u) + ((row / 4u) ^ turn(c));
    weight_tile[at][row % 4u] = v.x;
    weight_tile[at + WEIGHTS / 4u][row % 4u] = v.y;
    weight_tile[at + 2u * (WEIGHTS / 4u)][row % 4u] = v.z;
    weight_tile[at + 3u * (WEIGHTS / 4u)][row % 4u] = v.w;
}

fn outer(v: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(v.x * w, v.y * w, v.z * w, v.w * w);
}

// Adds what the columns in workgroup memory give. Rows from `n_rows` on are left out where a whole subgroup has none.
fn multiply(sums: ptr<function, Sums>, thread: u32, n_rows: u32) {
    let row = thread / 16u;
    if 4u * row >= n_rows {
        return;
    }
    for (var c = 0u; c < DEPTH; c++) {
        let at = c * (WEIGHTS / 4u) + ((thread % 16u) ^ turn(c));
        let v = x_tile[c * (ROWS / 4u) + (row ^ turn(c))];
        (*sums).low += outer(v, weight_tile[at]);
        if WEIGHTS > 64u {
            (*sums).high += outer(v, weight_tile[at + 16u]);
        }
    }
}

// Rows of x and of the weight that a thread loads, the latter behind the last for some threads.
fn x_row_of(thread: u32) -> u32 { return thread / (DEPTH / 4u); }
fn weight_row_of(thread: u32) -> u32 { return thread / (DEPTH / 8u); }

// The sums of a tile with `n_rows` rows. `x_start` and `weight` are where the rows start that the thread loads; that of x is nothing
// unless `inside`. Leaves the squares of each row of x for `squares_of` where there is a norm.
fn product(thread: u32, n_rows: u32, x_start: u32, inside: bool, weight: Row) -> Sums {
    var sums: Sums;
    var squares = 0.0;
    let x_row = x_row_of(thread);
    let x_column = 4u * (thread % (DEPTH / 4u));
    let weight_row = weight_row_of(thread);
    let weight_column = 8u * (thread % (DEPTH / 8u));
    let loads_weight = weight_row < WEIGHTS;
    for (var c = 0u; c < p.in_features; c += DEPTH) {
        var v = x_four(x_start, inside, c + x_column);
        if NORM != NONE {
            squares += dot(v, v);
            v *= norm_of(c + x_column);
        }
        var columns: Eight;
        if loads_weight {
            columns = weight_eight(weight, c + weight_column);
        }
        workgroupBarrier();
        put_x(x_row, x_column, v);
        if loads_weight {
            put_weight(weight_row, weight_column, columns.low);
            put_weight(weight_row, weight_column + 4u, columns.high);
        }
        workgroupBarrier();
        multiply(&sums, thread, n_rows);
    }
    if NORM != NONE {
        workgroupBarrier();
        x_tile[x_row][x_column / 4u] = squares;
        workgroupBarrier();
    }
    return sums;
}

// The sum of the squares of a row.
fn squares_of(row: u32) -> f32 {
    return dot(x_tile[row], vec4(1.0));
}
