// Teams are subgroups, of any size: sums cost no workgroup memory and no barrier. Linked where the device has subgroups.

override WORKGROUP: u32 = 256u;

struct Invocation {
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) team: u32,
    @builtin(num_subgroups) teams: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) lanes: u32,
}

// One a subgroup: none has fewer than 4 lanes, and no workgroup more than 1,024 threads.
var<workgroup> of_teams: array<f32, 256>;

fn team_of(at: Invocation) -> u32 { return at.team; }
fn teams_of(at: Invocation) -> u32 { return at.teams; }
fn lane_of(at: Invocation) -> u32 { return at.lane; }
fn lanes_of(at: Invocation) -> u32 { return at.lanes; }

// The sums of `v` over the team, for all of it. All threads of the workgroup call it together.
fn team_sum(at: Invocation, v: vec4<f32>) -> vec4<f32> {
    return subgroupAdd(v);
}

// The sum of `v` over the workgroup, for all of it.
fn workgroup_sum(at: Invocation, v: f32) -> f32 {
    let sum = subgroupAdd(v);
    workgroupBarrier();
    if at.lane == 0u {
        of_teams[at.team] = sum;
    }
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < at.teams; i++) {
        total += of_teams[i];
    }
    return total;
}

// The largest `v` of the workgroup, for all of it.
fn workgroup_max(at: Invocation, v: f32) -> f32 {
    let most = subgroupMax(v);
    workgroupBarrier();
    if at.lane == 0u {
        of_teams[at.team] = most;
    }
    workgroupBarrier();
    var total = of_teams[0];
    for (var i = 1u; i < at.teams; i++) {
        total = max(total, of_teams[i]);
    }
    return total;
}
