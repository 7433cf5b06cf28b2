// matmul for many rows of x.
//
// A workgroup of 16 x 16 threads computes 64 rows of x times 64 outputs, walking the columns DEPTH at a time through
// workgroup memory; a thread computes every 16th row times every 16th output of the tile. Tiles lie in workgroup memory with
// one vec4 of padding a row, so that neighbouring rows use other banks; the next columns are loaded while these are
// multiplied. The norm's scale is the same for a whole row and is applied at the end. Bound by f32 multiply-adds.

// Whether rows of the weight, of x and of the norm are wide.
override WIDE: bool = true;
override TILE: u32 = 64u;

const DEPTH: u32 = 16u;
const STRIDE: u32 = DEPTH / 4u + 1u;

var<workgroup> x_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> weight_tile: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> up_tile: array<vec4<f32>, select(1u, TILE * STRIDE, GLU == TOGETHER)>;
// Of a row's squares: the sums of the threads that load it.
var<workgroup> squares: array<f32, TILE * 4u>;

// A quarter of DEPTH columns of one row of x, from column `c` on.
fn load_x(n: u32, c: u32) -> vec4<f32> {
    if n >= p.n_rows || c >= p.in_features {
        return vec4(0.0);
    }
    let at = x_start(n) + c;
    if WIDE {
        return x[at / 4u];
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = x[(at + i) / 4u][(at + i) % 4u];
    }
    return v;
}

fn load_norm(c: u32) -> vec4<f32> {
    var v = vec4(0.0);
    for (var i = 0u; i < 4u; i++) {
        if c + i < p.in_features {
            let at = p.norm_at + c + i;
            v[i] = decode_element(NORM, norm[at / per_vec(NORM)], at);
        }
    }
    return v;
}

// A quarter of DEPTH columns of a row of the weight.
fn load_row(row: Row, c: u32) -> vec4<f32> {
    if c >= p.in_features {
        return vec4(0.0);
    }
    if WIDE {
        return four(row, c);
    }
    var v = vec4(0.0);
    for (var i = 0u; i < min(4u, p.in_features - c); i++) {
        v[i] = element(row, c + i);
    }
    return v;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first_row = workgroup.y * TILE;
    let first_output = workgroup.x * TILE;
    // Loading: a thread takes a quarter of DEPTH columns of every 64th row.
    let quarter = thread % 4u;
    let loaded = thread / 4u;
    var x_next: array<vec4<f32>, 2>;
    var weight_rows: array<Row, 2>;
    var weight_next: array<vec4<f32>, 2>;
    var up_rows: array<Row, 2>;
    var up_next: array<vec4<f32>, 2>;
    var own_squares: array<f32, 2>;
    var sums: array<f32, 64>;
    var up_sums: array<f32, 64>;
    for (var i = 0u; i < TILE / 64u; i++) {
        x_next[i] = load_x(first_row + loaded + 64u * i, 4u * quarter);
    }
    for (var i = 0u; i < TILE / 64u; i++) {
        weight_rows[i] = weight_row(first_output + loaded + 64u * i);
        weight_next[i] = load_row(weight_rows[i], 4u * quarter);
        if GLU == TOGETHER {
            up_rows[i] = up_row(first_output + loaded + 64u * i);
            up_next[i] = load_row(up_rows[i], 4u * quarter);
        }
    }
    for (var c = 4u * quarter; c < p.in_features + 4u * quarter; c += DEPTH) {
        var scale = vec4(1.0);
        if NORM != NONE {
            scale = load_norm(c);
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            if NORM != NONE {
                own_squares[i] += dot(x_next[i], x_next[i]);
            }
            x_tile[(loaded + 64u * i) * STRIDE + quarter] = x_next[i] * scale;
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            weight_tile[(loaded + 64u * i) * STRIDE + quarter] = weight_next[i];
            if GLU == TOGETHER {
                up_tile[(loaded + 64u * i) * STRIDE + quarter] = up_next[i];
            }
        }
        workgroupBarrier();
        for (var i = 0u; i < TILE / 64u; i++) {
            x_next[i] = load_x(first_row + loaded + 64u * i, c + DEPTH);
        }
        for (var i = 0u; i < TILE / 64u; i++) {
            weight_next[i] = load_row(weight_rows[i], c + DEPTH);
            if GLU == TOGETHER {
                up_next[i] = load_row(up_rows[i], c + DEPTH);
            }
        }
        for (var k = 0u; k < DEPTH / 4u; k++) {
            var xs: array<vec4<f32>, 8>;
            for (var i = 0u; i < TILE / 16u; i++) {
                xs[i] = x_tile[(thread / 16u + 16u * i) * STRIDE + k];
            }
            for (var j = 0u; j < TILE / 16u; j++) {
                let w = weight_tile[(thread % 16u + 16u * j) * STRIDE + k];
                for (var i = 0u; i < TILE / 16u; i++) {
                    sums[i * (TILE / 16u) + j] += dot(xs[i], w);
                }
                if GLU == TOGETHER {
                    let u = up_tile[(thread % 16u + 16u * j) * STRIDE + k];
                    for (var i = 0u; i < TILE / 16u; i++) {
                        up_sums[i * (TILE / 16u) + j] += dot(xs[i], u);
                    }
                }
            }
        }
        workgroupBarrier();
    }
    if NORM != NONE {
        for (var i = 0u; i < TILE / 64u; i++) {
            squares[(loaded + 64u * i) * 4u + quarter] = own_squares[i];
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < TILE / 16u; i++) {
        let row = thread / 16u + 16u * i;
        var scale = 1.0;
        if NORM != NONE {
            let sum = squares[4u * row] + squares[4u * row + 1u] + squares[4u * row + 2u] + squares[4u * row + 3u];
            scale = inverseSqrt(sum / f32(p.in_features) + p.eps);
        }
        for (var j = 0u; j < TILE / 16u; j++) {
            let output = first_output + thread % 16u + 16u * j;
            if first_row + row < p.n_rows {
                let place = i * (TILE / 16u) + j;
                finish(first_row + row, output, sums[place] * scale, up_sums[place] * scale);
            }
        }
    }
}
