// What the kernels of expert_mlp share: their parameters, what they bind beside routes and chunks, and where an expert's record lies.
//
// A record lies in slot `table[layer, expert]` of the pool; or, where the table says `banked`, in the layer's bank at the place of the
// expert. A window of chunks holds chunks of the pool first, then windows of the bank.

struct Params {
    n_routes: u32,
    top_k: u32,
    in_features: u32,
    out_features: u32,
    // First entry of the layer in the table.
    first_entry: u32,
    slots_per_chunk: u32,
    // Slots of the window: first_slot .. first_slot + n_window_slots.
    first_slot: u32,
    n_window_slots: u32,
    // What the table says of an expert that is read from the bank; more than any slot where none is.
    banked: i32,
    banked_per_chunk: u32,
    // Experts of the window, in the bank: first_banked .. first_banked + n_window_banked.
    first_banked: u32,
    n_window_banked: u32,
    // vec4s of a record.
    record_vecs: u32,
    // Of gate or down, from the start of a record: elements, bytes and words.
    weight_start: u32,
    scales_start: u32,
    globals_start: u32,
    // Rows from a gate row to its up row.
    to_up: u32,
    out_at: u32,
    x_at: u32,
    // Of ids; where routes are grouped the number of tiles that there is room for.
    routes_at: u32,
    weights_at: u32,
    table_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> weights: array<f32>;
@group(0) @binding(4) var<storage, read> table: array<i32>;

struct Place {
    // Whether it lies in this window. Others are left to other dispatches, or to the host.
    inside: bool,
    chunk: u32,
    // vec4 of the chunk at which the record starts.
    record: u32,
}

fn place_of(expert: u32) -> Place {
    let slot = table[p.table_at + p.first_entry + expert];
    if slot == p.banked {
        // What lies before the window wraps around and lies behind it.
        let i = expert - p.first_banked;
        let chunk = p.n_window_slots / p.slots_per_chunk + i / p.banked_per_chunk;
        return Place(i < p.n_window_banked, chunk, i % p.banked_per_chunk * p.record_vecs);
    }
    // So does -1.
    let i = u32(slot) - p.first_slot;
    return Place(i < p.n_window_slots, i / p.slots_per_chunk, i % p.slots_per_chunk * p.record_vecs);
}

fn scale_word(chunk: u32, i: u32) -> u32 { return code_word(chunk, i); }
fn global_word(chunk: u32, i: u32) -> u32 { return code_word(chunk, i); }

// The row of an output, of gate or down; those behind the last repeat it, so that every thread loads from where there is something.
fn weight_row(place: Place, output: u32) -> Row {
    let banks = Banks(p.weight_start, p.scales_start, p.globals_start);
    return row_of(place.chunk, place.record, banks, min(output, p.out_features - 1u), p.in_features);
}

// The same of up.
fn up_row(place: Place, output: u32) -> Row {
    let banks = Banks(p.weight_start, p.scales_start, p.globals_start);
    let r = p.to_up + min(output, p.out_features - 1u);
    return row_of(place.chunk, place.record, banks, r, p.in_features);
}
