// matmul for one row of x; rows of the weight are wide.
//
// A team computes four outputs at a time, of a GLU two, or with SPLIT the whole workgroup does, so that few rows keep many threads busy; a
// workgroup computes OUTPUTS of them. The norm's scale is the same for the whole row: squares are summed on the way and applied to the
// sum. Bound by the bytes of the weight.

override SPLIT: bool = false;
override OUTPUTS: u32 = 16u;

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(4u, 2u, GLU == TOGETHER);
    let x_rows = vec2(x_start(0u) / 4u);
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
        let all = four_rows(at, rows, x_rows, false);
        var sums = all.first;
        if NORM != NONE {
            sums *= inverseSqrt(all.squares / f32(p.in_features) + p.eps);
        }
        // A thread finishes an output.
        let lane = select(lane_of(at), at.thread, SPLIT);
        if lane < outputs && own < OUTPUTS {
            finish(0u, first + lane, sums[lane], sums[(lane + 2u) % 4u]);
        }
    }
}
