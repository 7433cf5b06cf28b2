// What the kernels share that compute attention of many rows: their bindings, the queries that a workgroup owns, and the rows it takes
// together. A kernel says how many QUERIES it owns: the HEADS query heads of a key-value head, or a block of them, of neighbouring rows.

const LOG2_E: f32 = 1.4426950408889634;

@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> kv: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> block_table: array<i32>;
@group(0) @binding(4) var<storage, read> sequences: array<i32>;
@group(0) @binding(5) var<storage, read> positions: array<i32>;
@group(0) @binding(6) var<storage, read> gate: array<f32>;

// The queries that a workgroup owns. Behind the last tile there are no rows.
struct QueryTile {
    kv_head: u32,
    block: u32,
    first_row: u32,
    end_row: u32,
}

// The last rows of a prompt see most and start first.
fn query_tile(workgroup: vec3<u32>, workgroups: vec3<u32>) -> QueryTile {
    let index = workgroup.y * workgroups.x + workgroup.x;
    let n_tiles = (p.n_rows + QUERIES / HEADS - 1u) / (QUERIES / HEADS);
    let from_last = index / p.n_blocks / p.n_kv_heads;
    let tile = select(p.n_rows, n_tiles - 1u - from_last, from_last < n_tiles);
    let first_row = tile * (QUERIES / HEADS);
    let end_row = min(first_row + QUERIES / HEADS, p.n_rows);
    return QueryTile(index / p.n_blocks % p.n_kv_heads, index % p.n_blocks, first_row, end_row);
}

// Row and head of a query; a row behind the last where there is none.
fn query_of(own: QueryTile, i: u32) -> vec2<u32> {
    let group = p.n_heads / p.n_kv_heads;
    let head = own.block * HEADS + i % HEADS;
    let row = own.first_row + i / HEADS;
    let there = i < QUERIES / HEADS * HEADS && head < group && row < p.n_rows;
    return vec2(select(p.n_rows, row, there), own.kv_head * group + head);
}

// Neighbouring rows of one sequence, or of none, and how many tokens they see.
struct Run {
    sequence: i32,
    first_row: u32,
    end_row: u32,
    n_tokens: u32,
}

fn run_from(first_row: u32, end_row: u32) -> Run {
    var run = Run(sequences[p.sequences_at + first_row], first_row, first_row, 0u);
    while run.end_row < end_row && sequences[p.sequences_at + run.end_row] == run.sequence {
        run.n_tokens = max(run.n_tokens, u32(positions[p.positions_at + run.end_row]) + 1u);
        run.end_row += 1u;
    }
    return run;
}

// How many tokens a row sees in a run: none in one that it is no part of.
fn seen_by(row: u32, run: Run) -> u32 {
    if row < run.first_row || row >= run.end_row {
        return 0u;
    }
    return u32(positions[p.positions_at + row]) + 1u;
}
