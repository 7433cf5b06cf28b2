// Multiplies and adds out of registers: the roof above every kernel that is bound by f32 arithmetic.
//
// A thread turns a ring of eight vec4s: eight multiply-adds of four components a step.

struct Params {
    n_steps: u32,
    turn: f32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> seen: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    let turn = vec4(p.turn);
    var a = turn + f32(thread);
    var b = a + 1.0;
    var c = a + 2.0;
    var d = a + 3.0;
    var e = a + 4.0;
    var f = a + 5.0;
    var g = a + 6.0;
    var h = a + 7.0;
    for (var i = 0u; i < p.n_steps; i++) {
        a = fma(a, turn, b);
        b = fma(b, turn, c);
        c = fma(c, turn, d);
        d = fma(d, turn, e);
        e = fma(e, turn, f);
        f = fma(f, turn, g);
        g = fma(g, turn, h);
        h = fma(h, turn, a);
    }
    let all = a + b + c + d + e + f + g + h;
    // Never so in practice.
    if all.x == 0.123 && all.y == 0.456 {
        seen[0] = 1u;
    }
}
