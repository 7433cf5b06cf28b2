// Four rows of a weight without scales times one row of x, or two: 8 columns a thread. Linked in front of an op that gives `norm_four`,
// NORM and SPLIT: whether the threads of a workgroup share the columns, or those of a team.

// What four rows add up to with the first row of x and with the second, and the squares of both.
struct Sums {
    first: vec4<f32>,
    second: vec4<f32>,
    squares: vec2<f32>,
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

fn squares(low: vec4<f32>, high: vec4<f32>) -> f32 {
    return select(dot(low, low) + dot(high, high), 0.0, NORM == NONE);
}

// What columns 8 i .. 8 i + 8 add.
fn add(sums: ptr<function, Sums>, step: Step, x_rows: vec2<u32>, two: bool, i: u32) {
    let norm_low = norm_four(2u * i);
    let norm_high = norm_four(2u * i + 1u);
    var low = x[x_rows.x + 2u * i];
    var high = x[x_rows.x + 2u * i + 1u];
    (*sums).squares.x += squares(low, high);
    (*sums).first += products(step, low * norm_low, high * norm_high);
    if two {
        low = x[x_rows.y + 2u * i];
        high = x[x_rows.y + 2u * i + 1u];
        (*sums).squares.y += squares(low, high);
        (*sums).second += products(step, low * norm_low, high * norm_high);
    }
}

// Of workgroups of 256 threads at most, in teams of 4 at least.
var<workgroup> sums_of_teams: array<Sums, 64>;

// The sums over all who share the columns, for all of them: they meet once.
fn crew_sums(at: Invocation, own: Sums, two: bool) -> Sums {
    var team: Sums;
    team.first = team_sum(at, own.first);
    if two {
        team.second = team_sum(at, own.second);
    }
    if NORM != NONE {
        team.squares = team_sum(at, vec4(own.squares, 0.0, 0.0)).xy;
    }
    if !SPLIT {
        return team;
    }
    workgroupBarrier();
    if lane_of(at) == 0u {
        sums_of_teams[team_of(at)] = team;
    }
    workgroupBarrier();
    var all: Sums;
    for (var i = 0u; i < teams_of(at); i++) {
        all.first += sums_of_teams[i].first;
        if two {
            all.second += sums_of_teams[i].second;
        }
        if NORM != NONE {
            all.squares += sums_of_teams[i].squares;
        }
    }
    return all;
}

// The sums for all who share the columns; `x_rows` says at which vec4s the rows of x start. All threads of the workgroup call it together.
fn four_rows(at: Invocation, rows: Four, x_rows: vec2<u32>, two: bool) -> Sums {
    // One step at a time: two or four at a time on fewer threads took longer on an H200.
    let n = p.in_features / 8u;
    let threads = select(lanes_of(at), WORKGROUP, SPLIT);
    var sums: Sums;
    for (var i = select(lane_of(at), at.thread, SPLIT); i < n; i += threads) {
        add(&sums, load(rows, i), x_rows, two, i);
    }
    return crew_sums(at, sums, two);
}
