// matmul for 1 to 4 rows of x; rows of the weight are wide.
//
// A team computes four outputs at a time, of a GLU two, or with SPLIT the whole workgroup does, so that few outputs keep many threads busy;
// a workgroup computes OUTPUTS of them. Rows of x come in pairs, behind the first of which weights are read from a cache. The norm's scale is
// the same for a whole row: squares are summed on the way and applied to the sum. Bound by the bytes of the weight.

override SPLIT: bool = false;
// Whether there is more than one row: of one, nothing is held for a second.
override MANY: bool = true;
override OUTPUTS: u32 = 16u;

fn scaled(sums: vec4<f32>, squares: f32) -> vec4<f32> {
    if NORM == NONE {
        return sums;
    }
    return sums * inverseSqrt(squares / f32(p.in_features) + p.eps);
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(4u, 2u, GLU == TOGETHER);
    let teams = select(teams_of(at), 1u, SPLIT);
    let team = select(team_of(at), 0u, SPLIT);
    for (var start = 0u; start < OUTPUTS; start += teams * outputs) {
        let own = start + team * outputs;
        let first = block + own;
        var rows = Four(weight_row(first), weight_row(first + 1u), weight_row(first + 2u), weight_row(first + 3u));
        if GLU == TOGETHER {
            rows.c = up_row(first);
            rows.d = up_row(first + 1u);
        }
        for (var n = 0u; n < select(1u, p.n_rows, MANY); n += 2u) {
            let two = MANY && n + 1u < p.n_rows;
            let x_rows = vec2(x_start(n), x_start(select(n, n + 1u, two))) / 4u;
            let all = four_rows(at, rows, x_rows, two);
            // A thread finishes an output.
            let lane = select(lane_of(at), at.thread, SPLIT);
            if lane < outputs && own < OUTPUTS {
                let sums = scaled(all.first, all.squares.x);
                finish(n, first + lane, sums[lane], sums[(lane + 2u) % 4u]);
                if two {
                    let others = scaled(all.second, all.squares.y);
                    finish(n + 1u, first + lane, others[lane], others[(lane + 2u) % 4u]);
                }
            }
        }
    }
}
