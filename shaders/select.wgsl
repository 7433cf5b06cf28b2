// Finds the n-th largest pair of words of a workgroup, eight bits at a time. Linked in front of an op that gives `n_pairs` and
// `pair`; no two pairs that count are equal.

var<workgroup> counts: array<atomic<u32>, 256>;
// Of 16 digits each.
var<workgroup> sixteens: array<u32, 16>;
// Of the pass: the digit of the pair looked for, and how many of its equals are wanted.
var<workgroup> found: vec3<u32>;
var<workgroup> n_taken: atomic<u32>;

fn at_least(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y >= b.y);
}

// The smallest pair that may be taken so that `n` are, or a smaller one between which and it there is none. All threads of
// the workgroup call it together; afterwards n_taken is 0.
fn select_pair(thread: u32, n: u32) -> vec2<u32> {
    var known = vec2(0u, 0u);
    var mask = vec2(0u, 0u);
    var wanted = n;
    for (var pass_index = 0u; pass_index < 8u; pass_index++) {
        let upper = pass_index < 4u;
        let shift = 24u - 8u * (pass_index % 4u);
        workgroupBarrier();
        for (var i = thread; i < 256u; i += WORKGROUP) {
            atomicStore(&counts[i], 0u);
        }
        workgroupBarrier();
        for (var i = thread; i < n_pairs(); i += WORKGROUP) {
            let own = pair(i);
            if all((own & mask) == known) {
                atomicAdd(&counts[(select(own.y, own.x, upper) >> shift) & 255u], 1u);
            }
        }
        workgroupBarrier();
        if thread < 16u {
            var n = 0u;
            for (var i = 0u; i < 16u; i++) {
                n += atomicLoad(&counts[16u * thread + i]);
            }
            sixteens[thread] = n;
        }
        workgroupBarrier();
        if thread == 0u {
            var before = 0u;
            var sixteen = 15u;
            while sixteen > 0u && before + sixteens[sixteen] < wanted {
                before += sixteens[sixteen];
                sixteen -= 1u;
            }
            var digit = 16u * sixteen + 15u;
            while digit > 16u * sixteen && before + atomicLoad(&counts[digit]) < wanted {
                before += atomicLoad(&counts[digit]);
                digit -= 1u;
            }
            found = vec3(digit, wanted - before, atomicLoad(&counts[digit]));
            atomicStore(&n_taken, 0u);
        }
        let now = workgroupUniformLoad(&found);
        wanted = now.y;
        if upper {
            known.x |= now.x << shift;
            mask.x |= 255u << shift;
        } else {
            known.y |= now.x << shift;
            mask.y |= 255u << shift;
        }
        if now.y == now.z {
            break;
        }
    }
    return known;
}
