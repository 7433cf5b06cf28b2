//! A route point: its sizes, where the experts of its layer are, and how a reply is settled into a slot for each of them.
//! `bell` asks and answers inside one graph, `staged` between two runs of work.
//!
//! Experts that are read in place need no kernel of their own: the layer's bank, mapped into the device's addresses, lies
//! behind the pool's chunks, so that expert `e` has the slot `n_slots + e` there and the same kernel reads it over the link,
//! each byte once.

pub(crate) mod bell;
pub(crate) mod staged;

use std::{ops::Range, sync::Arc};

use freetoken_backend::{
    ExpertMlp, ExpertMlpParams, ExpertPool, Experts, HostBuffer, LinkSample, RouteAsk, TableRow, View,
};

/// Sections of what host and device share start at a multiple of this many bytes.
const ALIGN: usize = 256;

/// Sizes of a route point, in values.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sizes {
    n_rows: usize,
    top_k: usize,
    hidden: usize,
    /// The layer's place in the slot table.
    row: TableRow,
}

impl Sizes {
    fn of(mlp: &ExpertMlp) -> Self {
        let (pool, layer) = pool_of(mlp);
        Sizes {
            n_rows: mlp.p.n_rows as usize,
            top_k: mlp.p.top_k as usize,
            hidden: mlp.p.hidden as usize,
            row: pool.row(layer),
        }
    }

    fn n_routes(&self) -> usize {
        self.n_rows * self.top_k
    }
}

/// Where arrays of so many 32-bit values lie, one behind the other.
fn sections<const N: usize>(values: [usize; N]) -> [Range<usize>; N] {
    let mut end = 0;
    values.map(|n| {
        let start = end;
        end += (n * 4).next_multiple_of(ALIGN);
        start..start + n * 4
    })
}

fn pool_of(mlp: &ExpertMlp) -> (&Arc<ExpertPool>, u32) {
    match &mlp.experts {
        Experts::Pool { pool, layer } => (pool, *layer),
        Experts::InPlace(_) => unreachable!("checked before a program is recorded"),
    }
}

/// A route point as it was recorded.
struct Point {
    sizes: Sizes,
    layer: u32,
    pool: Arc<ExpertPool>,
    bank: Arc<HostBuffer>,
    /// The experts that have a slot.
    mlp: ExpertMlp,
}

impl Point {
    /// Asserts that the pool has a bank for the layer.
    fn new(mlp: &ExpertMlp) -> Self {
        let (pool, layer) = pool_of(mlp);
        Point {
            sizes: Sizes::of(mlp),
            layer,
            pool: pool.clone(),
            bank: pool.banks.get(layer as usize).expect("a route point has a bank for its layer").clone(),
            mlp: ExpertMlp { p: ExpertMlpParams { in_place: 0, ..mlp.p }, ..mlp.clone() },
        }
    }

    /// The experts to which `table`, i32 `[n_experts]`, gives a slot, or a place in the bank behind the slots.
    fn answered(&self, table: View) -> ExpertMlp {
        let pool = self.pool.behind(table, vec![self.bank.clone()]);
        ExpertMlp { experts: Experts::Pool { pool: Arc::new(pool), layer: 0 }, ..self.mlp.clone() }
    }

    fn ask<'a>(
        &self,
        ids: &'a [u8],
        weights: &'a [u8],
        rows: &'a [u8],
        link: Option<LinkSample>,
    ) -> RouteAsk<'a> {
        RouteAsk {
            layer: self.layer,
            n_rows: self.sizes.n_rows,
            top_k: self.sizes.top_k,
            ids: bytemuck::cast_slice(ids),
            weights: bytemuck::cast_slice(weights),
            rows: bytemuck::cast_slice(rows),
            link,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_follow_each_other() {
        assert_eq!(sections([3, 64, 65]), [0..12, 256..512, 512..772]);
    }
}
