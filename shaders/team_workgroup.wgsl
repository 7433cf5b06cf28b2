// Teams of 32 threads that meet in workgroup memory. Linked where the device has no subgroups.

override WORKGROUP: u32 = 256u;
const LANES: u32 = 32u;

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
}

var<workgroup> of_threads: array<vec4<f32>, WORKGROUP>;

fn team_of(at: Invocation) -> u32 { return at.thread / LANES; }
fn teams_of(at: Invocation) -> u32 { return WORKGROUP / LANES; }
fn lane_of(at: Invocation) -> u32 { return at.thread % LANES; }
fn lanes_of(at: Invocation) -> u32 { return LANES; }

// The sums of `v` over the team, for all of it. All threads of the workgroup call it together.
fn team_sum(at: Invocation, v: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    of_threads[at.thread] = v;
    workgroupBarrier();
    let first = at.thread / LANES * LANES;
    var total = vec4(0.0);
    for (var i = 0u; i < LANES; i++) {
        total += of_threads[first + i];
    }
    return total;
}

// The sum of `v` over the workgroup, for all of it.
fn workgroup_sum(at: Invocation, v: f32) -> f32 {
    let sum = team_sum(at, vec4(v, 0.0, 0.0, 0.0));
    workgroupBarrier();
    if lane_of(at) == 0u {
        of_threads[team_of(at)] = sum;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < teams_of(at); i++) {
        total += of_threads[i].x;
    }
    return total;
}

// The largest `v` of the workgroup, for all of it.
fn workgroup_max(at: Invocation, v: f32) -> f32 {
    workgroupBarrier();
    of_threads[at.thread].x = v;
    workgroupBarrier();
    for (var width = WORKGROUP / 2u; width > 0u; width /= 2u) {
        if at.thread < width {
            of_threads[at.thread].x = max(of_threads[at.thread].x, of_threads[at.thread + width].x);
        }
        workgroupBarrier();
    }
    return of_threads[0].x;
}
