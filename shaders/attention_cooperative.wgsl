// attention for many rows on cooperative matrices of 16 x 16: what attention_tiled.wgsl computes, over a cache of bf16.
//
// A workgroup owns QUERIES queries, 16 for each of its subgroups of 32 lanes, and walks a run of rows TOKENS tokens at a time. Keys and
// values become halves in workgroup memory; a subgroup multiplies its queries, which it holds, with the keys; two lanes a query turn the
// scores into weights; the subgroup adds weights times values to results, which it holds too. Nobody reaches the elements of a matrix:
// scores, weights, and results when they shrink, pass through workgroup memory. Between two barriers either threads compute, weights of a
// tile and halves of the next keys, or matrices are multiplied, those keys and the values of this tile. Matrices have names instead of
// indices: NVIDIA's compiler keeps them in registers then. Rows in workgroup memory are padded, so that neighbours use other banks. Loads
// have no conditions: what lies behind the last token repeats it, and its weight is 0.
//
// Halves have powers of two. A query's brings its largest element to 2^14, and so does that of the keys of a tile. Values have one that
// all results share: it brings the largest value met to 2^7, and changes, and results with it, when one would reach 2^16. So bf16 keeps
// all its bits down to 2^-24 of the largest key of a tile, or of the largest value met, and misses less than 2^-32 of that below. A query and
// a weight are rounded to eleven bits. A weight is exp(score - reference), the reference being a score that was the largest once: it stays
// until a weight would be more than 2^15, and then results shrink. A weight below 2^-14 of the largest misses 2^-25 of that at most. Bound
// by the cooperative matrices, and by bringing halves and scores to them.

override TOKENS: u32 = 32u;

const SUBGROUPS: u32 = 8u;
const THREADS: u32 = 32u * SUBGROUPS;
const QUERIES: u32 = 16u * SUBGROUPS;
// References start here; what is not seen lies far below.
const FLOOR: f32 = -1.0e38;
// Doublings of the largest weight before a reference moves.
const ROOM: f32 = 15.0;

// vec4s that a row of the cache has, and loads of keys, or values, of a thread.
override VECS: u32 = HEAD_DIM / 8u;
override LOADS: u32 = (TOKENS * VECS + THREADS - 1u) / THREADS;
const MOST_LOADS: u32 = 2u;
// vec4s from a row of keys or values to the next, and of scores or weights.
override STRIDE: u32 = HEAD_DIM / 4u + 2u;
override SCORE_STRIDE: u32 = TOKENS / 4u + 2u;
override VALUES_AT: u32 = TOKENS * STRIDE;

// Keys [TOKENS][HEAD_DIM], and values behind them. The size of each variable is a multiple of 16 bytes: see cooperative_tile.wgsl.
var<workgroup> tile: array<vec4<f16>, 2u * TOKENS * STRIDE>;
// Of each subgroup: scores [16][TOKENS], or 16 dimensions of results; and weights, or 16 dimensions of queries.
var<workgroup> scores: array<vec4<f32>, QUERIES * SCORE_STRIDE>;
var<workgroup> weights: array<vec4<f16>, QUERIES * SCORE_STRIDE>;
// Of each subgroup: bits of the largest key and of the largest value that it loaded, and whether its references moved.
var<workgroup> largest: array<vec4<u32>, SUBGROUPS>;
var<workgroup> moved: array<vec4<u32>, SUBGROUPS>;

alias Query = coop_mat16x16<f16, A>;
alias Sum = coop_mat16x16<f32, C>;

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
}

// Of 16 queries, 16 dimensions each.
struct FourQueries { a: Query, b: Query, c: Query, d: Query }
struct FourResults { a: Sum, b: Sum, c: Sum, d: Sum }

struct Queries { a: FourQueries, b: FourQueries, c: FourQueries, d: FourQueries }
struct Results { a: FourResults, b: FourResults, c: FourResults, d: FourResults }

// Of 16 tokens each.
struct Scores {
    left: Sum,
    right: Sum,
}

struct Weights {
    left: Query,
    right: Query,
}

// What a thread loads: keys of a tile, or values.
struct Loaded {
    vecs: array<vec4<u32>, MOST_LOADS>,
}

// Whether a head has 16 dimensions from 16 i on.
fn has(i: u32) -> bool {
    return HEAD_DIM > 16u * i;
}

// Which vec4 of a tile a load is.
fn load_of(at: Invocation, load: u32) -> u32 {
    return min(at.thread + load * THREADS, TOKENS * VECS - 1u);
}

// What rows of the cache hold of TOKENS tokens from `first` on: those `behind` the keys of the first key-value head.
fn load(at: Invocation, next: ptr<function, Loaded>, sequence: u32, first: u32, n_tokens: u32, behind: u32) {
    for (var i = 0u; i < LOADS; i++) {
        let index = load_of(at, i);
        let row = cache_row(sequence, min(first + index / VECS, n_tokens - 1u), 0u) + behind;
        (*next).vecs[i] = kv[p.kv_at + row * VECS + index % VECS];
    }
}

// Bits of the largest that a thread loaded, as far as its exponent.
fn largest_of(loaded: ptr<function, Loaded>) -> u32 {
    var upper = vec4(0u);
    var lower = vec4(0u);
    for (var i = 0u; i < LOADS; i++) {
        let sizes = (*loaded).vecs[i] & vec4(0x7fff7fffu);
        upper = max(upper, sizes);
        lower = max(lower, sizes << vec4(16u));
    }
    let most = max(upper, lower);
    return max(max(most.x, most.y), max(most.z, most.w));
}

// Shows all threads the largest of what is staged next.
fn publish_largest(at: Invocation, keys: ptr<function, Loaded>, values: ptr<function, Loaded>) {
    let key = subgroupMax(largest_of(keys));
    let value = subgroupMax(largest_of(values));
    if at.lane == 0u {
        largest[at.subgroup] = vec4(key, value, 0u, 0u);
    }
}

// Exponent of the power of two that keys are multiplied with which are staged next.
fn next_key_power(at: Invocation) -> i32 {
    return clamp(14 - exponent_of(subgroupMax(largest[at.lane % SUBGROUPS].x)), -126, 100);
}

fn stage(at: Invocation, loaded: ptr<function, Loaded>, factor: f32, first: u32) {
    for (var i = 0u; i < LOADS; i++) {
        let index = load_of(at, i);
        let to = first + index / VECS * STRIDE + 2u * (index % VECS);
        let eight = (*loaded).vecs[i];
        tile[to] = vec4<f16>(decode_half(BF16, eight, false) * factor);
        tile[to + 1u] = vec4<f16>(decode_half(BF16, eight, true) * factor);
    }
}

// Dimensions 16 i .. 16 i + 16 of a subgroup's queries, of which a lane brings eight of one.
fn query_matrix(at: Invocation, from_vec: u32, factor: f32, i: u32) -> Query {
    let first = 16u * at.subgroup * SCORE_STRIDE;
    let to = first + at.lane / 2u * SCORE_STRIDE + at.lane % 2u * 2u;
    let from_eight = from_vec + 4u * i + at.lane % 2u * 2u;
    weights[to] = vec4<f16>(q[from_eight] * factor);
    weights[to + 1u] = vec4<f16>(q[from_eight + 1u] * factor);
    workgroupBarrier();
    let matrix = coopLoadT<Query>(&weights[first], SCORE_STRIDE);
    workgroupBarrier();
    return matrix;
}

// Dimensions 16 i .. 16 i + 64.
fn load_queries(at: Invocation, from_vec: u32, factor: f32, i: u32) -> FourQueries {
    var four: FourQueries;
    four.a = query_matrix(at, from_vec, factor, i);
    if has(i + 1u) { four.b = query_matrix(at, from_vec, factor, i + 1u); }
    if has(i + 2u) { four.c = query_matrix(at, from_vec, factor, i + 2u); }
    if has(i + 3u) { four.d = query_matrix(at, from_vec, factor, i + 3u); }
    return four;
}

// Adds the products of 16 dimensions of queries and keys.
fn add_key_matrix(sums: ptr<function, Scores>, query: Query, i: u32) {
    (*sums).left = coopMultiplyAdd(query, coopLoad<coop_mat16x16<f16, B>>(&tile[4u * i], STRIDE), (*sums).left);
    if TOKENS > 16u {
        (*sums).right = coopMultiplyAdd(query, coopLoad<coop_mat16x16<f16, B>>(&tile[16u * STRIDE + 4u * i], STRIDE), (*sums).right);
    }
}

fn add_keys(sums: ptr<function, Scores>, queries: FourQueries, i: u32) {
    add_key_matrix(sums, queries.a, i);
    if has(i + 1u) { add_key_matrix(sums, queries.b, i + 1u); }
    if has(i + 2u) { add_key_matrix(sums, queries.c, i + 2u); }
    if has(i + 3u) { add_key_matrix(sums, queries.d, i + 3u); }
}

// Leaves the scores of a subgroup's queries and the keys of the tile in workgroup memory.
fn score(at: Invocation, queries: ptr<function, Queries>) {
    let first = 16u * at.subgroup * SCORE_STRIDE;
    var sums: Scores;
    add_keys(&sums, (*queries).a, 0u);
    if has(4u) { add_keys(&sums, (*queries).b, 4u); }
    if has(8u) { add_keys(&sums, (*queries).c, 8u); }
    if has(12u) { add_keys(&sums, (*queries).d, 12u); }
    coopStoreT(sums.left, &scores[first], SCORE_STRIDE);
    if TOKENS > 16u {
        coopStoreT(sums.right, &scores[first + 4u], SCORE_STRIDE);
    }
}

// A result plus weights times 16 dimensions of values.
fn value_added(result: Sum, by: Weights, i: u32) -> Sum {
    var sum = coopMultiplyAdd(by.left, coopLoadT<coop_mat16x16<f16, B>>(&tile[VALUES_AT + 4u * i], STRIDE), result);
    if TOKENS > 16u {
        sum = coopMultiplyAdd(by.right, coopLoadT<coop_mat16x16<f16, B>>(&tile[VALUES_AT + 16u * STRIDE + 4u * i], STRIDE), sum);
    }
    return sum;
}

fn add_values(results: FourResults, by: Weights, i: u32) -> FourResults {
    var four = results;
    four.a = value_added(four.a, by, i);
    if has(i + 1u) { four.b = value_added(four.b, by, i + 1u); }
    if has(i + 2u) { four.c = value_added(four.c, by, i + 2u); }
    if has(i + 3u) { four.d = value_added(four.d, by, i + 3u); }
    return four;
}

// 16 dimensions of results, those of a lane's query times a factor of its own.
fn shrunk_matrix(at: Invocation, result: Sum, factor: f32) -> Sum {
    let first = 16u * at.subgroup * SCORE_STRIDE;
    let own = first + at.lane / 2u * SCORE_STRIDE + at.lane % 2u * 2u;
    coopStoreT(result, &scores[first], SCORE_STRIDE);
    workgroupBarrier();
    scores[own] *= factor;
    scores[own + 1u] *= factor;
    workgroupBarrier();
    let matrix = coopLoadT<Sum>(&scores[first], SCORE_STRIDE);
    workgroupBarrier();
    return matrix;
}

fn shrunk(at: Invocation, results: FourResults, factor: f32, i: u32) -> FourResults {
    var four = results;
    four.a = shrunk_matrix(at, four.a, factor);
    if has(i + 1u) { four.b = shrunk_matrix(at, four.b, factor); }
    if has(i + 2u) { four.c = shrunk_matrix(at, four.c, factor); }
    if has(i + 3u) { four.d = shrunk_matrix(at, four.d, factor); }
    return four;
}

// Writes 16 dimensions of results.
fn finish_matrix(at: Invocation, result: Sum, query: vec2<u32>, factor: f32, i: u32) {
    let first = 16u * at.subgroup * SCORE_STRIDE;
    coopStoreT(result, &scores[first], SCORE_STRIDE);
    workgroupBarrier();
    if query.x < p.n_rows {
        for (var half = 0u; half < 2u; half++) {
            let column = at.lane % 2u * 2u + half;
            var y = scores[first + at.lane / 2u * SCORE_STRIDE + column] * factor;
            let dimension = 16u * i + 4u * column;
            if GATED {
                y *= gates(query.x, query.y, dimension);
            }
            let to = p.out_at + (query.x * p.n_heads + query.y) * HEAD_DIM + dimension;
            out[to] = y.x;
            out[to + 1u] = y.y;
            out[to + 2u] = y.z;
            out[to + 3u] = y.w;
        }
    }
    workgroupBarrier();
}

fn finish(at: Invocation, results: FourResults, query: vec2<u32>, factor: f32, i: u32) {
    finish_matrix(at, results.a, query, factor, i);
    if has(i + 1u) { finish_matrix(at, results.b, query, factor, i + 1u); }
    if has(i + 2u) { finish_matrix(at, results.c, query, factor, i + 2u); }
    if has(i + 3u) { finish_matrix(at, results.d, query, factor, i + 3u); }
}

@compute @workgroup_size(THREADS)
fn main(at: Invocation) {
    let owned = query_tile(at.workgroup, at.workgroups);

    // A lane's query, and where it finds the scores of it.
    let query = query_of(owned, 16u * at.subgroup + at.lane / 2u);
    let own_vec = (16u * at.subgroup + at.lane / 2u) * SCORE_STRIDE + at.lane % 2u;
    let first_vec = 16u * at.subgroup * SCORE_STRIDE;
    let keys_behind = owned.kv_head * PAGE_TOKENS;
    let values_behind = keys_behind + p.n_kv_heads * PAGE_TOKENS;
    let query_at = select(0u, p.q_at / 4u + (query.x * p.n_heads + query.y) * (HEAD_DIM / 4u), query.x < p.n_rows);
    var most_four = vec4(0.0);
    for (var i = at.lane % 2u; i < HEAD_DIM / 4u; i += 2u) {
        most_four = max(most_four, abs(q[query_at + i]));
    }
    let most_lane = max(max(most_four.x, most_four.y), max(most_four.z, most_four.w));
    let most_query = max(most_lane, subgroupShuffleXor(most_lane, 1u));
    let query_power = clamp(14 - exponent_of(bitcast<u32>(most_query)), -100, 100);
    let query_factor = select(0.0, power_of_two(query_power), query.x < p.n_rows);
    let query_scale = power_of_two(-query_power) * p.scale * LOG2_E;
    var queries: Queries;
    queries.a = load_queries(at, query_at, query_factor, 0u);
    if has(4u) { queries.b = load_queries(at, query_at, query_factor, 4u); }
    if has(8u) { queries.c = load_queries(at, query_at, query_factor, 8u); }
    if has(12u) { queries.d = load_queries(at, query_at, query_factor, 12u); }

    var results: Results;
    var has_results = false;
    var reference = FLOOR;
    var sum = 0.0;
    // Exponent of the value that the power of values was last chosen for, and this power.
    var top = -127;
    var value_power = 100;
    var next_row = owned.first_row;
    while next_row < owned.end_row {
        let run = run_from(next_row, owned.end_row);
        next_row = run.end_row;
        if run.sequence < 0 {
            continue;
        }
        let sequence = u32(run.sequence);
        let n_tokens = run.n_tokens;
        let length = seen_by(query.x, run);
        // Keys are a tile ahead of values: they are multiplied while those of the tile before are added up.
        var keys: Loaded;
        var values: Loaded;
        load(at, &keys, sequence, 0u, n_tokens, keys_behind);
        load(at, &values, sequence, 0u, n_tokens, values_behind);
        publish_largest(at, &keys, &values);
        workgroupBarrier();
        var key_power = next_key_power(at);
        stage(at, &keys, power_of_two(key_power), 0u);
        load(at, &keys, sequence, TOKENS, n_tokens, keys_behind);
        workgroupBarrier();
        score(at, &queries);
        publish_largest(at, &keys, &values);
        for (var first = 0u; first < n_tokens; first += TOKENS) {
            workgroupBarrier();
            // Weights: a lane has every other vec4 of tokens.
            let scale = query_scale * power_of_two(-key_power);
            var own: array<vec4<f32>, 4>;
            for (var i = 0u; i < TOKENS / 8u; i++) {
                own[i] = scores[own_vec + 2u * i] * scale;
            }
            if !subgroupAll(first + TOKENS <= length) {
                let n_seen = max(length, first) - first;
                for (var i = 0u; i < TOKENS / 8u; i++) {
                    let tokens = 8u * i + at.lane % 2u * 4u + vec4(0u, 1u, 2u, 3u);
                    own[i] = select(vec4(LOWEST), own[i], tokens < vec4(n_seen));
                }
            }
            var most = own[0];
            for (var i = 1u; i < TOKENS / 8u; i++) {
                most = max(most, own[i]);
            }
            let most_own = max(max(most.x, most.y), max(most.z, most.w));
            let peak = max(reference, max(most_own, subgroupShuffleXor(most_own, 1u)));
            let value_exponent = exponent_of(subgroupMax(largest[at.lane % SUBGROUPS].y));
            var shrink = 1.0;
            let moves = subgroupAny(peak > reference + ROOM);
            if moves {
                shrink = exp2(reference - peak);
                sum *= shrink;
                reference = peak;
            }
            let grows = value_exponent > top + 8;
            if grows {
                top = value_exponent;
                let old_power = value_power;
                value_power = clamp(7 - top, -126, 100);
                shrink *= exp2(f32(value_power - old_power));
            }
            if at.lane == 0u {
                moved[at.subgroup] = vec4(u32(moves || grows));
            }
            var added = vec4(0.0);
            for (var i = 0u; i < TOKENS / 8u; i++) {
                let weight = exp2(own[i] - reference);
                added += weight;
                weights[own_vec + 2u * i] = vec4<f16>(weight);
            }
            sum += (added.x + added.y) + (added.z + added.w);
            stage(at, &values, power_of_two(value_power), VALUES_AT);
            key_power = next_key_power(at);
            stage(at, &keys, power_of_two(key_power), 0u);
            load(at, &values, sequence, first + TOKENS, n_tokens, values_behind);
            load(at, &keys, sequence, first + 2u * TOKENS, n_tokens, keys_behind);
            workgroupBarrier();

            // A variable, which naga takes for uniform: a vote is not.
            var shrinks = subgroupAny(moved[at.lane % SUBGROUPS].x != 0u);
            if shrinks && has_results {
                results.a = shrunk(at, results.a, shrink, 0u);
                if has(4u) { results.b = shrunk(at, results.b, shrink, 4u); }
                if has(8u) { results.c = shrunk(at, results.c, shrink, 8u); }
                if has(12u) { results.d = shrunk(at, results.d, shrink, 12u); }
            }
            if first + TOKENS < n_tokens {
                score(at, &queries);
                publish_largest(at, &keys, &values);
            }
            has_results = true;
            var by: Weights;
            by.left = coopLoadT<Query>(&weights[first_vec], SCORE_STRIDE);
            if TOKENS > 16u {
                by.right = coopLoadT<Query>(&weights[first_vec + 4u], SCORE_STRIDE);
            }
            results.a = add_values(results.a, by, 0u);
            if has(4u) { results.b = add_values(results.b, by, 4u); }
            if has(8u) { results.c = add_values(results.c, by, 8u); }
            if has(12u) { results.d = add_values(results.d, by, 12u); }
        }
    }
    sum += subgroupShuffleXor(sum, 1u);
    let by = select(0.0, 1.0 / sum, sum > 0.0) * power_of_two(-value_power);
    finish(at, results.a, query, by, 0u);
    if has(4u) { finish(at, results.b, query, by, 4u); }
    if has(8u) { finish(at, results.c, query, by, 8u); }
    if has(12u) { finish(at, results.d, query, by, 12u); }
}
