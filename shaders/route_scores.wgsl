// The router's first half: normed[n] = norm(x[n]), scores[n, e] = router[e] . normed[n]; and of a shared expert
// gates[n] = sigmoid(gate . normed[n]).
//
// A workgroup is one row and BLOCK experts, or, behind those, the row's gate. Four scores are computed at a time, 8 columns a thread: by a
// team, or with SPLIT by the whole workgroup, so that few rows keep many threads busy. Who computes scores reads all of x and knows the
// norm's scale without the others; each workgroup writes its share of `normed`. All in f32. Bound by launch where rows are few, else by the
// loads of the router.

override ROUTER: u32 = 1u;
override NORM: u32 = 1u;
override GATE: u32 = 3u;
// Rows start at 16 bytes and hold a multiple of 8 elements.
override WIDE: bool = true;
override SPLIT: bool = false;
override EXPERTS: u32 = 128u;
override BLOCK: u32 = 4u;

struct Params {
    n_rows: u32,
    hidden: u32,
    eps: f32,
    normed_at: u32,
    gates_at: u32,
    x_at: u32,
    norm_at: u32,
    router_at: u32,
    gate_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> scores: array<f32>;
@group(0) @binding(1) var<storage, read_write> normed: array<f32>;
@group(0) @binding(2) var<storage, read_write> gates: array<f32>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> norm: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> router: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> gate: array<vec4<u32>>;

fn x_element(i: u32) -> f32 {
    return x[i / 4u][i % 4u];
}

fn norm_element(i: u32) -> f32 {
    let at = p.norm_at + i;
    return decode_element(NORM, norm[at / per_vec(NORM)], at);
}

fn router_element(expert: u32, i: u32) -> f32 {
    let at = p.router_at + expert * p.hidden + i;
    return decode_element(ROUTER, router[at / per_vec(ROUTER)], at);
}

fn gate_element(i: u32) -> f32 {
    let at = p.gate_at + i;
    return decode_element(GATE, gate[at / per_vec(GATE)], at);
}

// Columns 8 i .. 8 i + 8; 0 behind the last.

fn x_eight(row: u32, i: u32) -> Eight {
    if WIDE {
        return Eight(x[row / 4u + 2u * i], x[row / 4u + 2u * i + 1u]);
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = x_element(row + low);
        }
        if low + 4u < p.hidden {
            v.high[c] = x_element(row + low + 4u);
        }
    }
    return v;
}

fn norm_eight(i: u32) -> Eight {
    let at = p.norm_at / per_vec(NORM);
    if WIDE && NORM == F32 {
        return Eight(bitcast<vec4<f32>>(norm[at + 2u * i]), bitcast<vec4<f32>>(norm[at + 2u * i + 1u]));
    }
    if WIDE {
        let v = norm[at + i];
        return Eight(decode_half(NORM, v, false), decode_half(NORM, v, true));
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = norm_element(low);
        }
        if low + 4u < p.hidden {
            v.high[c] = norm_element(low + 4u);
        }
    }
    return v;
}

fn router_eight(expert: u32, i: u32) -> Eight {
    let at = (p.router_at + expert * p.hidden) / per_vec(ROUTER);
    if WIDE && ROUTER == F32 {
        return Eight(bitcast<vec4<f32>>(router[at + 2u * i]), bitcast<vec4<f32>>(router[at + 2u * i + 1u]));
    }
    if WIDE {
        let v = router[at + i];
        return Eight(decode_half(ROUTER, v, false), decode_half(ROUTER, v, true));
    }
    var v: Eight;
    for (var c = 0u; c < 4u; c++) {
        let low = 8u * i + c;
        if low < p.hidden {
            v.low[c] = router_element(expert, low);
        }
        if low + 4u < p.hidden {
            v.high[c] = router_element(expert, low + 4u);
        }
    }
    return v;
}

// Of those who share the columns, for all of them: the sums, and the squares. Of workgroups of 256 threads at most, in teams of 4 at least.
struct Totals {
    sums: vec4<f32>,
    squares: f32,
}
var<workgroup> of_crew: array<Totals, 64>;

fn crew_totals(at: Invocation, sums: vec4<f32>, squares: f32) -> Totals {
    let own = Totals(team_sum(at, sums), team_sum(at, vec4(squares, 0.0, 0.0, 0.0)).x);
    if !SPLIT {
        return own;
    }
    if lane_of(at) == 0u {
        of_crew[team_of(at)] = own;
    }
    workgroupBarrier();
    var all: Totals;
    for (var i = 0u; i < teams_of(at); i++) {
        all.sums += of_crew[i].sums;
        all.squares += of_crew[i].squares;
    }
    workgroupBarrier();
    return all;
}

@compute @workgroup_size(WORKGROUP)
fn main(at: Invocation) {
    let expert_blocks = (EXPERTS + BLOCK - 1u) / BLOCK;
    let blocks = expert_blocks + select(1u, 0u, GATE == NONE);
    let index = at.workgroup.y * at.workgroups.x + at.workgroup.x;
    let n = index / blocks;
    let block = index % blocks;
    if n >= p.n_rows {
        return;
    }
    let is_gate = block == expert_blocks;
    let row = p.x_at + n * p.hidden;
    let last = EXPERTS - 1u;
    let crews = select(teams_of(at), 1u, SPLIT);
    let crew = select(team_of(at), 0u, SPLIT);
    let threads = select(lanes_of(at), WORKGROUP, SPLIT);
    let own = select(lane_of(at), at.thread, SPLIT);
    var scale: f32;
    for (var start = 0u; start < select(BLOCK, 1u, is_gate); start += 4u * crews) {
        let e = block * BLOCK + start + 4u * crew;
        let experts = min(vec4(e, e + 1u, e + 2u, e + 3u), vec4(last));
        var sums = vec4(0.0);
        var squares = 0.0;
        for (var i = own; i < (p.hidden + 7u) / 8u; i += threads) {
            let v = x_eight(row, i);
            let weight = norm_eight(i);
            let low = v.low * weight.low;
            let high = v.high * weight.high;
            squares += dot(v.low, v.low) + dot(v.high, v.high);
            if is_gate {
                for (var c = 0u; c < 4u; c++) {
                    sums.x += low[c] * gate_element(min(8u * i + c, p.hidden - 1u));
                    sums.x += high[c] * gate_element(min(8u * i + c + 4u, p.hidden - 1u));
                }
            } else {
                let w_0 = router_eight(experts.x, i);
                let w_1 = router_eight(experts.y, i);
                let w_2 = router_eight(experts.z, i);
                let w_3 = router_eight(experts.w, i);
                sums += low * mat4x4(w_0.low, w_1.low, w_2.low, w_3.low);
                sums += high * mat4x4(w_0.high, w_1.high, w_2.high, w_3.high);
            }
        }
        let totals = crew_totals(at, sums, squares);
        scale = inverseSqrt(totals.squares / f32(p.hidden) + p.eps);
        if is_gate {
            if at.thread == 0u {
                gates[p.gates_at + n] = 1.0 / (1.0 + exp(-totals.sums.x * scale));
            }
        } else if own < 4u && start + 4u * crew + own < BLOCK && e + own <= last {
            scores[n * EXPERTS + e + own] = totals.sums[own] * scale;
        }
    }
    for (var i = block * WORKGROUP + at.thread; i < p.hidden; i += blocks * WORKGROUP) {
        normed[p.normed_at + n * p.hidden + i] = x_element(row + i) * scale * norm_element(i);
    }
}
