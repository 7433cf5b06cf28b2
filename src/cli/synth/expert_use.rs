//! How evenly experts are used, counted from routes of random tokens: what a speed with routed experts must be read with.

use anyhow::Result;

use crate::{
    engine::{Engine, Sequence, sampling::SamplingParams},
    philox,
};

/// Tokens whose routes are looked at.
pub(in crate::cli) const N_TOKENS: usize = 256;

/// A token id that only seed and position decide.
pub(in crate::cli) fn random_token(seed: u64, position: u64, vocab: usize) -> u32 {
    (philox::uniform(seed, position) * vocab as f64) as u32
}

/// Expert ids `[N_TOKENS, top_k]` of each layer for random tokens; fewer where the context is shorter.
pub(in crate::cli) fn random_routes(engine: &mut Engine, seed: u64) -> Result<Vec<Vec<i32>>> {
    let (n, vocab) = (N_TOKENS.min(engine.context()), engine.model().sizes().vocab);
    let tokens: Vec<u32> = (0..n as u64).map(|position| random_token(seed, position, vocab)).collect();
    let mut sequence = Sequence::new(&tokens, SamplingParams::GREEDY, n);
    let trace = engine.trace(&mut sequence, n);
    engine.release(&mut sequence);
    Ok(trace?.routes.into_iter().map(|(ids, _)| ids).collect())
}

/// Use of the experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::cli) struct ExpertUse {
    /// Experts that any token chose.
    pub(in crate::cli) n_in_use: usize,
    /// Share of the routes that the most popular quarter of the experts takes.
    pub(in crate::cli) top_quarter: f64,
    /// Of the distribution of routes over experts, in bits: at most the logarithm of their number.
    pub(in crate::cli) entropy: f64,
}

impl ExpertUse {
    /// Counts routes.
    pub(in crate::cli) fn new(ids: &[i32], n_experts: usize) -> Self {
        let mut counts = vec![0_usize; n_experts];
        for id in ids.iter().filter_map(|&id| usize::try_from(id).ok()) {
            counts[id] += 1;
        }
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let n_routes: usize = counts.iter().sum();
        let shares = counts.iter().filter(|count| **count > 0).map(|&count| count as f64 / n_routes as f64);
        ExpertUse {
            n_in_use: shares.clone().count(),
            top_quarter: shares.clone().take(n_experts.div_ceil(4)).sum(),
            entropy: shares.map(|share| -share * share.log2()).sum(),
        }
    }
}

/// Distinct experts that `n_rows` tokens choose together, the mean over consecutive groups of them.
pub(in crate::cli) fn distinct_experts(ids: &[i32], top_k: usize, n_rows: usize) -> f64 {
    let groups = ids.chunks_exact(top_k * n_rows);
    let n_groups = groups.len();
    groups.map(|ids| n_distinct(ids) as f64).sum::<f64>() / n_groups as f64
}

/// Distinct ids of experts; -1 is none.
pub(in crate::cli) fn n_distinct(ids: &[i32]) -> usize {
    let mut ids: Vec<i32> = ids.iter().copied().filter(|id| *id >= 0).collect();
    ids.sort_unstable();
    ids.dedup();
    ids.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn use_is_counted() {
        let even = ExpertUse::new(&[0, 1, 2, 3, 3, 2, 1, 0], 4);
        assert_eq!(even, ExpertUse { n_in_use: 4, top_quarter: 0.25, entropy: 2.0 });
        let one = ExpertUse::new(&[5, 5, -1, 5], 8);
        assert_eq!(one, ExpertUse { n_in_use: 1, top_quarter: 1.0, entropy: 0.0 });
    }

    #[test]
    fn rows_share_experts() {
        let ids = [0, 1, 1, 2, 4, 5, 4, 5];
        assert_eq!(distinct_experts(&ids, 2, 1), 2.0);
        assert_eq!(distinct_experts(&ids, 2, 2), 2.5);
        assert_eq!(distinct_experts(&ids, 2, 4), 5.0);
        assert_eq!(n_distinct(&[-1, 3, -1]), 1);
    }
}
