// Two rows of a weight without scales times one row of x: 8 columns a lane. Linked in front of an op that gives `x_first`, `norm_four`
// and NORM.

// What columns 8 i .. 8 i + 8 add to both rows and to the squares of x; nothing where they are not inside.
fn products(a: Eight, b: Eight, i: u32, inside: bool) -> vec4<f32> {
    var low = x[x_first + 2u * i];
    var high = x[x_first + 2u * i + 1u];
    var squares = 0.0;
    if NORM != NONE {
        squares = dot(low, low) + dot(high, high);
        low *= norm_four(2u * i);
        high *= norm_four(2u * i + 1u);
    }
    let sums = vec4(dot(low, a.low) + dot(high, a.high), dot(low, b.low) + dot(high, b.high), squares, 0.0);
    return select(vec4(0.0), sums, inside);
}

// The sums of rows `a` and `b`, and of the squares of x, for all of the team.
fn two_rows(at: Invocation, a: Row, b: Row) -> vec4<f32> {
    // Four steps at a time keep eight loads on their way; steps behind the last column load it again and add nothing.
    let n = p.in_features / 8u;
    let lanes = lanes_of(at);
    var sums = vec4(0.0);
    for (var i = lane_of(at); i < n; i += 4u * lanes) {
        let i_1 = min(i + lanes, n - 1u);
        let i_2 = min(i + 2u * lanes, n - 1u);
        let i_3 = min(i + 3u * lanes, n - 1u);
        let a_0 = eight(a, 8u * i);
        let b_0 = eight(b, 8u * i);
        let a_1 = eight(a, 8u * i_1);
        let b_1 = eight(b, 8u * i_1);
        let a_2 = eight(a, 8u * i_2);
        let b_2 = eight(b, 8u * i_2);
        let a_3 = eight(a, 8u * i_3);
        let b_3 = eight(b, 8u * i_3);
        sums += products(a_0, b_0, i, true);
        sums += products(a_1, b_1, i_1, i + lanes < n);
        sums += products(a_2, b_2, i_2, i + 2u * lanes < n);
        sums += products(a_3, b_3, i_3, i + 3u * lanes < n);
    }
    return team_sum(at, sums);
}
