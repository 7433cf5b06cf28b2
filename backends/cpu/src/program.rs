//! Programs on the CPU: the stages as they are, and route points answered by a call.

use freetoken_backend::{
    Error, ExpertMlp, ExpertPool, Experts, Fetch, NOWHERE, Program, Result, RouteAsk, RouteReply,
    RouteServer, Stage, View,
};

use crate::{
    Cpu,
    experts::at_place,
    fast::{Fast, Scratch},
    memory::{slice, slice_mut},
};

pub(crate) struct CpuProgram {
    cpu: Cpu,
    stages: Vec<Stage>,
    outputs: Vec<(View, Vec<u32>)>,
    reply: RouteReply,
    /// Where the experts of a route point are.
    places: Vec<i32>,
}

impl CpuProgram {
    pub(crate) fn new(cpu: Cpu, stages: &[Stage], outputs: &[View]) -> Self {
        let n_experts = stages.iter().map(|stage| match stage {
            Stage::Route(point) => point.mlp.p.n_experts as usize,
            Stage::Ops(_) => 0,
        });
        let n_experts = n_experts.max().unwrap_or(0);
        CpuProgram {
            reply: RouteReply::with_capacity(n_experts),
            places: vec![NOWHERE; n_experts],
            stages: stages.to_vec(),
            outputs: outputs.iter().map(|view| (view.clone(), vec![0; view.bytes() / 4])).collect(),
            cpu,
        }
    }
}

impl Program for CpuProgram {
    fn replay(&mut self, server: &mut dyn RouteServer) -> Result<()> {
        let CpuProgram { cpu, stages, outputs, reply, places } = self;
        for stage in stages {
            match stage {
                Stage::Ops(ops) => {
                    let mut scratch = cpu.lock();
                    ops.iter().for_each(|op| cpu.0.run(op, &mut scratch));
                }
                Stage::Route(point) => {
                    let ((pool, layer), p) = (pool_of(&point.mlp), &point.mlp.p);
                    let (n_rows, top_k) = (p.n_rows as usize, p.top_k as usize);
                    let ask = RouteAsk {
                        layer,
                        n_rows,
                        top_k,
                        ids: &slice(&point.mlp.ids)[..n_rows * top_k],
                        weights: &slice(&point.mlp.weights)[..n_rows * top_k],
                        rows: &slice(&point.mlp.x)[..n_rows * p.hidden as usize],
                        link: None,
                    };
                    reply.clear();
                    // Not under the lock: the host may be this same CPU.
                    server.answer(&ask, reply)?;
                    let row = pool.row(layer);
                    let places = &mut places[..row.n_experts];
                    places.copy_from_slice(&slice(&pool.table)[row.first_entry..][..row.n_experts]);
                    let settled = reply.settle(&row, ask.ids, places);
                    settled.map_err(|why| Error::StepFailed { layer, why })?;
                    let fast = cpu.0.fast.as_ref().expect("the reference records no route point");
                    let mut scratch = cpu.lock();
                    apply(&point.mlp, reply);
                    compute(fast, &point.mlp, places, &mut scratch);
                    drop(scratch);
                    if !reply.host.is_empty() {
                        server.compute(&ask, &reply.host, slice_mut(&point.mlp.parts))?;
                    }
                }
            }
        }
        for (view, bytes) in outputs {
            bytes.copy_from_slice(slice(view));
        }
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        let mut scratch = self.cpu.lock();
        for stage in &self.stages {
            match stage {
                Stage::Ops(ops) => ops.iter().for_each(|op| self.cpu.0.run(op, &mut scratch)),
                Stage::Route(_) => unreachable!("a program with a route point is replayed"),
            }
        }
        Ok(())
    }

    fn output(&self, i: usize) -> &[u32] {
        &self.outputs[i].1
    }
}

/// The pool of a route point, and its row there.
fn pool_of(mlp: &ExpertMlp) -> (&ExpertPool, u32) {
    match &mlp.experts {
        Experts::Pool { pool, layer } => (pool, *layer),
        Experts::InPlace(_) => unreachable!("checked when the program was recorded"),
    }
}

/// Table changes, then fetches.
fn apply(mlp: &ExpertMlp, reply: &RouteReply) {
    let (pool, layer) = pool_of(mlp);
    let table = slice_mut::<i32>(&pool.table);
    for change in &reply.table {
        table[change.entry as usize] = change.slot;
    }
    for Fetch { from, slot } in &reply.fetch {
        slice_mut::<u8>(&pool.slot(*slot as usize)).copy_from_slice(pool.banked(layer, from.record));
    }
}

/// Everything but what the host computes, at the places that the reply settled.
fn compute(fast: &Fast, mlp: &ExpertMlp, places: &[i32], scratch: &mut Scratch) {
    let (pool, layer) = pool_of(mlp);
    let place = |id: usize| usize::try_from(places[id]).ok();
    let mut ids = std::mem::take(&mut scratch.ids);
    for (id, &routed) in ids.iter_mut().zip(slice::<i32>(&mlp.ids)) {
        *id = if usize::try_from(routed).is_ok_and(|id| place(id).is_some()) { routed } else { -1 };
    }
    let find = |id: usize| Some(at_place(pool, layer, place(id)?));
    fast.expert_mlp(mlp, &ids[..(mlp.p.n_rows * mlp.p.top_k) as usize], &find, scratch);
    scratch.ids = ids;
}
