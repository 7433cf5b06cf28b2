//! A trace replayed in virtual time: the real planner answers, and a machine whose rates may differ from the planner's
//! takes the seconds that the cost model gives for them. The same input gives the same outcome.

use std::collections::BTreeSet;

use freetoken_backend::RouteReply;

use super::{
    cache::{ExpertCache, Policy},
    cost::{ExpertCost, FromDisk, Misses, Rates},
    plan::{PlanError, Planned, Planner, PlannerOptions},
    trace::Trace,
};

/// The machine as it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// What the planner should have measured.
    pub rates: Rates,
    /// Seconds of a layer's other work, before its route point.
    pub dense_seconds: f64,
    /// Seconds of a step outside of its layers.
    pub step_seconds: f64,
}

/// What a replay took.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Outcome {
    /// Steps.
    pub n_steps: usize,
    /// Virtual seconds of all steps.
    pub seconds: f64,
    /// Distinct experts of each route point, summed, that were in a slot.
    pub hits: u64,
    /// Brought into a slot.
    pub fetched: u64,
    /// Read in the host bank.
    pub in_place: u64,
    /// Computed by the host.
    pub host: u64,
    /// Bytes over the link.
    pub link_bytes: u64,
    /// Bytes that the host read.
    pub host_bytes: u64,
    /// Seconds that the link was busy.
    pub link_seconds: f64,
    /// Seconds that the host was busy.
    pub host_seconds: f64,
}

impl Outcome {
    /// Share of the distinct experts that were in a slot; 1 if there were none.
    pub fn hit_rate(&self) -> f64 {
        share(self.hits, self.hits + self.fetched + self.in_place + self.host)
    }

    /// Steps a virtual second: tokens a second and sequence.
    pub fn steps_per_second(&self) -> f64 {
        self.n_steps as f64 / self.seconds
    }

    fn add(&mut self, planned: &Planned, expert: ExpertCost) {
        self.hits += planned.n_hits as u64;
        self.fetched += planned.n_fetched as u64;
        self.in_place += planned.n_in_place as u64;
        self.host += planned.n_host as u64;
        self.link_bytes += (planned.n_fetched + planned.n_in_place) as u64 * expert.record_bytes;
        self.host_bytes += planned.n_host as u64 * expert.record_bytes;
        self.link_seconds += planned.split.link_seconds;
        self.host_seconds += planned.split.host_seconds;
    }
}

/// Replays the trace on the machine with its planner; the first `n_warm_up` steps only fill the cache. The program is the
/// one in which the host answers.
///
/// # Errors
/// Those of [`Planner::plan`]. Asserts that trace and planner have the same layers and experts.
pub fn replay(
    machine: &Machine,
    planner: &mut Planner,
    trace: &Trace,
    n_warm_up: usize,
) -> Result<Outcome, PlanError> {
    let routing = trace.routing();
    let PlannerOptions { n_layers, n_experts, expert, .. } = *planner.options();
    assert_eq!((n_layers, n_experts), (routing.n_layers, routing.n_experts), "a planner of the traced model");
    let mut reply = RouteReply::with_capacity(n_experts);
    let mut rows = Vec::with_capacity(n_experts);
    let mut outcome = Outcome::default();
    for step in 0..trace.n_steps() {
        let counts = step >= n_warm_up;
        for layer in 0..n_layers {
            let ids = trace.ids(step, layer);
            reply.clear();
            let planned = planner.plan(layer as u32, ids, &mut reply)?;
            let fetched = reply.fetch.iter().map(|fetch| fetch.from);
            let link = fetched.chain(reply.read_in_place.iter().copied()).map(|from| from.expert);
            rows.clear();
            rows.extend(
                link.chain(reply.host.iter().copied())
                    .map(|e| ids.iter().filter(|&&id| id == e as i32).count() as u32),
            );
            let hits_seconds = machine.rates.hits_seconds(expert, planned.n_hits as f64);
            let disk = FromDisk::default();
            let misses = Misses { expert, rows: &rows, n_worthy: 0, hits_seconds, disk };
            let split = machine.rates.split(&misses, planned.split.n_link);
            planner.observe_link(&planned, split.link_seconds);
            planner.observe_host(&planned, machine.rates.wake_seconds + split.host_seconds);
            if counts {
                outcome.add(&Planned { split, ..planned }, expert);
                outcome.seconds += machine.dense_seconds + split.seconds;
            }
        }
        if counts {
            outcome.n_steps += 1;
            outcome.seconds += machine.step_seconds;
        }
    }
    Ok(outcome)
}

/// Share of the distinct experts of each route point that are in a slot when every miss is fetched, after `n_warm_up`
/// steps.
pub fn hit_rate(trace: &Trace, n_slots: usize, policy: Policy, n_warm_up: usize) -> f64 {
    let routing = trace.routing();
    let mut cache = ExpertCache::new(routing.n_layers, routing.n_experts, n_slots, policy);
    let mut changes = Vec::new();
    let (mut n_hits, mut n_routed) = (0, 0);
    for step in 0..trace.n_steps() {
        for layer in 0..routing.n_layers {
            let routed = || distinct(trace.ids(step, layer));
            let layer = layer as u32;
            let hits = routed().filter(|&expert| cache.touch(layer, expert).is_some()).count();
            for expert in routed() {
                if cache.slot_of(layer, expert).is_none()
                    && cache.admit(layer, expert, &mut changes).is_none()
                {
                    break;
                }
            }
            changes.clear();
            cache.release();
            if step >= n_warm_up {
                n_hits += hits as u64;
                n_routed += routed().count() as u64;
            }
        }
    }
    share(n_hits, n_routed)
}

/// The hit rate that no policy exceeds: the expert that leaves is the one whose next use is farthest away, and what is
/// needed later than all that is there gets no slot (Belady's rule).
pub fn best_hit_rate(trace: &Trace, n_slots: usize, n_warm_up: usize) -> f64 {
    let uses = uses(trace);
    let mut next_use = vec![usize::MAX; uses.len()];
    let mut seen = vec![usize::MAX; trace.routing().n_layers * trace.routing().n_experts];
    for (at, &(_, entry)) in uses.iter().enumerate().rev() {
        next_use[at] = std::mem::replace(&mut seen[entry], at);
    }
    // (next use, entry) of what is in a slot; a next use is the key of an entry.
    let mut cached = BTreeSet::new();
    let (mut n_hits, mut n_routed) = (0, 0);
    for (at, &(step, entry)) in uses.iter().enumerate() {
        let hit = cached.remove(&(at, entry));
        if n_slots > 0 && next_use[at] != usize::MAX {
            cached.insert((next_use[at], entry));
        }
        if cached.len() > n_slots {
            cached.pop_last();
        }
        if step >= n_warm_up {
            n_hits += u64::from(hit);
            n_routed += 1;
        }
    }
    share(n_hits, n_routed)
}

/// (step, entry) of the distinct experts of each route point, in order.
fn uses(trace: &Trace) -> Vec<(usize, usize)> {
    let routing = trace.routing();
    let mut uses = Vec::new();
    for step in 0..trace.n_steps() {
        for layer in 0..routing.n_layers {
            let entry = |expert| layer * routing.n_experts + expert as usize;
            uses.extend(distinct(trace.ids(step, layer)).map(|expert| (step, entry(expert))));
        }
    }
    uses
}

/// The experts that are routed to, each once.
fn distinct(ids: &[i32]) -> impl Iterator<Item = u32> {
    let is_first = |i: usize| ids[i] >= 0 && !ids[..i].contains(&ids[i]);
    (0..ids.len()).filter(move |&i| is_first(i)).map(|i| ids[i] as u32)
}

fn share(n: u64, of: u64) -> f64 {
    if of == 0 { 1.0 } else { n as f64 / of as f64 }
}

#[cfg(test)]
mod tests {
    use crate::moe::{
        plan::{Choices, Mode},
        trace::{Preference, Routing, TraceWriter},
    };

    use super::*;

    /// A quarter of the layers of a Qwen3-30B-A3B.
    const N_LAYERS: usize = 12;
    const N_EXPERTS: usize = 128;
    const EXPERT: ExpertCost = ExpertCost { record_bytes: 9_437_184, flops_per_row: 9_437_184.0 };
    /// Rates of link and host as measured; the other numbers are of the right size.
    const MACHINE: Machine = Machine {
        rates: Rates {
            link_alone: 54e9,
            link_shared: 49.1e9,
            host_alone: 101e9,
            host_shared: 77.6e9,
            device_read: 3e12,
            host_flops: 1e12,
            reply_seconds: 6e-6,
            wake_seconds: 4e-6,
            combine_seconds: 2e-6,
            fetch_seconds: 0.0,
            copy_lane: false,
        },
        dense_seconds: 20e-6,
        step_seconds: 200e-6,
    };
    const MODES: [Mode; 4] = [Mode::Hybrid, Mode::Gpu, Mode::Cpu, Mode::Share(0.388)];

    fn options(n_slots: usize) -> PlannerOptions {
        PlannerOptions {
            n_layers: N_LAYERS,
            n_experts: N_EXPERTS,
            n_slots,
            policy: Policy::Lru,
            expert: EXPERT,
            rates: MACHINE.rates,
            mode: Mode::Hybrid,
            choices: Choices { fetch: true, read_in_place: true, host: true },
            deterministic: false,
        }
    }

    fn trace(preference: Preference, n_rows: usize) -> Trace {
        let routing =
            Routing { model: "synthetic".into(), n_layers: N_LAYERS, n_experts: N_EXPERTS, top_k: 8 };
        Trace::synthetic(routing, 300, n_rows, preference, 1)
    }

    const SKEWED: Preference = Preference::Zipf { exponent: 1.2 };

    /// Slots for this share of the experts.
    fn slots(share: f64) -> usize {
        (share * (N_LAYERS * N_EXPERTS) as f64) as usize
    }

    /// Replays in [`MODES`], each from an empty cache.
    fn outcomes(options: &PlannerOptions, trace: &Trace) -> Vec<Outcome> {
        let outcome = |mode| {
            let mut planner = Planner::new(PlannerOptions { mode, ..*options }).unwrap();
            replay(&MACHINE, &mut planner, trace, 100).unwrap()
        };
        MODES.map(outcome).into()
    }

    /// Steps a second of [`MODES`], and the hit rate of the first, as they were when this was written.
    #[test]
    fn fixed_traces_take_as_long_as_they_did() {
        let cases = [
            (Preference::Uniform, 1, 0.0, [128.31, 57.63, 104.67, 128.31], 0.0),
            (Preference::Uniform, 1, 0.5, [226.11, 106.53, 104.67, 216.95], 0.4972),
            (SKEWED, 1, 0.25, [347.75, 157.86, 104.67, 331.66], 0.7216),
            (SKEWED, 4, 0.25, [114.19, 38.46, 40.32, 110.16], 0.5939),
            (SKEWED, 4, 0.5, [211.63, 85.92, 40.32, 191.83], 0.8038),
        ];
        for (preference, n_rows, share, steps_per_second, hit_rate) in cases {
            let outcomes = outcomes(&options(slots(share)), &trace(preference, n_rows));
            let seen: Vec<f64> = outcomes.iter().map(Outcome::steps_per_second).collect();
            let same = |(a, b): (&f64, &f64)| (a / b - 1.0).abs() < 0.01;
            assert!(
                seen.iter().zip(&steps_per_second).all(same),
                "{preference:?} {n_rows} {share}: {seen:.2?}"
            );
            assert!((outcomes[0].hit_rate() - hit_rate).abs() < 0.005, "{}", outcomes[0].hit_rate());
        }
    }

    #[test]
    fn the_split_beats_either_side_alone() {
        for preference in [Preference::Uniform, SKEWED, Preference::Drifting { exponent: 1.2, swaps: 2 }] {
            for (n_rows, share) in [(1, 0.0), (1, 0.25), (16, 0.25), (4, 0.5)] {
                let outcomes = outcomes(&options(slots(share)), &trace(preference, n_rows));
                let [q_star, gpu, cpu] = [0, 1, 2].map(|mode| outcomes[mode].seconds);
                assert!(
                    q_star <= 1.02 * gpu.min(cpu),
                    "{preference:?} {n_rows} {share}: {q_star} {gpu} {cpu}"
                );
            }
        }
    }

    #[test]
    fn a_wrong_probe_is_corrected_on_the_way() {
        let wrong = Rates { host_alone: 400e9, host_shared: 300e9, ..MACHINE.rates };
        let trace = trace(Preference::Uniform, 1);
        let seconds = |rates, deterministic| {
            let options = PlannerOptions { rates, deterministic, ..options(slots(0.25)) };
            outcomes(&options, &trace)[0].seconds
        };
        let right = seconds(MACHINE.rates, false);
        assert!(seconds(wrong, false) < 1.02 * right);
        assert!(seconds(wrong, true) > 1.1 * right, "placement by counts keeps to the probe");
    }

    #[test]
    fn an_outcome_adds_up() {
        let trace = trace(SKEWED, 2);
        let [hybrid, gpu, cpu, _] = outcomes(&options(slots(0.25)), &trace)[..] else { panic!("four modes") };
        assert_eq!(hybrid, outcomes(&options(slots(0.25)), &trace)[0], "the same input, the same outcome");
        for outcome in [hybrid, gpu, cpu] {
            assert_eq!(outcome.n_steps, 200);
            assert_eq!(outcome.link_bytes, (outcome.fetched + outcome.in_place) * EXPERT.record_bytes);
            assert_eq!(outcome.host_bytes, outcome.host * EXPERT.record_bytes);
            assert!(outcome.link_seconds.max(outcome.host_seconds) < outcome.seconds);
        }
        assert_eq!((gpu.host, cpu.link_bytes, cpu.hit_rate()), (0, 0, 0.0));
        let by_cache = hit_rate(&trace, slots(0.25), Policy::Lru, 100);
        assert!((gpu.hit_rate() - by_cache).abs() < 0.002, "{} {by_cache}", gpu.hit_rate());
    }

    #[test]
    fn hit_rates_grow_with_the_slots_up_to_the_best() {
        let trace = trace(SKEWED, 1);
        for policy in [Policy::Lru, Policy::Lfu { half_life: 8.0 }, Policy::Lfu { half_life: 64.0 }] {
            let mut last = 0.0;
            for share in [0.0, 0.1, 0.25, 0.5, 1.0] {
                let best = best_hit_rate(&trace, slots(share), 100);
                let rate = hit_rate(&trace, slots(share), policy, 100);
                assert!((last..=best).contains(&rate), "{policy:?} {share}: {last} {rate} {best}");
                last = rate;
            }
            assert!(last > 0.98, "all that was ever used is there: {last}");
        }
        assert_eq!(best_hit_rate(&trace, 0, 100), 0.0);
    }

    #[test]
    fn the_best_hit_rate_is_that_of_belady() {
        let routing = Routing { model: "by hand".into(), n_layers: 1, n_experts: 3, top_k: 1 };
        let mut writer = TraceWriter::new(Vec::new(), routing).unwrap();
        [0, 1, 2, 0, 1, 2].iter().for_each(|&id| writer.route(0, &[id]).unwrap());
        let trace = Trace::parse("by hand", &writer.finish().unwrap()).unwrap();
        assert_eq!(best_hit_rate(&trace, 2, 0), 2.0 / 6.0);
        assert_eq!(hit_rate(&trace, 2, Policy::Lru, 0), 0.0);
        assert_eq!(hit_rate(&trace, 3, Policy::Lru, 0), 0.5);
    }
}
