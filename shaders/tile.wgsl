// ROWS rows of x times WEIGHTS rows of a weight: what the tiled kernels share. Linked behind what binds x and the weight.
//
// A workgroup of 16 x 16 threads walks the columns, DEPTH at a time, through workgroup memory; the next ones are loaded while these are
// multiplied. There, columns lie one behind the other, rows in vec4s: a thread takes four rows of x or twice four, and as many of the
// weight, so that it reads two vec4s for 16 multiply-adds, or four for 64. Vec4s of a column are swapped so that threads that store
// different columns use different banks. Sums are named and never indexed by a variable: registers are not memory. Bound by f32
// multiply-adds.

// Whether rows of the weight, of x and of the norm are wide.
override WIDE: bool = true;
// 64 or 128, as is WEIGHTS.
override ROWS: u32 = 64u;
// Columns that fit workgroup memory.
override DEPTH: u32 = select(16u, 8u, ROWS + WEIGHTS > 192u);

const THREADS: u32 = 256u;

var<workgroup> x_tile: array<vec4<f32>, ROWS * DEPTH / 4u>;
var<workgroup> weight_tile: array<vec4<f32>, WEIGHTS * DEPTH / 4u>;

// Sums of a thread: column i of a matrix is a row of x, component j an output. `low` and `high` are 64 outputs apart, `first` and `second`
// 64 rows.
struct Sums {
    first_low: mat4x4<f32>,
    first_high: mat4x4<f32>,
    second_low: mat4x4<f32>,
    second_high: mat4x4<f32>,
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

// Columns c .. c + 8 of a row of the weight, as they lie there; f32 where rows are not wide.
fn weight_eight(row: Row, c: u32) -> Two {
    if c >= p.in_features {
        return Two(vec4(0u), vec4(0u));
    }
    if WIDE {
        return stored_eight(row, c);
    }
    var v: Two;
    for (var i = 0u; i < min(8u, p.in_features - c); i++) {
        let column = bitcast<u32>(element(row, c + i));
        if i < 4u {
            v.first[i] = column;
        } else {
            v.second[i - 4u] = column;
        }
    }
    return v;
}

fn decoded(v: Two) -> Eight {
    if WIDE {
        return decode_eight(v);
    }
    return Eight(bitcast<vec4<f32>>(v.first), bitcast<vec4<f32>>(v.second));
}

// What vec4s of a column are swapped with.
fn turn(c: u32) -> u32 {
    return c / 4u * (32u / DEPTH);
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

// Adds what the columns in workgroup memory give; rows from `n_rows` on are left out, in whole runs of 64 or of what a subgroup has.
fn multiply(sums: ptr<function, Sums>, thread: u32, n_rows: u32) {
    let row = thread / 16u;
    if 4u * row >= n_rows {
        return;
    }
    let both = ROWS > 64u && 64u + 4u * row < n_rows;
    for (var c = 0u; c < DEPTH; c++) {
        let w_at = c * (WEIGHTS / 4u) + ((thread % 16u) ^ turn(c));
        let x_at = c * (ROWS / 4u) + (row ^ turn(c));
        let low = weight_tile[w_at];
        let v = x_tile[x_at];
        (*sums).first_low += outer(v, low);
        if WEIGHTS > 64u {
            (*sums).first_high += outer(v, weight_tile[w_at + 16u]);
        }
        if both {
            let v = x_tile[x_at + 16u];
            (*sums).second_low += outer(v, low);
            if WEIGHTS > 64u {
                (*sums).second_high += outer(v, weight_tile[w_at + 16u]);
            }
        }
    }
}

// Row of x that a thread loads, and row of the weight: each of those a tile has, and none where it is behind the last.
fn x_row_of(thread: u32) -> u32 { return thread / (DEPTH / 4u); }
fn weight_row_of(thread: u32) -> u32 { return thread / (DEPTH / 8u); }

// The sums of a tile with `n_rows` rows. `x_start` and `weight` are where the rows start that the thread loads; those of x are nothing
// unless `inside`. Leaves the squares of each row of x for `squares_of` where there is a norm.
fn product(thread: u32, n_rows: u32, x_start: u32, inside: bool, weight: Row) -> Sums {
    var sums: Sums;
    var squares = 0.0;
    let x_row = x_row_of(thread);
    let x_column = 4u * (thread % (DEPTH / 4u));
    let weight_row = weight_row_of(thread);
    let weight_column = 8u * (thread % (DEPTH / 8u));
    let loads_weight = weight_row < WEIGHTS;
    var x_next = x_four(x_start, inside, x_column);
    var norm_next = norm_of(x_column);
    var weight_next: Two;
    if loads_weight {
        weight_next = weight_eight(weight, weight_column);
    }
    for (var c = 0u; c < p.in_features; c += DEPTH) {
        if NORM != NONE {
            squares += dot(x_next, x_next);
            x_next *= norm_next;
        }
        put_x(x_row, x_column, x_next);
        if loads_weight {
            let columns = decoded(weight_next);
            put_weight(weight_row, weight_column, columns.low);
            put_weight(weight_row, weight_column + 4u, columns.high);
        }
        workgroupBarrier();
        let next = c + DEPTH;
        x_next = x_four(x_start, inside, next + x_column);
        norm_next = norm_of(next + x_column);
        if loads_weight {
            weight_next = weight_eight(weight, next + weight_column);
        }
        multiply(&sums, thread, n_rows);
        workgroupBarrier();
    }
    if NORM != NONE {
        x_tile[x_row][x_column / 4u] = squares;
        workgroupBarrier();
    }
    return sums;
}

// The sum of the squares of a row.
fn squares_of(row: u32) -> f32 {
    let parts = x_tile[row];
    return parts.x + parts.y + select(parts.z + parts.w, 0.0, DEPTH < 16u);
}
