// Sorts routes by expert: what the tiled experts walk through.
//
// groups: word 0 the number of tiles; then `max_tiles` tiles of three words (expert, first place, routes); then the routes, those
// of an expert side by side. A tile holds at most TILE routes of one expert. One workgroup; routes of an expert may come in
// any order, since each is computed by itself. Bound by latency.

override EXPERTS: u32 = 128u;
override TILE: u32 = 64u;

struct Params {
    n_routes: u32,
    max_tiles: u32,
    ids_at: u32,
}
var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> groups: array<u32>;
@group(0) @binding(1) var<storage, read> ids: array<i32>;

// Of each expert: first its number of routes, then the place of the next one.
var<workgroup> places: array<atomic<u32>, EXPERTS>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var e = thread; e < EXPERTS; e += 256u) {
        atomicStore(&places[e], 0u);
    }
    workgroupBarrier();
    for (var route = thread; route < p.n_routes; route += 256u) {
        let expert = ids[p.ids_at + route];
        if expert >= 0 {
            atomicAdd(&places[expert], 1u);
        }
    }
    workgroupBarrier();
    if thread == 0u {
        var place = 0u;
        var n_tiles = 0u;
        for (var e = 0u; e < EXPERTS; e++) {
            let n = atomicLoad(&places[e]);
            atomicStore(&places[e], place);
            for (var first = 0u; first < n; first += TILE) {
                let at = 1u + 3u * n_tiles;
                groups[at] = e;
                groups[at + 1u] = place + first;
                groups[at + 2u] = min(TILE, n - first);
                n_tiles += 1u;
            }
            place += n;
        }
        groups[0] = n_tiles;
    }
    workgroupBarrier();
    for (var route = thread; route < p.n_routes; route += 256u) {
        let expert = ids[p.ids_at + route];
        if expert >= 0 {
            groups[1u + 3u * p.max_tiles + atomicAdd(&places[expert], 1u)] = route;
        }
    }
}
