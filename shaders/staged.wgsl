// Four rows of codes times one row of x, or two: a vec4 of codes a lane, 16 or 32 columns, which meet x in workgroup memory. Linked in
// front of an op that gives `norm_four` and NORM.
//
// x comes a tile of columns at a time, half as many of two rows. The vec4s of it that one vec4 of codes meets lie `stride` apart, so that
// neighbouring lanes read neighbours, and neighbours are written to different banks.

const TILE_VECS: u32 = 512u;

// With room between the vec4s that one vec4 of codes meets.
var<workgroup> tile: array<vec4<f32>, TILE_VECS + 16u>;

// What four rows add up to with the first row of x and with the second, and the squares of both.
struct Sums {
    first: vec4<f32>,
    second: vec4<f32>,
    squares: vec2<f32>,
}

// How x lies in the tile.
struct Tile {
    // vec4s of codes that meet one row of x.
    codes: u32,
    // vec4s of x from one that a vec4 of codes meets to the next.
    stride: u32,
    // And from one row of x to the other.
    second: u32,
}

// vec4s of x to a vec4 of codes.
fn depth() -> u32 { return per_vec(FORMAT) / 4u; }

fn tile_of(two: bool) -> Tile {
    let codes = TILE_VECS / select(1u, 2u, two) / depth();
    return Tile(codes, codes + 1u, (codes + 1u) * depth());
}

// Brings vec4 `v` of a row of x, times the norm, to its place in the tile; its squares.
fn stage_vec(v: u32, start: u32, row: u32, to: u32) -> f32 {
    let columns = x[row + start + v];
    tile[to] = columns * norm_four(start + v);
    return select(dot(columns, columns), 0.0, NORM == NONE);
}

// Brings the tile that starts at a vec4 of codes; the squares that this thread met. All threads of the workgroup call it together.
fn stage(at: Invocation, t: Tile, x_rows: vec2<u32>, two: bool, first: u32) -> vec2<f32> {
    let start = first * depth();
    let n = min(t.codes * depth(), p.in_features / 4u - start);
    var squares = vec2(0.0);
    workgroupBarrier();
    for (var v = at.thread; v < n; v += WORKGROUP) {
        let to = v % depth() * t.stride + v / depth();
        squares.x += stage_vec(v, start, x_rows.x, to);
        if two {
            squares.y += stage_vec(v, start, x_rows.y, to + t.second);
        }
    }
    workgroupBarrier();
    return squares;
}

// What lies at one vec4 of the rows.
struct Step {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    // Of the rows, as they are stored.
    scales: vec4<u32>,
}

fn load(rows: Four, i: u32) -> Step {
    let c = i * per_vec(FORMAT);
    return Step(
        code_vec(rows.a.chunk, vec_of(rows.a, c)),
        code_vec(rows.b.chunk, vec_of(rows.b, c)),
        code_vec(rows.c.chunk, vec_of(rows.c, c)),
        code_vec(rows.d.chunk, vec_of(rows.d, c)),
        vec4(
            stored_scales(rows.a, c),
            stored_scales(rows.b, c),
            stored_scales(rows.c, c),
            stored_scales(rows.d, c),
        ),
    );
}

// Columns of x that half a vec4 of codes meets: of 8-bit codes the first two.
struct Columns {
    x_0: vec4<f32>,
    x_1: vec4<f32>,
    x_2: vec4<f32>,
    x_3: vec4<f32>,
}

fn columns(at: u32, stride: u32) -> Columns {
    if FORMAT == FP8 {
        return Columns(tile[at], tile[at + stride], vec4(0.0), vec4(0.0));
    }
    return Columns(tile[at], tile[at + stride], tile[at + 2u * stride], tile[at + 3u * stride]);
}

// Half a vec4 of codes times x.
fn product(codes: vec2<u32>, x: Columns) -> f32 {
    if FORMAT == FP8 {
        return dot(x.x_0, e4m3_four(codes.x)) + dot(x.x_1, e4m3_four(codes.y));
    }
    let low = e2m1_eight(codes.x);
    let high = e2m1_eight(codes.y);
    return dot(x.x_0, low.low) + dot(x.x_1, low.high) + dot(x.x_2, high.low) + dot(x.x_3, high.high);
}

// Half a step adds: `at` is the vec4 of the tile that its first columns lie in.
fn add_half(sums: ptr<function, Sums>, step: Step, scales: vec4<f32>, upper: bool, at: u32, t: Tile, two: bool) {
    let a = select(step.a.xy, step.a.zw, upper);
    let b = select(step.b.xy, step.b.zw, upper);
    let c = select(step.c.xy, step.c.zw, upper);
    let d = select(step.d.xy, step.d.zw, upper);
    let x_0 = columns(at, t.stride);
    (*sums).first += scales * vec4(product(a, x_0), product(b, x_0), product(c, x_0), product(d, x_0));
    if two {
        let x_1 = columns(at + t.second, t.stride);
        (*sums).second += scales * vec4(product(a, x_1), product(b, x_1), product(c, x_1), product(d, x_1));
    }
}

// A step adds what it makes with vec4 `i` of the tile and those that lie `stride` apart from it.
fn add(sums: ptr<function, Sums>, rows: Four, step: Step, i: u32, t: Tile, two: bool) {
    let a = scales_of(rows.a, step.scales.x);
    let b = scales_of(rows.b, step.scales.y);
    let c = scales_of(rows.c, step.scales.z);
    let d = scales_of(rows.d, step.scales.w);
    add_half(sums, step, vec4(a.x, b.x, c.x, d.x), false, i, t, two);
    add_half(sums, step, vec4(a.y, b.y, c.y, d.y), true, i + depth() / 2u * t.stride, t, two);
}

// The sums for all of the team; `x_rows` says at which vec4s the rows of x start. All threads of the workgroup call it together.
fn four_rows(at: Invocation, rows: Four, x_rows: vec2<u32>, two: bool) -> Sums {
    let t = tile_of(two);
    let n = p.in_features / per_vec(FORMAT);
    let lanes = lanes_of(at);
    var sums: Sums;
    for (var first = 0u; first < n; first += t.codes) {
        let end = min(first + t.codes, n);
        let begin = first + lane_of(at);
        // What comes next is on its way while what is there meets x, and the first before x is there. More at a time takes so many
        // registers that fewer workgroups fit.
        var next = load(rows, min(begin, n - 1u));
        sums.squares += stage(at, t, x_rows, two, first);
        for (var i = begin; i < end; i += lanes) {
            let now = next;
            if i + lanes < end {
                next = load(rows, i + lanes);
            }
            add(&sums, rows, now, i - first, t, two);
        }
    }
    sums.first = team_sum(at, sums.first);
    if two {
        sums.second = team_sum(at, sums.second);
    }
    if NORM != NONE {
        sums.squares.x = workgroup_sum(at, sums.squares.x);
        if two {
            sums.squares.y = workgroup_sum(at, sums.squares.y);
        }
    }
    return sums;
}
