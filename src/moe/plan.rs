//! The planner: from the ids of a route point to the reply. Each routed expert gets exactly one place: hits stay where
//! they are, the first misses come over the link, the host computes the rest.
//!
//! It owns the mirror of the slot table and the counters, and knows what the device can do only as [`Choices`].

use freetoken_backend::RouteReply;

use super::{
    cache::{ExpertCache, Policy},
    cost::{ExpertCost, Misses, Observed, Rates, Split, StepSeconds},
};

/// Weight of one route point in the means of hits and misses.
const MEAN_WEIGHT: f64 = 1.0 / 256.0;

/// Misses of a layer that are brought into slots behind a step that read them in place.
pub const FETCHED_BEHIND: usize = 1;

/// Where misses are computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// As the cost model says, step program included.
    Auto,
    /// All on the device.
    Gpu,
    /// All on the host.
    Cpu,
    /// Split between both as the cost model says, with the host in every step.
    Hybrid,
    /// This share goes to the device, whatever it takes: the rule that the cost model is compared with.
    Share(f64),
}

impl Mode {
    /// Whether these choices can honour it.
    fn check(self, choices: Choices) -> Result<(), PlanError> {
        let link = choices.fetch || choices.read_in_place;
        match self {
            Mode::Gpu | Mode::Hybrid | Mode::Share(_) if !link => Err(PlanError::NoLink),
            Mode::Cpu | Mode::Hybrid | Mode::Share(_) if !choices.host => Err(PlanError::NoHost),
            Mode::Auto if !link && !choices.host => Err(PlanError::NoLink),
            _ => Ok(()),
        }
    }
}

/// What can be done with a miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choices {
    /// Bring it into a slot.
    pub fetch: bool,
    /// Let the device read the host bank.
    pub read_in_place: bool,
    /// Let the host compute it.
    pub host: bool,
}

/// The two programs of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepKind {
    /// Misses are read where they are; nobody asks the host.
    InPlace,
    /// The host answers at each layer.
    CoExecuted,
}

/// What a planner is made of.
#[derive(Debug, Clone, Copy)]
pub struct PlannerOptions {
    /// MoE layers.
    pub n_layers: usize,
    /// Experts of a layer.
    pub n_experts: usize,
    /// Slots of all layers together.
    pub n_slots: usize,
    /// Which expert leaves.
    pub policy: Policy,
    /// What one expert costs.
    pub expert: ExpertCost,
    /// What the probe measured.
    pub rates: Rates,
    /// Where misses are computed.
    pub mode: Mode,
    /// What the device and the host can do.
    pub choices: Choices,
    /// Placement by counts and the probe's rates alone: no observation changes it.
    pub deterministic: bool,
}

/// What a reply does, and what it should take.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Planned {
    /// Distinct experts that were in a slot.
    pub n_hits: usize,
    /// That are brought into a slot.
    pub n_fetched: usize,
    /// That are read in the host bank.
    pub n_in_place: usize,
    /// That the host computes.
    pub n_host: usize,
    /// Predicted seconds of link, host and route point.
    pub split: Split,
}

/// Sums over all route points; multiplied by the bytes of a record, the counts are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counters {
    /// Route points.
    pub points: u64,
    /// Distinct experts that were in a slot.
    pub hits: u64,
    /// That were brought into a slot.
    pub fetched: u64,
    /// That were read in the host bank.
    pub in_place: u64,
    /// That the host computed.
    pub host: u64,
    /// That were brought into a slot behind a step that read them in place.
    pub behind: u64,
    /// Predicted seconds by which the misses made route points longer.
    pub exposed_seconds: f64,
    /// Predicted seconds of link and host that ran beside something else.
    pub hidden_seconds: f64,
}

impl Counters {
    /// Distinct experts that were in no slot.
    pub fn misses(&self) -> u64 {
        self.fetched + self.in_place + self.host
    }

    /// What was added since.
    pub fn since(&self, before: &Counters) -> Counters {
        Counters {
            points: self.points - before.points,
            hits: self.hits - before.hits,
            fetched: self.fetched - before.fetched,
            in_place: self.in_place - before.in_place,
            host: self.host - before.host,
            behind: self.behind - before.behind,
            exposed_seconds: self.exposed_seconds - before.exposed_seconds,
            hidden_seconds: self.hidden_seconds - before.hidden_seconds,
        }
    }

    /// Both together.
    pub fn plus(&self, other: &Counters) -> Counters {
        Counters {
            points: self.points + other.points,
            hits: self.hits + other.hits,
            fetched: self.fetched + other.fetched,
            in_place: self.in_place + other.in_place,
            host: self.host + other.host,
            behind: self.behind + other.behind,
            exposed_seconds: self.exposed_seconds + other.exposed_seconds,
            hidden_seconds: self.hidden_seconds + other.hidden_seconds,
        }
    }
}

/// Why there is no plan.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// The router named an expert that is not there.
    #[error("layer {layer} routes to expert {id} and has {n_experts}: the checkpoint may be damaged")]
    NotAnExpert {
        /// MoE layer.
        layer: u32,
        /// Expert id.
        id: i32,
        /// Experts of the layer.
        n_experts: usize,
    },
    /// Every expert must lie in a slot at once, and there are too few.
    #[error(
        "layer {layer} needs {needed} experts at once and there are {n_slots} slots: give the experts more device \
         memory, run fewer sequences at once, or let the host compute (--experts auto)"
    )]
    TooFewSlots {
        /// MoE layer.
        layer: u32,
        /// Distinct experts of the route point.
        needed: usize,
        /// Slots of the pool.
        n_slots: usize,
    },
    /// The mode needs the device to reach experts in host memory.
    #[error(
        "this device cannot reach experts outside of its memory: choose --experts cpu, or a model that fits"
    )]
    NoLink,
    /// The mode needs the host to compute experts.
    #[error("the host cannot compute experts of this format: choose --experts gpu, or another format")]
    NoHost,
}

/// Answers route points.
#[derive(Debug)]
pub struct Planner {
    cache: ExpertCache,
    options: PlannerOptions,
    observed: Observed,
    /// Of decode steps, by layer.
    layers: Vec<Counters>,
    /// Of prompts.
    prompts: Counters,
    /// Whether the current step decodes.
    decodes: bool,
    /// Hits and misses of a mean route point of decode, once there was one.
    means: Option<(f64, f64)>,
    /// `[n_experts]`: rows of each expert; zero between two route points.
    rows: Vec<u32>,
    /// Distinct experts of the route point.
    routed: Vec<u32>,
    /// Those of them that have no slot, in the order in which they go over the link.
    misses: Vec<u32>,
    /// Rows of each miss.
    miss_rows: Vec<u32>,
    /// So many of the first misses are worth more than what would leave for them.
    n_worthy: usize,
}

impl Planner {
    /// A planner with an empty cache.
    ///
    /// # Errors
    /// [`PlanError::NoLink`] and [`PlanError::NoHost`] for a mode that these choices cannot honour.
    pub fn new(options: PlannerOptions) -> Result<Self, PlanError> {
        let PlannerOptions { n_layers, n_experts, n_slots, policy, mode, choices, .. } = options;
        assert!(options.rates.is_valid(), "rates are checked where they are read: {:?}", options.rates);
        mode.check(choices)?;
        Ok(Planner {
            cache: ExpertCache::new(n_layers, n_experts, n_slots, policy),
            options,
            observed: Observed::default(),
            layers: vec![Counters::default(); n_layers],
            prompts: Counters::default(),
            decodes: true,
            means: None,
            rows: vec![0; n_experts],
            routed: Vec::with_capacity(n_experts),
            misses: Vec::with_capacity(n_experts),
            miss_rows: Vec::with_capacity(n_experts),
            n_worthy: 0,
        })
    }

    /// Treats misses otherwise from now on.
    ///
    /// # Errors
    /// [`PlanError::NoLink`] and [`PlanError::NoHost`]; the mode is then as it was.
    pub fn set_mode(&mut self, mode: Mode) -> Result<(), PlanError> {
        mode.check(self.options.choices)?;
        self.options.mode = mode;
        Ok(())
    }

    /// The mirror of the slot table.
    pub fn cache(&self) -> &ExpertCache {
        &self.cache
    }

    /// The mirror of the slot table, to fill, clear or resize it between steps.
    pub fn cache_mut(&mut self) -> &mut ExpertCache {
        &mut self.cache
    }

    /// What it was made of.
    pub fn options(&self) -> &PlannerOptions {
        &self.options
    }

    /// Sums of decode steps since the planner was made.
    pub fn counters(&self) -> Counters {
        self.layers.iter().fold(Counters::default(), |sum, layer| sum.plus(layer))
    }

    /// The same of each layer.
    pub fn layer_counters(&self) -> &[Counters] {
        &self.layers
    }

    /// Sums of prompts.
    pub fn prompt_counters(&self) -> &Counters {
        &self.prompts
    }

    /// Says whether the next step decodes: what is expected of one is learnt from decode alone.
    pub fn begin(&mut self, decodes: bool) {
        self.decodes = decodes;
    }

    /// Whether there are slots to fetch into, once their number has changed.
    pub fn set_fetch(&mut self, fetch: bool) {
        self.options.choices.fetch = fetch;
    }

    /// Live corrections of the rates.
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// The rates that the next plan uses.
    pub fn rates(&self) -> Rates {
        self.options.rates.corrected(&self.observed)
    }

    /// Answers the route point of `layer` with `ids` `[n_rows, top_k]` (-1 for padding): fills the empty reply.
    ///
    /// # Errors
    /// [`PlanError::NotAnExpert`] and [`PlanError::TooFewSlots`]; the cache then has the slots that it had.
    pub fn plan(&mut self, layer: u32, ids: &[i32], reply: &mut RouteReply) -> Result<Planned, PlanError> {
        let n_hits = self.sort(layer, ids)?;
        let (choices, n_misses) = (self.options.choices, self.misses.len());
        let room = if choices.fetch { self.cache.n_admissible() } else { 0 };
        let most = if choices.read_in_place { n_misses } else { n_misses.min(room) };
        let least = if choices.host { 0 } else { n_misses };
        if least > most {
            self.cache.release();
            let (needed, n_slots) = (n_hits + n_misses, self.cache.n_slots());
            return Err(PlanError::TooFewSlots { layer, needed, n_slots });
        }
        let (rates, expert) = (self.rates(), self.options.expert);
        let hits_seconds = rates.hits_seconds(expert, n_hits as f64);
        let misses = Misses { expert, rows: &self.miss_rows, n_worthy: self.n_worthy, hits_seconds };
        let split = match self.options.mode {
            Mode::Auto | Mode::Hybrid => rates.q_star(&misses, least..=most),
            Mode::Gpu => rates.split(&misses, most),
            Mode::Cpu => rates.split(&misses, least),
            Mode::Share(share) => {
                rates.split(&misses, ((share * n_misses as f64).round() as usize).clamp(least, most))
            }
        };
        let (link, host) = self.misses.split_at(split.n_link);
        let (fetched, in_place) = link.split_at(link.len().min(room));
        for &expert in fetched {
            let slot = self.cache.admit(layer, expert, &mut reply.table).expect("there is room for it");
            reply.fetch.push((expert, slot));
        }
        reply.read_in_place.extend_from_slice(in_place);
        reply.host.extend_from_slice(host);
        let (n_fetched, n_in_place, n_host) = (fetched.len(), in_place.len(), host.len());
        self.cache.release();
        let planned = Planned { n_hits, n_fetched, n_in_place, n_host, split };
        self.count(layer, &planned, split.seconds - hits_seconds - rates.combine_seconds);
        Ok(planned)
    }

    /// Learns the `ids` of a route point that nobody asked about, because its step read its misses in place: counts the
    /// uses and gives slots to at most `most` of the misses. Fills `table` and `fetch` of the empty reply.
    ///
    /// # Errors
    /// [`PlanError::NotAnExpert`].
    pub fn catch_up(
        &mut self,
        layer: u32,
        ids: &[i32],
        most: usize,
        reply: &mut RouteReply,
    ) -> Result<Planned, PlanError> {
        let n_hits = self.sort(layer, ids)?;
        let n_fetched = self.misses.len().min(self.cache.n_admissible()).min(most);
        for &expert in &self.misses[..n_fetched] {
            let slot = self.cache.admit(layer, expert, &mut reply.table).expect("there is room for it");
            reply.fetch.push((expert, slot));
        }
        self.cache.release();
        let n_in_place = self.misses.len();
        let (rates, expert) = (self.rates(), self.options.expert);
        let link_seconds = n_in_place as f64 * expert.record_bytes as f64 / rates.link_alone;
        let seconds = rates.hits_seconds(expert, n_hits as f64) + link_seconds + rates.combine_seconds;
        let split = Split { n_link: n_in_place, link_seconds, host_seconds: 0.0, seconds };
        let planned = Planned { n_hits, n_fetched: 0, n_in_place, n_host: 0, split };
        self.count(layer, &planned, link_seconds);
        self.layers[layer as usize].behind += n_fetched as u64;
        Ok(planned)
    }

    /// The link took `seconds` for what was planned.
    pub fn observe_link(&mut self, planned: &Planned, seconds: f64) {
        if !self.options.deterministic {
            self.observed.link(planned.split.link_seconds, seconds);
        }
    }

    /// From a route point to the next one of its step `seconds` passed.
    pub fn observe_interval(&mut self, planned: &Planned, seconds: f64) {
        let n_misses = planned.n_fetched + planned.n_in_place + planned.n_host;
        if self.decodes && n_misses > 0 && !self.options.deterministic {
            self.observed.interval(&planned.split, seconds);
        }
    }

    /// The host took `seconds` for what was planned.
    pub fn observe_host(&mut self, planned: &Planned, seconds: f64) {
        if !self.options.deterministic {
            self.observed.host(planned.split.host_seconds, seconds);
        }
    }

    /// What the experts of the next step are expected to take in either program; `None` before the first route point.
    pub fn expected_step(&self) -> Option<StepSeconds> {
        let (n_hits, n_misses) = self.means?;
        let PlannerOptions { expert, n_layers, choices, .. } = self.options;
        let n_behind = if choices.fetch { FETCHED_BEHIND } else { 0 };
        Some(self.rates().expected_step(expert, n_layers, n_hits, n_misses, n_behind))
    }

    /// The program for the next step, of those that mode and device allow.
    pub fn next_step(&self) -> StepKind {
        let in_place = self.options.choices.read_in_place;
        match self.options.mode {
            Mode::Gpu if in_place && !self.options.choices.fetch => StepKind::InPlace,
            Mode::Auto | Mode::Gpu if in_place => match self.expected_step() {
                Some(step) if step.in_place <= step.co_executed => StepKind::InPlace,
                _ => StepKind::CoExecuted,
            },
            _ => StepKind::CoExecuted,
        }
    }

    /// Sorts the routed experts into hits, which it holds, and misses, in order: more rows first, then more worth. Counts
    /// a use of each. Gives the number of hits.
    fn sort(&mut self, layer: u32, ids: &[i32]) -> Result<usize, PlanError> {
        let n_experts = self.options.n_experts;
        if let Some(&id) = ids.iter().find(|&&id| id < -1 || id >= n_experts as i32) {
            return Err(PlanError::NotAnExpert { layer, id, n_experts });
        }
        self.routed.clear();
        self.misses.clear();
        self.miss_rows.clear();
        for expert in ids.iter().filter_map(|&id| u32::try_from(id).ok()) {
            let rows = &mut self.rows[expert as usize];
            *rows += 1;
            if *rows == 1 {
                self.routed.push(expert);
            }
        }
        let (cache, rows) = (&mut self.cache, &mut self.rows);
        self.misses.extend(self.routed.iter().filter(|&&expert| cache.slot_of(layer, expert).is_none()));
        self.misses.sort_unstable_by(|&a, &b| {
            let by_rows = rows[b as usize].cmp(&rows[a as usize]);
            by_rows.then(cache.worth(layer, b).total_cmp(&cache.worth(layer, a))).then(a.cmp(&b))
        });
        self.miss_rows.extend(self.misses.iter().map(|&expert| rows[expert as usize]));
        let least = cache.least_worth();
        self.n_worthy = self.misses.iter().take_while(|&&miss| cache.worth(layer, miss) >= least).count();
        for &expert in &self.routed {
            cache.touch(layer, expert);
            rows[expert as usize] = 0;
        }
        Ok(self.routed.len() - self.misses.len())
    }

    /// Adds what was planned to the sums and means.
    fn count(&mut self, layer: u32, planned: &Planned, exposed_seconds: f64) {
        let counters = if self.decodes { &mut self.layers[layer as usize] } else { &mut self.prompts };
        counters.points += 1;
        counters.hits += planned.n_hits as u64;
        counters.fetched += planned.n_fetched as u64;
        counters.in_place += planned.n_in_place as u64;
        counters.host += planned.n_host as u64;
        let busy = planned.split.link_seconds + planned.split.host_seconds;
        counters.exposed_seconds += exposed_seconds;
        counters.hidden_seconds += (busy - exposed_seconds).max(0.0);
        if !self.decodes {
            return;
        }
        let (hits, misses) =
            (planned.n_hits as f64, (planned.n_fetched + planned.n_in_place + planned.n_host) as f64);
        let (mean_hits, mean_misses) = self.means.get_or_insert((hits, misses));
        *mean_hits += MEAN_WEIGHT * (hits - *mean_hits);
        *mean_misses += MEAN_WEIGHT * (misses - *mean_misses);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::cost::tests::{BOX, Q30},
        *,
    };

    const ALL: Choices = Choices { fetch: true, read_in_place: true, host: true };

    fn options(mode: Mode, choices: Choices, n_slots: usize) -> PlannerOptions {
        PlannerOptions {
            n_layers: 2,
            n_experts: 16,
            n_slots,
            policy: Policy::Lru,
            expert: Q30,
            rates: BOX,
            mode,
            choices,
            deterministic: false,
        }
    }

    fn planned(planner: &mut Planner, layer: u32, ids: &[i32]) -> Result<(Planned, RouteReply), PlanError> {
        let mut reply = RouteReply::with_capacity(16);
        planner.plan(layer, ids, &mut reply).map(|planned| (planned, reply))
    }

    #[test]
    fn more_rows_go_over_the_link_first_and_then_more_worth() {
        let mut planner = Planner::new(options(Mode::Share(0.5), ALL, 0)).unwrap();
        planned(&mut planner, 0, &[7, 9]).unwrap();
        planned(&mut planner, 0, &[9]).unwrap();
        let (split, reply) = planned(&mut planner, 0, &[1, 7, 3, 9, 3, -1]).unwrap();
        assert_eq!((reply.read_in_place, reply.host), (vec![3, 9], vec![7, 1]));
        assert_eq!((split.n_hits, split.n_fetched, split.n_in_place, split.n_host), (0, 0, 2, 2));
    }

    #[test]
    fn a_miss_without_a_slot_takes_the_next_way() {
        let ids = [0, 1, 2, 3];
        let ways = |choices| {
            let mut planner = Planner::new(options(Mode::Gpu, choices, 3)).unwrap();
            planned(&mut planner, 0, &ids).map(|(p, _)| (p.n_fetched, p.n_in_place, p.n_host))
        };
        assert_eq!(ways(ALL), Ok((3, 1, 0)));
        assert_eq!(ways(Choices { read_in_place: false, ..ALL }), Ok((3, 0, 1)));
        assert_eq!(ways(Choices { fetch: false, ..ALL }), Ok((0, 4, 0)));
        let fetch_only = Choices { fetch: true, read_in_place: false, host: false };
        assert_eq!(ways(fetch_only), Err(PlanError::TooFewSlots { layer: 0, needed: 4, n_slots: 3 }));
    }

    #[test]
    fn a_refused_route_point_leaves_the_cache_as_it_was() {
        let choices = Choices { fetch: true, read_in_place: false, host: false };
        let mut planner = Planner::new(options(Mode::Auto, choices, 3)).unwrap();
        planned(&mut planner, 0, &[0, 1, 2]).unwrap();
        let before = planner.cache().table().to_vec();
        assert!(planned(&mut planner, 0, &[0, 3, 4, 5]).is_err());
        for id in [-2, 16] {
            let refused = planned(&mut planner, 1, &[0, id]).map(|(planned, _)| planned);
            assert_eq!(refused, Err(PlanError::NotAnExpert { layer: 1, id, n_experts: 16 }));
        }
        assert_eq!(planner.cache().table(), before);
        assert_eq!(planner.cache().n_admissible(), 3, "nothing is held");
        assert_eq!(planned(&mut planner, 0, &[3, 4, 5]).unwrap().0.n_fetched, 3);
    }

    #[test]
    fn a_mode_that_cannot_be_honoured_is_an_error() {
        let made = |mode, choices| Planner::new(options(mode, choices, 4)).err();
        let host_only = Choices { fetch: false, read_in_place: false, host: true };
        let link_only = Choices { host: false, ..ALL };
        for (mode, on_host, on_link) in [
            (Mode::Auto, None, None),
            (Mode::Gpu, Some(PlanError::NoLink), None),
            (Mode::Cpu, None, Some(PlanError::NoHost)),
            (Mode::Hybrid, Some(PlanError::NoLink), Some(PlanError::NoHost)),
        ] {
            assert_eq!((made(mode, host_only), made(mode, link_only)), (on_host, on_link), "{mode:?}");
        }
    }

    #[test]
    fn observations_move_the_split_unless_placement_is_deterministic() {
        for (deterministic, n_link) in [(false, 8), (true, 3)] {
            let mut planner =
                Planner::new(PlannerOptions { deterministic, ..options(Mode::Auto, ALL, 0) }).unwrap();
            let ids: Vec<i32> = (0..8).collect();
            for _ in 0..100 {
                let (planned, _) = planned(&mut planner, 0, &ids).unwrap();
                planner.observe_link(&planned, planned.split.link_seconds / 2.0);
                planner.observe_host(&planned, planned.split.host_seconds * 2.0);
            }
            assert_eq!(planned(&mut planner, 0, &ids).unwrap().0.split.n_link, n_link);
        }
    }

    #[test]
    fn a_step_that_nobody_asked_about_fills_the_cache() {
        let mut planner = Planner::new(options(Mode::Gpu, ALL, 8)).unwrap();
        let mut reply = RouteReply::with_capacity(16);
        let late = planner.catch_up(1, &[4, 5, 6, 4], 2, &mut reply).unwrap();
        assert_eq!((late.n_hits, late.n_in_place), (0, 3));
        assert_eq!(reply.fetch.iter().map(|&(expert, _)| expert).collect::<Vec<_>>(), [4, 5]);
        assert!(reply.read_in_place.is_empty() && reply.host.is_empty());
        reply.clear();
        assert_eq!(planner.catch_up(1, &[4, 5, 6], 2, &mut reply).unwrap().n_hits, 2);
    }

    #[test]
    fn the_program_follows_the_misses() {
        let rates = Rates { reply_seconds: 63e-6, ..BOX };
        let after_eight_routes = |n_hits: u32| {
            let mut planner = Planner::new(PlannerOptions { rates, ..options(Mode::Auto, ALL, 8) }).unwrap();
            assert_eq!(planner.next_step(), StepKind::CoExecuted, "nothing is known yet");
            let mut changes = Vec::new();
            for expert in 0..n_hits {
                planner.cache_mut().admit(0, expert, &mut changes);
            }
            planner.cache_mut().release();
            planned(&mut planner, 0, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
            planner.next_step()
        };
        assert_eq!(after_eight_routes(0), StepKind::CoExecuted);
        assert_eq!(after_eight_routes(8), StepKind::InPlace);
        let no_slots = Choices { fetch: false, ..ALL };
        assert_eq!(Planner::new(options(Mode::Gpu, no_slots, 0)).unwrap().next_step(), StepKind::InPlace);
        assert_eq!(Planner::new(options(Mode::Gpu, ALL, 8)).unwrap().next_step(), StepKind::CoExecuted);
        assert_eq!(Planner::new(options(Mode::Hybrid, ALL, 8)).unwrap().next_step(), StepKind::CoExecuted);
    }

    #[test]
    fn counters_add_up() {
        let mut planner = Planner::new(options(Mode::Share(0.5), ALL, 2)).unwrap();
        planned(&mut planner, 0, &[0, 1, 2, 3]).unwrap();
        let (last, _) = planned(&mut planner, 0, &[0, 1, 2, 3]).unwrap();
        let counters = planner.counters();
        assert_eq!((counters.points, counters.hits, counters.fetched), (2, 2, 2));
        assert_eq!((counters.in_place, counters.host), (1, 3));
        planned(&mut planner, 1, &[0]).unwrap();
        let [first, second] = planner.layer_counters() else { panic!("there are two layers") };
        assert_eq!((*first, second.points, second.hits + second.misses()), (counters, 1, 1));
        assert_eq!(planner.counters(), first.plus(second));
        assert!(counters.exposed_seconds > 0.0 && counters.hidden_seconds > 0.0);
        assert!(counters.exposed_seconds < 3.0 * last.split.seconds);
    }

    fn mode() -> impl Strategy<Value = Mode> {
        prop_oneof![Just(Mode::Auto), Just(Mode::Gpu), Just(Mode::Cpu), (0.0..1.0f64).prop_map(Mode::Share)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Whatever the mode, the choices and the slots: each routed expert has one place, slots have one owner, and a
        /// device that obeys the replies has the mirror's table.
        #[test]
        fn each_routed_expert_has_one_place(
            mode in mode(),
            choices in any::<(bool, bool, bool)>(),
            n_slots in 0..24usize,
            points in prop::collection::vec(
                (0..2u32, (1..17usize).prop_flat_map(|n_rows| prop::collection::vec(-1..16i32, n_rows * 4))),
                1..30,
            ),
        ) {
            let choices = Choices { fetch: choices.0, read_in_place: choices.1, host: choices.2 };
            let Ok(mut planner) = Planner::new(options(mode, choices, n_slots)) else { return Ok(()) };
            let mut table = vec![-1; 32];
            let mut records = vec![None; n_slots];
            for (layer, ids) in points {
                let before = table.clone();
                let capacity = RouteReply::with_capacity(16).table.capacity();
                let (planned, reply) = match planned(&mut planner, layer, &ids) {
                    Err(PlanError::TooFewSlots { needed, .. }) => {
                        prop_assert!(needed > n_slots || !choices.fetch);
                        prop_assert!(!choices.host && !choices.read_in_place);
                        continue;
                    }
                    planned => planned.unwrap(),
                };
                prop_assert_eq!(reply.table.capacity(), capacity, "a route point allocates nothing");
                for change in &reply.table {
                    table[change.entry as usize] = change.slot;
                }
                for &(expert, slot) in &reply.fetch {
                    prop_assert_eq!(table[(layer * 16 + expert) as usize], slot as i32);
                    records[slot as usize] = Some(layer * 16 + expert);
                }
                prop_assert_eq!(planner.cache().table(), &table[..]);
                for (entry, &slot) in table.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                    prop_assert_eq!(records[slot as usize], Some(entry as u32));
                }
                let mut counts = [0; 4];
                for expert in 0..16u32 {
                    let entry = (layer * 16 + expert) as usize;
                    let fetched = reply.fetch.iter().filter(|(e, _)| *e == expert).count();
                    let places = [
                        usize::from(table[entry] >= 0 && fetched == 0),
                        fetched,
                        reply.read_in_place.iter().filter(|e| **e == expert).count(),
                        reply.host.iter().filter(|e| **e == expert).count(),
                    ];
                    if ids.contains(&(expert as i32)) {
                        prop_assert_eq!(places.iter().sum::<usize>(), 1, "expert {}", expert);
                        prop_assert!(before[entry] < 0 || table[entry] == before[entry], "it stays");
                        counts.iter_mut().zip(places).for_each(|(count, n)| *count += n);
                    } else {
                        prop_assert_eq!(places[1..].iter().sum::<usize>(), 0);
                    }
                }
                prop_assert_eq!(
                    counts,
                    [planned.n_hits, planned.n_fetched, planned.n_in_place, planned.n_host]
                );
                prop_assert!(choices.fetch || planned.n_fetched == 0);
                prop_assert!(choices.read_in_place || planned.n_in_place == 0);
                prop_assert!(choices.host || planned.n_host == 0);
            }
        }
    }
}
