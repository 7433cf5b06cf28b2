// Two rows of codes times one row of x: a vec4 of codes a lane, 16 or 32 columns, which meet x in workgroup memory. Linked in front of an
// op that gives `x_first`, `norm_four` and NORM.
//
// x comes a tile of columns at a time. The vec4s of it that one vec4 of codes meets lie `stride` apart, so that neighbouring lanes read
// neighbours, and neighbours are written to different banks.

const TILE_VECS: u32 = 512u;

var<workgroup> tile: array<vec4<f32>, TILE_VECS + 8u>;

// vec4s of x to a vec4 of codes.
fn depth() -> u32 { return per_vec(FORMAT) / 4u; }
// vec4s of codes to a tile.
fn tile_codes() -> u32 { return TILE_VECS / depth(); }
// From one of the vec4s of x that a vec4 of codes meets to the next.
fn stride() -> u32 { return tile_codes() + 1u; }

// Brings the tile that starts at a vec4 of codes, times the norm; the squares that this thread met. All threads of the workgroup call it
// together.
fn stage(at: Invocation, first: u32) -> f32 {
    let start = first * depth();
    let n = min(TILE_VECS, p.in_features / 4u - start);
    var squares = 0.0;
    workgroupBarrier();
    for (var v = at.thread; v < n; v += WORKGROUP) {
        var columns = x[x_first + start + v];
        if NORM != NONE {
            squares += dot(columns, columns);
            columns *= norm_four(start + v);
        }
        tile[v % depth() * stride() + v / depth()] = columns;
    }
    workgroupBarrier();
    return squares;
}

// What lies at one vec4 of both rows.
struct Step {
    a: vec4<u32>,
    b: vec4<u32>,
    a_scales: vec2<f32>,
    b_scales: vec2<f32>,
}

fn load(a: Row, b: Row, i: u32) -> Step {
    let c = i * per_vec(FORMAT);
    return Step(
        code_vec(a.chunk, vec_of(a, c)),
        code_vec(b.chunk, vec_of(b, c)),
        scales_of(a, c),
        scales_of(b, c),
    );
}

// Half of a vec4 of both rows, times x from a vec4 of the tile on.
fn half_products(a: vec2<u32>, b: vec2<u32>, at: u32) -> vec2<f32> {
    let x_0 = tile[at];
    let x_1 = tile[at + stride()];
    if FORMAT == FP8 {
        return vec2(
            dot(x_0, e4m3_four(a.x)) + dot(x_1, e4m3_four(a.y)),
            dot(x_0, e4m3_four(b.x)) + dot(x_1, e4m3_four(b.y)),
        );
    }
    let x_2 = tile[at + 2u * stride()];
    let x_3 = tile[at + 3u * stride()];
    let a_0 = e2m1_eight(a.x);
    let a_1 = e2m1_eight(a.y);
    let b_0 = e2m1_eight(b.x);
    let b_1 = e2m1_eight(b.y);
    return vec2(
        dot(x_0, a_0.low) + dot(x_1, a_0.high) + dot(x_2, a_1.low) + dot(x_3, a_1.high),
        dot(x_0, b_0.low) + dot(x_1, b_0.high) + dot(x_2, b_1.low) + dot(x_3, b_1.high),
    );
}

// A step times x from a vec4 of the tile on.
fn products(step: Step, at: u32) -> vec2<f32> {
    let first = half_products(step.a.xy, step.b.xy, at);
    let second = half_products(step.a.zw, step.b.zw, at + depth() / 2u * stride());
    return first * vec2(step.a_scales.x, step.b_scales.x) + second * vec2(step.a_scales.y, step.b_scales.y);
}

// The sums of rows `a` and `b` for all of the team, and of the squares of x. All threads of the workgroup call it together.
fn two_rows(at: Invocation, a: Row, b: Row) -> vec4<f32> {
    let n = p.in_features / per_vec(FORMAT);
    let lanes = lanes_of(at);
    var sums = vec2(0.0);
    var squares = 0.0;
    for (var first = 0u; first < n; first += tile_codes()) {
        let end = min(first + tile_codes(), n);
        var i = first + lane_of(at);
        // Two steps at a time, the first ones on their way before x is.
        var now = load(a, b, min(i, n - 1u));
        var next = load(a, b, min(i + lanes, n - 1u));
        squares += stage(at, first);
        while i < end {
            sums += products(now, i - first);
            if i + lanes < end {
                sums += products(next, i + lanes - first);
            }
            i += 2u * lanes;
            if i < end {
                now = load(a, b, i);
                next = load(a, b, min(i + lanes, n - 1u));
            }
        }
    }
    let totals = team_sum(at, vec4(sums, 0.0, 0.0));
    if NORM != NONE {
        squares = workgroup_sum(at, squares);
    }
    return vec4(totals.xy, squares, 0.0);
}
