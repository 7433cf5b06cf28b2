// matmul for one row of x; rows of the weight are wide.
//
// A team computes two outputs at a time, of a GLU one; a workgroup computes OUTPUTS of them. The norm's scale is the same for the whole
// row: squares are summed on the way and applied to the sum. Bound by the bytes of the weight.

override OUTPUTS: u32 = 16u;

// vec4 of x at which its row starts.
var<private> x_first: u32;

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let block = (at.workgroup.y * at.workgroups.x + at.workgroup.x) * OUTPUTS;
    let outputs = select(2u, 1u, GLU == TOGETHER);
    x_first = x_start(0u) / 4u;
    for (var start = 0u; start < OUTPUTS; start += teams_of(at) * outputs) {
        let own = start + team_of(at) * outputs;
        let first = block + own;
        var second: Row;
        if GLU == TOGETHER {
            second = up_row(first);
        } else {
            second = weight_row(first + 1u);
        }
        var sums = two_rows(at, weight_row(first), second);
        if NORM != NONE {
            sums *= inverseSqrt(sums.z / f32(p.in_features) + p.eps);
        }
        if lane_of(at) == 0u && own < OUTPUTS {
            finish(0u, first, sums.x, sums.y);
            if GLU != TOGETHER {
                finish(0u, first + 1u, sums.y, 0.0);
            }
        }
    }
}
