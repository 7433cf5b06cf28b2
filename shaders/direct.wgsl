// Four rows of a weight without scales times one row of x, or two: 8 columns a thread. Linked in front of an op that gives `norm_four`,
// NORM and SPLIT: whether the threads of a workgroup share the columns, or those of a team.

// What four rows add up to with the first row of x, with the second, and the squares of the first.
struct Sums {
    first: vec4<f32>,
    second: vec4<f32>,
    squares: f32,
}

// What lies at the same 8 columns of the rows.
struct Step {
    a: Two,
    b: Two,
    c: Two,
    d: Two,
}

fn load(rows: Four, i: u32) -> Step {
    return Step(
        stored_eight(rows.a, 8u * i),
        stored_eight(rows.b, 8u * i),
        stored_eight(rows.c, 8u * i),
        stored_eight(rows.d, 8u * i),
    );
}

fn product(v: Two, low: vec4<f32>, high: vec4<f32>) -> f32 {
    let w = decode_eight(v);
    return dot(low, w.low) + dot(high, w.high);
}

fn products(step: Step, low: vec4<f32>, high: vec4<f32>) -> vec4<f32> {
    return vec4(
        product(step.a, low, high),
        product(step.b, low, high),
        product(step.c, low, high),
        product(step.d, low, high),
    );
}

// What columns 8 i .. 8 i + 8 add.
fn add(sums: ptr<function, Sums>, step: Step, x_rows: vec2<u32>, two: bool, i: u32) {
    var low = x[x_rows.x + 2u * i];
    var high = x[x_rows.x + 2u * i + 1u];
    if NORM != NONE {
        (*sums).squares += dot(low, low) + dot(high, high);
        low *= norm_four(2u * i);
        high *= norm_four(2u * i + 1u);
    }
    (*sums).first += products(step, low, high);
    if two {
        (*sums).second += products(step, x[x_rows.y + 2u * i], x[x_rows.y + 2u * i + 1u]);
    }
}

fn crew_sum(at: Invocation, v: vec4<f32>) -> vec4<f32> {
    if SPLIT {
        return vec4(workgroup_sum(at, v.x), workgroup_sum(at, v.y), workgroup_sum(at, v.z), workgroup_sum(at, v.w));
    }
    return team_sum(at, v);
}

// The sums for all who share the columns; `x_rows` says at which vec4s the rows of x start. All threads of the workgroup call it together.
fn four_rows(at: Invocation, rows: Four, x_rows: vec2<u32>, two: bool) -> Sums {
    // Two steps at a time keep eight loads on their way.
    let n = p.in_features / 8u;
    let threads = select(lanes_of(at), WORKGROUP, SPLIT);
    var sums: Sums;
    for (var i = select(lane_of(at), at.thread, SPLIT); i < n; i += 2u * threads) {
        let now = load(rows, i);
        let next = load(rows, min(i + threads, n - 1u));
        add(&sums, now, x_rows, two, i);
        if i + threads < n {
            add(&sums, next, x_rows, two, i + threads);
        }
    }
    sums.first = crew_sum(at, sums.first);
    if two {
        sums.second = crew_sum(at, sums.second);
    }
    if NORM != NONE {
        sums.squares = crew_sum(at, vec4(sums.squares, 0.0, 0.0, 0.0)).x;
    }
    return sums;
}
