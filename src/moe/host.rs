//! The host's half of the experts: the same op, on a backend whose memory is host memory, over the host banks.

use std::{collections::HashMap, sync::Arc};

use freetoken_backend::{
    Backend, Banked, Caps, ExpertMlp, ExpertMlpParams, ExpertPool, Experts, Op, Program, Result, RouteAsk,
    Stage, View,
};

use super::ExpertBanks;

/// Computes routes on the host.
pub struct HostExperts {
    backend: Arc<dyn Backend>,
    pool: Arc<ExpertPool>,
    top_k: usize,
    x: View,
    ids: View,
    weights: View,
    parts: View,
    /// Of a layer and a number of rows.
    programs: HashMap<(u32, usize), Box<dyn Program>>,
    masked: Vec<i32>,
    /// `[n_experts]`: the record of what the host computes, or -1.
    records: Vec<i32>,
}

impl HostExperts {
    /// Prepares every layer for every number of rows in `buckets`.
    ///
    /// # Errors
    /// The backend's refusal.
    pub fn new(
        backend: Arc<dyn Backend>,
        banks: &ExpertBanks,
        top_k: usize,
        buckets: &[usize],
    ) -> Result<Self> {
        assert!(backend.caps().reads_host, "the host reads its own memory");
        let record = banks.record().expect("a model with experts").clone();
        let (n_layers, n_experts) = (banks.layers().len(), banks.n_experts());
        let table = backend.alloc(n_layers * n_experts * 4)?.whole();
        backend.write(&table, bytemuck::cast_slice(&vec![-1_i32; n_layers * n_experts]))?;
        let banks = banks.layers().to_vec();
        let most = buckets.iter().copied().max().unwrap_or(1);
        let n_routes = most * top_k;
        let words = |n: usize| Ok(backend.alloc(n * 4)?.whole());
        let mut host = HostExperts {
            top_k,
            x: words(most * record.hidden)?,
            ids: words(n_routes)?,
            weights: words(n_routes)?,
            parts: words(n_routes * record.hidden)?,
            pool: Arc::new(ExpertPool::without_slots(record, n_experts, table, banks)),
            programs: HashMap::new(),
            masked: vec![-1; n_routes],
            records: vec![-1; n_experts],
            backend,
        };
        for layer in 0..n_layers as u32 {
            for &n_rows in buckets {
                let program = host.backend.record(&[Stage::Ops(vec![host.op(layer, n_rows)])], &[])?;
                host.programs.insert((layer, n_rows), program);
            }
        }
        Ok(host)
    }

    /// The processor and how it is used.
    pub fn caps(&self) -> &Caps {
        self.backend.caps()
    }

    /// Routes of a row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    fn op(&self, layer: u32, n_rows: usize) -> Op {
        let record = &self.pool.record;
        ExpertMlp {
            parts: self.parts.clone(),
            x: self.x.clone(),
            ids: self.ids.clone(),
            weights: self.weights.clone(),
            experts: Experts::Pool { pool: self.pool.clone(), layer },
            p: ExpertMlpParams {
                n_rows: n_rows as u32,
                top_k: self.top_k as u32,
                hidden: record.hidden as u32,
                intermediate: record.intermediate as u32,
                n_experts: self.pool.n_experts as u32,
                in_place: 0,
            },
        }
        .into()
    }

    /// Computes the routes whose expert is in `experts`, from its record there, into their rows of `parts` `[n_rows, top_k, hidden]`.
    ///
    /// # Errors
    /// The backend's.
    pub fn compute(&mut self, ask: &RouteAsk<'_>, experts: &[Banked], parts: &mut [f32]) -> Result<()> {
        let (n_routes, hidden) = (ask.n_rows * ask.top_k, self.pool.record.hidden);
        let masked = &mut self.masked[..n_routes];
        self.records.fill(-1);
        experts.iter().for_each(|from| self.records[from.expert as usize] = from.record as i32);
        for (masked, &id) in masked.iter_mut().zip(ask.ids) {
            *masked = if usize::try_from(id).is_ok_and(|id| self.records[id] >= 0) { id } else { -1 };
        }
        // Behind its slots, of which it has none, a pool's records have their numbers.
        self.backend.write(&self.pool.table_row(ask.layer), bytemuck::cast_slice(&self.records))?;
        self.backend.write(&self.x, bytemuck::cast_slice(ask.rows))?;
        self.backend.write(&self.ids, bytemuck::cast_slice(masked))?;
        self.backend.write(&self.weights, bytemuck::cast_slice(ask.weights))?;
        let program = self.programs.get_mut(&(ask.layer, ask.n_rows));
        program.expect("recorded for the rows of every bucket").submit()?;
        for route in (0..n_routes).filter(|&route| self.masked[route] >= 0) {
            let row = self.parts.slice(route * hidden * 4..(route + 1) * hidden * 4);
            let part = &mut parts[route * hidden..(route + 1) * hidden];
            self.backend.read(&row, bytemuck::cast_slice_mut(part))?;
        }
        Ok(())
    }
}
