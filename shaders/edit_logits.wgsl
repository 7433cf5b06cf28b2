// l = logits[row, id]; l = (l > 0 ? l / repetition : l * repetition) - subtract, for each edit before the first with row -1.
//
// One workgroup walks the list 256 edits at a time and stops behind the end. No two edits name one place.

struct Params {
    vocab: u32,
    capacity: u32,
    logits_at: u32,
    edits_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> logits: array<f32>;
// Four words each: row, id, repetition, subtract.
@group(0) @binding(1) var<storage, read> edits: array<u32>;

var<workgroup> end: atomic<u32>;
var<workgroup> end_seen: u32;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    if thread == 0u {
        atomicStore(&end, p.capacity);
    }
    workgroupBarrier();
    for (var first = 0u; first < p.capacity; first += 256u) {
        let i = first + thread;
        let at = p.edits_at + 4u * i;
        if i < p.capacity && bitcast<i32>(edits[at]) < 0 {
            atomicMin(&end, i);
        }
        workgroupBarrier();
        if thread == 0u {
            end_seen = atomicLoad(&end);
        }
        let n_edits = workgroupUniformLoad(&end_seen);
        if i < n_edits {
            let place = p.logits_at + edits[at] * p.vocab + edits[at + 1u];
            let repetition = bitcast<f32>(edits[at + 2u]);
            let logit = logits[place];
            logits[place] = select(logit * repetition, logit / repetition, logit > 0.0) - bitcast<f32>(edits[at + 3u]);
        }
        if n_edits < first + 256u {
            break;
        }
    }
}
