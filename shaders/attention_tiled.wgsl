// attention for many rows: what attention.wgsl computes, over the same cache.
//
// A workgroup owns QUERIES queries. Neighbouring rows of one sequence are taken together and all others see nothing meanwhile, so that a
// tile of one sequence, the usual one, is one walk. It takes TOKENS tokens at a time: scores are the product of a tile of queries and one
// of keys, DEPTH dimensions at a time through workgroup memory; four threads a query turn them into weights, with a running maximum and
// sum; results are the product of weights and values, VALUES tokens at a time. Of each product a thread has four queries times four
// tokens, or times every 16th vec4 of a result: sums are named and never indexed by a variable, so that they stay in registers. In
// workgroup memory a vec4 is four queries, four keys or four dimensions of a value; the vec4s of a row are swapped so that threads that
// store different rows use different banks. Bound by f32 multiply-adds and the reads of workgroup memory.

// A power of two, and at least 4; they fit `stage`, and have a thread for each eight dimensions.
override VALUES: u32 = 8u;

const QUERIES: u32 = 32u;
const TOKENS: u32 = 64u;
const DEPTH: u32 = 16u;

// vec4s of a head: of queries and results.
override HEAD_VECS: u32 = HEAD_DIM / 4u;
// vec4s of queries in `stage`; keys lie behind them.
const KEYS_AT: u32 = DEPTH * QUERIES / 4u;

// Queries and keys [DEPTH][QUERIES or TOKENS], or values [VALUES][HEAD_DIM].
var<workgroup> stage: array<vec4<f32>, DEPTH * (QUERIES + TOKENS) / 4u>;
// Scores, then weights: [TOKENS][QUERIES].
var<workgroup> scores: array<vec4<f32>, TOKENS * QUERIES / 4u>;
// Of each query: the largest score that each of four threads found, and at the end their sums.
var<workgroup> parts: array<f32, 4u * QUERIES>;
// What results so far are multiplied with.
var<workgroup> shrinks: array<vec4<f32>, QUERIES / 4u>;

// Columns are results of four queries, for dimensions 64 apart.
struct Results {
    a: mat4x4<f32>,
    b: mat4x4<f32>,
    c: mat4x4<f32>,
    d: mat4x4<f32>,
}

// Whether a head has a vec4 that a thread of a product owns: all that are asked for, where they are a multiple of 16.
fn has(i: u32) -> bool {
    return HEAD_VECS % 16u == 0u || i < HEAD_VECS;
}

// Column i: component i of `v` times `w`.
fn outer(v: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(v.x * w, v.y * w, v.z * w, v.w * w);
}

fn scaled(m: mat4x4<f32>, by: vec4<f32>) -> mat4x4<f32> {
    return mat4x4(m[0] * by.x, m[1] * by.y, m[2] * by.z, m[3] * by.w);
}

// Dimensions 4 i .. 4 i + 4 of a query, times what makes its scores powers of two.
fn query_four(at: u32, inside: bool, i: u32) -> vec4<f32> {
    if !inside || i >= HEAD_VECS {
        return vec4(0.0);
    }
    return q[at + i] * (p.scale * LOG2_E);
}

// The same of a key.
fn key_four(sequence: u32, token: u32, kv_head: u32, inside: bool, i: u32) -> vec4<f32> {
    if !inside || i >= HEAD_VECS {
        return vec4(0.0);
    }
    let row = cache_row(sequence, token, kv_head);
    if KV_BF16 {
        return decode_half(BF16, kv[p.kv_at + row * (HEAD_DIM / 8u) + i / 2u], (i & 1u) == 1u);
    }
    return bitcast<vec4<f32>>(kv[p.kv_at + row * HEAD_VECS + i]);
}

// Dimensions 8 i .. 8 i + 8 of a value.
fn value_eight(sequence: u32, token: u32, kv_head: u32, inside: bool, i: u32) -> Eight {
    if !inside {
        return Eight(vec4(0.0), vec4(0.0));
    }
    let row = cache_row(sequence, token, kv_head) + p.n_kv_heads * PAGE_TOKENS;
    if KV_BF16 {
        let v = kv[p.kv_at + row * (HEAD_DIM / 8u) + i];
        return Eight(decode_half(BF16, v, false), decode_half(BF16, v, true));
    }
    let at = p.kv_at + row * HEAD_VECS + 2u * i;
    return Eight(bitcast<vec4<f32>>(kv[at]), bitcast<vec4<f32>>(kv[at + 1u]));
}

// Puts a vec4 of dimensions at rows `row` .. `row + 4` of a tile with so many vec4s a row.
fn put(base: u32, width: u32, row: u32, column: u32, v: vec4<f32>) {
    let at = base + row * width + ((column / 4u) ^ (row / 2u));
    stage[at][column % 4u] = v.x;
    stage[at + width][column % 4u] = v.y;
    stage[at + 2u * width][column % 4u] = v.z;
    stage[at + 3u * width][column % 4u] = v.w;
}

// Of a token and a vec4 of queries.
fn score_at(token: u32, queries: u32) -> u32 {
    return token * (QUERIES / 4u) + (queries ^ (token / 4u % 8u));
}

// Writes a vec4 of a query's result.
fn finish_four(query: vec2<u32>, i: u32, result: vec4<f32>) {
    if !has(i) {
        return;
    }
    var y = result;
    if GATED {
        y *= gates(query.x, query.y, 4u * i);
    }
    let at = p.out_at + (query.x * p.n_heads + query.y) * HEAD_DIM + 4u * i;
    out[at] = y.x;
    out[at + 1u] = y.y;
    out[at + 2u] = y.z;
    out[at + 3u] = y.w;
}

// Writes a thread's part of the result of a query, over the sum of its weights.
fn finish(i: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, column: u32, query: vec2<u32>) {
    if query.x >= p.n_rows {
        return;
    }
    let sum = parts[i] + parts[i + QUERIES] + parts[i + 2u * QUERIES] + parts[i + 3u * QUERIES];
    let by = select(0.0, 1.0 / sum, sum > 0.0);
    finish_four(query, column, a * by);
    if HEAD_VECS > 16u { finish_four(query, column + 16u, b * by); }
    if HEAD_VECS > 32u { finish_four(query, column + 32u, c * by); }
    if HEAD_VECS > 48u { finish_four(query, column + 48u, d * by); }
}

// Adds the value at `at` in `stage`, times four weights.
fn add(results: ptr<function, Results>, weights: vec4<f32>, at: u32, column: u32) {
    if has(column) {
        (*results).a += outer(weights, stage[at]);
    }
    if HEAD_VECS > 16u && has(column + 16u) {
        (*results).b += outer(weights, stage[at + 16u]);
    }
    if HEAD_VECS > 32u && has(column + 32u) {
        (*results).c += outer(weights, stage[at + 32u]);
    }
    if HEAD_VECS > 48u && has(column + 48u) {
        (*results).d += outer(weights, stage[at + 48u]);
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let owned = query_tile(workgroup, workgroups);
    if owned.first_row >= p.n_rows {
        return;
    }
    let kv_head = owned.kv_head;

    // Of products: a thread's vec4 of queries, and its vec4 of tokens or first one of a result.
    let own = thread / 16u;
    let column = thread % 16u;
    // Of loads: a query and two tokens, and a quarter of DEPTH dimensions.
    let loaded = thread / 4u;
    let quarter = thread % 4u;
    let query = query_of(owned, loaded);
    let has_query = query.x < p.n_rows;
    let query_at = p.q_at / 4u + (query.x * p.n_heads + query.y) * HEAD_VECS;
    // Of values: a token, and eight dimensions.
    let value = thread / (HEAD_DIM / 8u);
    let eighth = thread % (HEAD_DIM / 8u);
    // Of weights: a query, and a quarter of the tokens.
    let weighed = thread % QUERIES;
    let part = thread / QUERIES;
    let weighed_row = query_of(owned, weighed).x;

    var results: Results;
    var peak = LOWEST;
    var sum = 0.0;
    var next_row = owned.first_row;
    while next_row < owned.end_row {
        let run = run_from(next_row, owned.end_row);
        next_row = run.end_row;
        if run.sequence < 0 {
            continue;
        }
        let sequence = u32(run.sequence);
        let n_tokens = run.n_tokens;
        let length = seen_by(weighed_row, run);
        for (var first = 0u; first < n_tokens; first += TOKENS) {
            // Scores: columns are tokens.
            var products: mat4x4<f32>;
            let keys = vec2(first + loaded, first + loaded + 32u);
            var query_next = query_four(query_at, has_query, quarter);
            var low_next = key_four(sequence, keys.x, kv_head, keys.x < n_tokens, quarter);
            var high_next = key_four(sequence, keys.y, kv_head, keys.y < n_tokens, quarter);
            for (var i = 0u; i < HEAD_VECS; i += DEPTH / 4u) {
                workgroupBarrier();
                put(0u, QUERIES / 4u, 4u * quarter, loaded, query_next);
                put(KEYS_AT, TOKENS / 4u, 4u * quarter, loaded, low_next);
                put(KEYS_AT, TOKENS / 4u, 4u * quarter, loaded + 32u, high_next);
                workgroupBarrier();
                let next = i + DEPTH / 4u + quarter;
                query_next = query_four(query_at, has_query, next);
                low_next = key_four(sequence, keys.x, kv_head, keys.x < n_tokens, next);
                high_next = key_four(sequence, keys.y, kv_head, keys.y < n_tokens, next);
                for (var d = 0u; d < DEPTH; d += 4u) {
                    let queries_at = d * (QUERIES / 4u) + (own ^ (d / 2u));
                    let keys_at = KEYS_AT + d * (TOKENS / 4u) + (column ^ (d / 2u));
                    products += outer(stage[keys_at], stage[queries_at]);
                    products += outer(stage[keys_at + TOKENS / 4u], stage[queries_at + QUERIES / 4u]);
                    products += outer(stage[keys_at + 2u * (TOKENS / 4u)], stage[queries_at + 2u * (QUERIES / 4u)]);
                    products += outer(stage[keys_at + 3u * (TOKENS / 4u)], stage[queries_at + 3u * (QUERIES / 4u)]);
                }
            }
            scores[score_at(4u * column, own)] = products[0];
            scores[score_at(4u * column + 1u, own)] = products[1];
            scores[score_at(4u * column + 2u, own)] = products[2];
            scores[score_at(4u * column + 3u, own)] = products[3];
            var value_next = value_eight(sequence, first + value, kv_head, value < VALUES && first + value < n_tokens, eighth);
            workgroupBarrier();
            // Weights.
            let first_token = part * (TOKENS / 4u);
            let n_seen = min(max(length, first + first_token) - first - first_token, TOKENS / 4u);
            var most = LOWEST;
            for (var t = first_token; t < first_token + n_seen; t++) {
                most = max(most, scores[score_at(t, weighed / 4u)][weighed % 4u]);
            }
            parts[thread] = most;
            workgroupBarrier();
            most = max(max(parts[weighed], parts[weighed + QUERIES]), max(parts[weighed + 2u * QUERIES], parts[weighed + 3u * QUERIES]));
            most = max(most, peak);
            let shrink = exp2(peak - most);
            peak = most;
            sum *= shrink;
            for (var i = 0u; i < TOKENS / 4u; i++) {
                let at = score_at(first_token + i, weighed / 4u);
                var weight = 0.0;
                if i < n_seen {
                    weight = exp2(scores[at][weighed % 4u] - most);
                }
                scores[at][weighed % 4u] = weight;
                sum += weight;
            }
            if part == 0u {
                shrinks[weighed / 4u][weighed % 4u] = shrink;
            }
            // Results.
            for (var token = 0u; token < min(TOKENS, n_tokens - first); token += VALUES) {
                workgroupBarrier();
                if value < VALUES {
                    stage[value * HEAD_VECS + 2u * eighth] = value_next.low;
                    stage[value * HEAD_VECS + 2u * eighth + 1u] = value_next.high;
                }
                workgroupBarrier();
                let next = first + token + VALUES + value;
                value_next = value_eight(sequence, next, kv_head, value < VALUES && next < n_tokens, eighth);
                if token == 0u {
                    let by = shrinks[own];
                    results.a = scaled(results.a, by);
                    if HEAD_VECS > 16u { results.b = scaled(results.b, by); }
                    if HEAD_VECS > 32u { results.c = scaled(results.c, by); }
                    if HEAD_VECS > 48u { results.d = scaled(results.d, by); }
                }
                for (var t = 0u; t < VALUES; t += 4u) {
                    let weights = score_at(token + t, own);
                    let values = t * HEAD_VECS + column;
                    add(&results, scores[weights], values, column);
                    add(&results, scores[weights + QUERIES / 4u], values + HEAD_VECS, column);
                    add(&results, scores[weights + 2u * (QUERIES / 4u)], values + 2u * HEAD_VECS, column);
                    add(&results, scores[weights + 3u * (QUERIES / 4u)], values + 3u * HEAD_VECS, column);
                }
            }
        }
    }
    workgroupBarrier();
    parts[thread] = sum;
    workgroupBarrier();
    let at = 4u * own;
    finish(at, results.a[0], results.b[0], results.c[0], results.d[0], column, query_of(owned, at));
    finish(at + 1u, results.a[1], results.b[1], results.c[1], results.d[1], column, query_of(owned, at + 1u));
    finish(at + 2u, results.a[2], results.b[2], results.c[2], results.d[2], column, query_of(owned, at + 2u));
    finish(at + 3u, results.a[3], results.b[3], results.c[3], results.d[3], column, query_of(owned, at + 3u));
}
