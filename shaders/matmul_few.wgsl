// matmul for 5 to 16 rows of x; rows of the weight are wide.
//
// A team computes four outputs at a time, of a GLU two, for all rows of x, so that each weight is read once: 4 columns a lane, as
// products of 4 x 4 matrices, one for each QUAD of rows. A workgroup computes OUTPUTS outputs. Squares are summed on the way and the
// norm's scale is applied to the sum. Bound by the bytes of the weight, near 16 rows by the loads of x.

// Rows of x in fours: 2 or 4.
override QUADS: u32 = 2u;
override OUTPUTS: u32 = 32u;

// The sums of four rows of x: column r, component n. Their squares.
struct Quad {
    sums: mat4x4<f32>,
    squares: vec4<f32>,
    // vec4s of x at which the rows start.
    rows: vec4<u32>,
}

fn quad(n: u32) -> Quad {
    // Rows behind the last repeat it.
    let last = p.n_rows - 1u;
    let starts = vec4(
        x_start(min(n, last)),
        x_start(min(n + 1u, last)),
        x_start(min(n + 2u, last)),
        x_start(min(n + 3u, last)),
    );
    var made: Quad;
    made.rows = starts / 4u;
    return made;
}

fn add(q: ptr<function, Quad>, i: u32, w: mat4x4<f32>) {
    let rows_x = mat4x4(x[(*q).rows.x + i], x[(*q).rows.y + i], x[(*q).rows.z + i], x[(*q).rows.w + i]);
    (*q).sums += transpose(rows_x) * w;
    if NORM != NONE {
        (*q).squares += vec4(
            dot(rows_x[0], rows_x[0]),
            dot(rows_x[1], rows_x[1]),
            dot(rows_x[2], rows_x[2]),
            dot(rows_x[3], rows_x[3]),
        );
    }
}

// Four lanes finish a row of x each.
fn finish_quad(at: Invocation, q: Quad, first_n: u32, first: u32, inside: bool) {
    let sums_0 = team_sum(at, q.sums[0]);
    let sums_1 = team_sum(at, q.sums[1]);
    let sums_2 = team_sum(at, q.sums[2]);
    let sums_3 = team_sum(at, q.sums[3]);
    var scale = vec4(1.0);
    if NORM != NONE {
        scale = inverseSqrt(team_sum(at, q.squares) / f32(p.in_features) + p.eps);
    }
    let lane = lane_of(at);
    let n = first_n + lane;
    if lane >= 4u || n >= p.n_rows || !inside {
        return;
    }
    let sums = vec4(sums_0[lane], sums_1[lane], sums_2[lane], sums_3[lane]) * scale[lane];
    if GLU == TOGETHER {
        finish(n, first, sums.x, sums.z);
        finish(n, first + 1u, sums.y, sums.w);
    } else {
        finish(n, first, sums.x, 0.0);
        finish(n, first + 1u, sums.y, 0.0);
        finish(n, first + 2u, sums.z, 0.0);
        finish(n, first + 3u, sums.w, 0.0);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(4u, 2u, GLU == TOGETHER);
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = block + own;
        let row_0 = weight_row(first);
        let row_1 = weight_row(first + 1u);
        var row_2: Row;
        var row_3: Row;
        if GLU == TOGETHER {
            row_2 = up_row(first);
            row_3 = up_row(first + 1u);
        } else {
            row_2 = weight_row(first + 2u);
            row_3 = weight_row(first + 3u);
        }
        var quad_0 = quad(0u);
        var quad_1 = quad(4u);
        var quad_2 = quad(8u);
        var quad_3 = quad(12u);
        for (var i = lane_of(at); i < p.in_features / 4u; i += lanes_of(at)) {
            let c = 4u * i;
            var w = mat4x4(four(row_0, c), four(row_1, c), four(row_2, c), four(row_3, c));
            if NORM != NONE {
                let scale = norm_four(i);
                w = mat4x4(w[0] * scale, w[1] * scale, w[2] * scale, w[3] * scale);
            }
            add(&quad_0, i, w);
            add(&quad_1, i, w);
            if QUADS > 2u {
                add(&quad_2, i, w);
                add(&quad_3, i, w);
            }
        }
        let inside = own < OUTPUTS;
        finish_quad(at, quad_0, 0u, first, inside);
        finish_quad(at, quad_1, 4u, first, inside);
        if QUADS > 2u {
            finish_quad(at, quad_2, 8u, first, inside);
            finish_quad(at, quad_3, 12u, first, inside);
        }
    }
}
