//! Sampling: from one row of logits to the next token.
//!
//! The order is fixed: penalties edit the logits ([`TokenCounts`]), then temperature, top-k, top-p, min-p, and
//! one draw by inverse CDF in descending order of probability, ties by the lower id. The device applies the
//! edits and hands over the best [`Candidates`] of the row; [`sample`] draws from them when they settle the
//! token, and otherwise asks for the whole row ([`sample_row`]). Both give the same token for the same
//! parameters and position.
//!
//! It knows no device, no model and no tokenizer: numbers and ids in, an id out.

mod penalties;

use std::cmp::Ordering;

pub use penalties::TokenCounts;

use crate::philox;

/// Below this temperature the best token is taken: the other tokens' chances are nil, and `logit /
/// temperature` must stay finite in f32.
const GREEDY_BELOW: f32 = 1e-5;

/// How far the device's f32 log-sum-exp may be off: this much, and this share of the largest magnitude behind
/// it. A draw that an error of that size could change is decided on the whole row.
const LSE_ERROR: f64 = 1e-5;
const LSE_RELATIVE_ERROR: f64 = 1e-6;

/// How many of a row's best tokens [`sample_row`] sorts first, and how much more when these do not settle the
/// draw.
const FIRST_HEAD: usize = 256;
const HEAD_GROWTH: usize = 8;

/// How a sequence picks its next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the best token (greedy).
    pub temperature: f32,
    /// Keeps the `top_k` best tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of best tokens, among those that top-k left, whose share of the mass is at
    /// least `top_p`; 1 keeps all.
    pub top_p: f32,
    /// Keeps the tokens at least `min_p` times as likely as the best one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token in prompt and output; 1 changes
    /// nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it is in the output.
    pub frequency_penalty: f32,
    /// Selects the random numbers; equal seeds draw equally.
    pub seed: u64,
}

/// A sampling parameter outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}, but must be {range}")]
pub struct ParamOutOfRange {
    /// The field of [`SamplingParams`], which is also its name in requests and configuration files.
    pub field: &'static str,
    /// What was given.
    pub value: f32,
    /// What is allowed, in words.
    pub range: &'static str,
}

impl SamplingParams {
    /// The best token at every step, nothing penalised.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
    };

    /// These parameters, once every one of them is a number in its range.
    ///
    /// # Errors
    /// [`ParamOutOfRange`] for the first that is not.
    pub fn validated(self) -> Result<Self, ParamOutOfRange> {
        let above_zero = f32::MIN_POSITIVE;
        let checks = [
            ("temperature", self.temperature, 0.0..=100.0, "from 0 (greedy) to 100"),
            ("top_p", self.top_p, above_zero..=1.0, "above 0 and at most 1 (off)"),
            ("min_p", self.min_p, 0.0..=1.0, "from 0 (off) to 1"),
            ("repetition_penalty", self.repetition_penalty, 0.01..=100.0, "from 0.01 to 100 (1 is off)"),
            ("presence_penalty", self.presence_penalty, -2.0..=2.0, "from -2 to 2 (0 is off)"),
            ("frequency_penalty", self.frequency_penalty, -2.0..=2.0, "from -2 to 2 (0 is off)"),
        ];
        for (field, value, allowed, range) in checks {
            if !allowed.contains(&value) {
                return Err(ParamOutOfRange { field, value, range });
            }
        }
        Ok(self)
    }

    /// Whether the best token is taken without a draw.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW || self.top_k == 1
    }

    /// Whether any penalty is on, so that a sequence needs its [`TokenCounts`].
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// The best tokens of a row of edited logits, as the device hands them over.
#[derive(Clone, Copy, Debug)]
pub struct Candidates<'a> {
    /// `[n]`, by descending logit, ties by ascending id.
    pub ids: &'a [u32],
    /// `[n]`, edited, not divided by the temperature; negative infinity where a grammar forbids the token.
    pub logits: &'a [f32],
    /// Log-sum-exp of `logit / temperature` over the whole row; for a greedy sequence at any temperature,
    /// since it only shows whether the row is finite.
    pub lse: f32,
    /// Whether these are all tokens of the row.
    pub complete: bool,
}

/// What [`sample`] could settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    /// The next token.
    Token(u32),
    /// The candidates do not settle it: call [`sample_row`].
    NeedsWholeRow,
}

/// Why there is no next token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplingError {
    /// A logit is NaN or positive infinity, or every logit is negative infinity.
    #[error(
        "the model's logits are not finite numbers, so no token can be drawn: the checkpoint may be damaged, \
         or its values too large for the precision in use (try --precision f32)"
    )]
    NotFinite,
}

/// The token at `position` of a sequence, if the candidates settle it.
///
/// They do not when the drawn number or a cut lies beyond them, or so close to a border that the rounding of
/// `candidates.lse` could move it across.
///
/// # Errors
/// [`SamplingError::NotFinite`] for a candidate or an `lse` that is NaN or infinite (`-inf` candidates are
/// fine beside a finite one).
pub fn sample(
    candidates: &Candidates<'_>,
    params: &SamplingParams,
    position: u64,
) -> Result<Draw, SamplingError> {
    let Candidates { ids, logits, lse, complete } = *candidates;
    assert_eq!(ids.len(), logits.len(), "each candidate has an id and a logit");
    let best = check_finite(logits)?;
    if !lse.is_finite() {
        return Err(SamplingError::NotFinite);
    }
    if params.is_greedy() {
        return Ok(Draw::Token(ids[0]));
    }
    let (lse, scaled_best) = (f64::from(lse), f64::from(best) / f64::from(params.temperature));
    let error = LSE_ERROR + LSE_RELATIVE_ERROR * lse.abs().max(scaled_best.abs());
    let head = Head {
        entries: ids.iter().copied().zip(logits.iter().copied()),
        row_mass: [(lse - scaled_best - error).exp(), (lse - scaled_best + error).exp()],
        complete,
    };
    Ok(head.draw(best, params, position).map_or(Draw::NeedsWholeRow, Draw::Token))
}

/// The token at `position` of a sequence, from the whole row of edited logits `[vocab_size]`. `scratch` is
/// overwritten; keep it between calls to save its allocation.
///
/// # Errors
/// [`SamplingError::NotFinite`] for NaN or infinity anywhere (`-inf` is fine beside a finite logit).
pub fn sample_row(
    logits: &[f32],
    scratch: &mut Vec<(f32, u32)>,
    params: &SamplingParams,
    position: u64,
) -> Result<u32, SamplingError> {
    let best = check_finite(logits)?;
    scratch.clear();
    // Adding zero turns -0.0 into 0.0, which the total order below would tell apart.
    scratch.extend(logits.iter().zip(0..).map(|(logit, id)| (logit + 0.0, id)));
    if params.is_greedy() {
        let first = scratch.iter().copied().min_by(descending);
        return first.map(|(_, id)| id).ok_or(SamplingError::NotFinite);
    }
    let row_mass = logits.iter().map(|&logit| weight(logit, best, params)).sum();
    let mut n_sorted = FIRST_HEAD;
    loop {
        let complete = n_sorted >= scratch.len();
        if !complete {
            scratch.select_nth_unstable_by(n_sorted, descending);
        }
        let sorted = n_sorted.min(scratch.len());
        scratch[..sorted].sort_unstable_by(descending);
        let entries = scratch[..sorted].iter().map(|&(logit, id)| (id, logit));
        let head = Head { entries, row_mass: [row_mass; 2], complete };
        match head.draw(best, params, position) {
            Some(id) => return Ok(id),
            None => {
                assert!(!complete, "validated parameters settle a complete row: {params:?}");
                n_sorted *= HEAD_GROWTH;
            }
        }
    }
}

/// The largest logit, once none is NaN or positive infinity and one is finite.
fn check_finite(logits: &[f32]) -> Result<f32, SamplingError> {
    let mut best = f32::NEG_INFINITY;
    for &logit in logits {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(SamplingError::NotFinite);
        }
        best = best.max(logit);
    }
    if best.is_finite() { Ok(best) } else { Err(SamplingError::NotFinite) }
}

fn descending(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// How likely a token is at the given temperature, where the best one counts 1.
fn weight(logit: f32, best: f32, params: &SamplingParams) -> f64 {
    ((f64::from(logit) - f64::from(best)) / f64::from(params.temperature)).exp()
}

/// The best tokens of a row, sorted, and what is known of the rest.
struct Head<I> {
    /// Ids and logits by descending logit, ties by ascending id.
    entries: I,
    /// The sum of all weights of the row lies between these two.
    row_mass: [f64; 2],
    /// Whether `entries` is the whole row.
    complete: bool,
}

impl<I: Iterator<Item = (u32, f32)> + Clone> Head<I> {
    /// The drawn token, or `None` if the rest of the row could change it. Never `None` when complete.
    ///
    /// Every filter keeps a prefix of the sorted row, so the kept set is one number.
    fn draw(self, best: f32, params: &SamplingParams, position: u64) -> Option<u32> {
        let weights = self.entries.clone().map(|(_, logit)| weight(logit, best, params));
        let n_known = weights.clone().count();
        let top_k = if params.top_k == 0 { usize::MAX } else { params.top_k as usize };
        let top_k_known = self.complete || n_known >= top_k;
        let min_p = f64::from(params.min_p);

        let kept = weights.clone().take(top_k).take_while(|&weight| weight >= min_p).count();
        let mut n_kept = (self.complete || kept < n_known || kept == top_k).then_some(kept);
        if params.top_p < 1.0 {
            let masses = match (top_k_known, params.top_k) {
                (true, _) => [weights.clone().take(top_k).sum(); 2],
                (false, 0) => self.row_mass,
                (false, _) => return None,
            };
            let [low, high] = masses.map(|mass| {
                let cut = first_above(weights.clone(), |sum| sum >= f64::from(params.top_p) * mass);
                cut.map(|last| last + 1).into_iter().chain(n_kept).min()
            });
            n_kept = if low == high { Some(low?) } else { return None };
        }

        let uniform = philox::uniform(params.seed, position);
        let masses = match n_kept {
            Some(n_kept) => [weights.clone().take(n_kept).sum(); 2],
            None if params.top_k == 0 && params.min_p == 0.0 => self.row_mass,
            None => return None,
        };
        let [low, high] = masses.map(|mass| first_above(weights.clone(), |sum| sum > uniform * mass));
        if low != high {
            return None;
        }
        self.entries.clone().nth(low?).map(|(id, _)| id)
    }
}

/// The first place at which the running sum of `weights` is large enough.
fn first_above(mut weights: impl Iterator<Item = f64>, is_enough: impl Fn(f64) -> bool) -> Option<usize> {
    let mut sum = 0.0;
    weights.position(|weight| {
        sum += weight;
        is_enough(sum)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SAMPLED: SamplingParams = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };

    /// The definition, spelled out on the whole row with probabilities that add up to one.
    fn defined(logits: &[f32], params: &SamplingParams, position: u64) -> u32 {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).expect("no NaN").then(a.cmp(&b)));
        if params.is_greedy() {
            return order[0] as u32;
        }
        let exponentials: Vec<f64> =
            logits.iter().map(|&l| (f64::from(l) / f64::from(params.temperature)).exp()).collect();
        if params.top_k > 0 {
            order.truncate(params.top_k as usize);
        }
        let probabilities = |order: &[usize]| -> Vec<f64> {
            let sum: f64 = order.iter().map(|&id| exponentials[id]).sum();
            order.iter().map(|&id| exponentials[id] / sum).collect()
        };
        let cumulative = |order: &[usize]| -> Vec<f64> {
            let add = |sum: &mut f64, p: f64| {
                *sum += p;
                Some(*sum)
            };
            probabilities(order).into_iter().scan(0.0, add).collect()
        };
        if params.top_p < 1.0 {
            let cut = cumulative(&order).iter().position(|&sum| sum >= f64::from(params.top_p));
            order.truncate(cut.map_or(order.len(), |last| last + 1));
        }
        let likeliest = exponentials[order[0]];
        order.retain(|&id| exponentials[id] >= f64::from(params.min_p) * likeliest);
        let uniform = philox::uniform(params.seed, position);
        let drawn = cumulative(&order).iter().position(|&sum| sum > uniform);
        order[drawn.unwrap_or(order.len() - 1)] as u32
    }

    /// What the device hands over: the best `n` tokens of a row, and the row's log-sum-exp.
    fn best(logits: &[f32], n: usize, params: &SamplingParams) -> (Vec<u32>, Vec<f32>, f32) {
        let mut sorted: Vec<(f32, u32)> = logits.iter().zip(0..).map(|(l, id)| (l + 0.0, id)).collect();
        sorted.sort_by(descending);
        let temperature = if params.is_greedy() { 1.0 } else { f64::from(params.temperature) };
        let lse = logits.iter().map(|&l| (f64::from(l) / temperature).exp()).sum::<f64>().ln();
        let (logits, ids) = sorted.into_iter().take(n).unzip();
        (ids, logits, lse as f32)
    }

    fn sample_best(logits: &[f32], n: usize, params: &SamplingParams, position: u64) -> Draw {
        let (ids, best, lse) = best(logits, n, params);
        let candidates = Candidates { ids: &ids, logits: &best, lse, complete: n >= logits.len() };
        sample(&candidates, params, position).expect("finite logits")
    }

    fn row() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            12 => (-40i8..40).prop_map(|quarters| f32::from(quarters) / 4.0),
            12 => -10.0f32..10.0,
            1 => Just(-0.0),
            1 => Just(f32::NEG_INFINITY),
        ];
        (-10.0f32..10.0, prop::collection::vec(logit, 0..700)).prop_map(|(first, mut rest)| {
            rest.push(first);
            rest
        })
    }

    fn params() -> impl Strategy<Value = SamplingParams> {
        let temperature = prop_oneof![1 => Just(0.0), 9 => 0.05f32..3.0];
        let top_k = prop_oneof![Just(0), 1u32..40, 1u32..1000];
        let top_p = prop_oneof![Just(1.0), 0.01f32..1.0];
        let min_p = prop_oneof![Just(0.0), 0.0f32..=1.0];
        (temperature, top_k, top_p, min_p, any::<u64>()).prop_map(
            |(temperature, top_k, top_p, min_p, seed)| SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                seed,
                ..SamplingParams::GREEDY
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn whole_row_follows_the_definition(logits in row(), params in params(), position: u64) {
            let token = sample_row(&logits, &mut Vec::new(), &params, position).expect("finite logits");
            prop_assert_eq!(token, defined(&logits, &params, position));
        }

        #[test]
        fn candidates_and_whole_row_agree(
            logits in row(), params in params(), position: u64,
            n in prop::sample::select(vec![1usize, 8, 64, 256]), lse_error in -1.0f32..1.0,
        ) {
            let (ids, best, lse) = best(&logits, n, &params);
            let lse = lse + lse_error * LSE_ERROR as f32;
            let candidates = Candidates { ids: &ids, logits: &best, lse, complete: n >= logits.len() };
            let token = sample_row(&logits, &mut Vec::new(), &params, position).expect("finite logits");
            match sample(&candidates, &params, position).expect("finite logits") {
                Draw::Token(drawn) => prop_assert_eq!(drawn, token),
                Draw::NeedsWholeRow => prop_assert!(!candidates.complete && !params.is_greedy()),
            }
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let probabilities = [0.1f32, 0.5, 0.25, 0.15];
        let logits = probabilities.map(f32::ln);
        let mut counts = [0u32; 4];
        for position in 0..20_000 {
            match sample_best(&logits, 4, &SAMPLED, position) {
                Draw::Token(id) => counts[id as usize] += 1,
                Draw::NeedsWholeRow => panic!("the candidates are complete"),
            }
        }
        for (count, probability) in counts.iter().zip(probabilities) {
            assert!((*count as f32 / 20_000.0 - probability).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn the_whole_row_is_read_only_when_the_candidates_do_not_settle_it() {
        let flat = [0.0f32; 1000];
        let needs = |params| sample_best(&flat, 256, &params, 0) == Draw::NeedsWholeRow;
        assert!(!needs(SamplingParams { top_k: 256, top_p: 0.9, ..SAMPLED }));
        assert!(needs(SamplingParams { top_k: 257, ..SAMPLED }));
        assert!(!needs(SamplingParams { top_p: 0.2495, ..SAMPLED }));
        assert!(needs(SamplingParams { top_p: 0.25, ..SAMPLED }), "within the error of the log-sum-exp");
        assert!(needs(SamplingParams { top_p: 0.2575, ..SAMPLED }));
        assert!(needs(SamplingParams { min_p: 0.5, ..SAMPLED }));

        let mut peaked = flat;
        peaked[7] = 10.0;
        let settled = |params: &SamplingParams| {
            (0..100).filter(|&position| sample_best(&peaked, 256, params, position) == Draw::Token(7)).count()
        };
        assert!(settled(&SAMPLED) > 80, "the peak has 0.957 of the mass");
        assert_eq!(settled(&SamplingParams { min_p: 0.5, ..SAMPLED }), 100);
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_the_best() {
        for params in [SamplingParams::GREEDY, SamplingParams { top_k: 1, ..SAMPLED }] {
            let logits = [-1.0, -0.0, 0.0, -0.0];
            assert_eq!(sample_row(&logits, &mut Vec::new(), &params, 0), Ok(1));
            assert_eq!(sample_best(&logits, 2, &params, 0), Draw::Token(1));
        }
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        let infinity = f32::INFINITY;
        let rows: [&[f32]; 4] = [&[0.0, f32::NAN], &[0.0, infinity], &[-infinity, -infinity], &[]];
        for (logits, params) in rows.iter().flat_map(|row| [(row, SAMPLED), (row, SamplingParams::GREEDY)]) {
            let ids: Vec<u32> = (0..).take(logits.len()).collect();
            let candidates = Candidates { ids: &ids, logits, lse: 0.0, complete: true };
            assert_eq!(sample(&candidates, &params, 0), Err(SamplingError::NotFinite), "{logits:?}");
            assert_eq!(
                sample_row(logits, &mut Vec::new(), &params, 0),
                Err(SamplingError::NotFinite),
                "{logits:?}"
            );
        }
        let candidates = Candidates { ids: &[0], logits: &[0.0], lse: f32::NAN, complete: false };
        assert_eq!(sample(&candidates, &SamplingParams::GREEDY, 0), Err(SamplingError::NotFinite));
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        assert_eq!(SAMPLED.validated(), Ok(SAMPLED));
        let bad = [
            (SamplingParams { temperature: f32::NAN, ..SAMPLED }, "temperature is NaN, but must be from 0"),
            (SamplingParams { temperature: 100.5, ..SAMPLED }, "temperature is 100.5"),
            (SamplingParams { top_p: 0.0, ..SAMPLED }, "top_p is 0, but must be above 0"),
            (SamplingParams { min_p: -0.5, ..SAMPLED }, "min_p is -0.5"),
            (SamplingParams { repetition_penalty: f32::INFINITY, ..SAMPLED }, "repetition_penalty is inf"),
            (SamplingParams { presence_penalty: 2.5, ..SAMPLED }, "presence_penalty is 2.5"),
            (SamplingParams { frequency_penalty: -2.5, ..SAMPLED }, "frequency_penalty is -2.5"),
        ];
        for (params, expected) in bad {
            let error = params.validated().expect_err("refused").to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
