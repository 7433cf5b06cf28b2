//! The planner: from the ids of a route point to the reply. Each routed expert gets exactly one place: hits stay where
//! they are, the first misses come over the link, the host computes the rest.
//!
//! It owns the mirror of the slot table and the counters, and knows what the device can do only as [`Choices`].

use freetoken_backend::{Banked, Fetch, RouteReply};

use super::{
    cache::{ExpertCache, Policy},
    cost::{ExpertCost, FromDisk, Misses, Observed, Rates, Split, StepSeconds},
    ram::RamCache,
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
    /// Of the misses, those that host memory does not have either.
    pub n_disk: usize,
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
    /// Of the misses, those that host memory did not have either.
    pub disk: u64,
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
            disk: self.disk - before.disk,
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
            disk: self.disk + other.disk,
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
    /// The device alone computes, and host memory does not hold what it needs at once.
    #[error(
        "layer {layer} needs {needed} experts in host memory at once and there is room for {n_records} of it: raise --ram, run \
         fewer sequences at once, or let the host compute (--experts auto)"
    )]
    TooFewRecords {
        /// MoE layer.
        layer: u32,
        /// Distinct experts that are on their way to the device.
        needed: usize,
        /// Records of the layer's bank.
        n_records: usize,
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

/// What a route point wants from the disk.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Reads to begin at once, each into a record that is nobody else's.
    pub reads: Vec<Banked>,
    /// So many of the first ones must be there before the device is answered; the host computes the others as they come.
    pub n_awaited: usize,
    /// Experts that the host computes once a record is let go of, behind all of these.
    pub waiting: Vec<u32>,
}

/// Answers route points.
#[derive(Debug)]
pub struct Planner {
    cache: ExpertCache,
    /// What host memory holds; `None` where that is everything.
    ram: Option<RamCache>,
    /// Bytes a second that come from the disk.
    disk_rate: f64,
    wanted: Wanted,
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
    /// Those of them that have no slot, in the order in which they go over the link; those on the disk last.
    misses: Vec<u32>,
    /// So many of the misses are in host memory.
    n_in_ram: usize,
    /// While misses are sorted: those on the disk.
    on_disk: Vec<u32>,
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
            ram: None,
            disk_rate: f64::MAX,
            wanted: Wanted::default(),
            options,
            observed: Observed::default(),
            layers: vec![Counters::default(); n_layers],
            prompts: Counters::default(),
            decodes: true,
            means: None,
            rows: vec![0; n_experts],
            routed: Vec::with_capacity(n_experts),
            misses: Vec::with_capacity(n_experts),
            n_in_ram: 0,
            on_disk: Vec::with_capacity(n_experts),
            miss_rows: Vec::with_capacity(n_experts),
            n_worthy: 0,
        })
    }

    /// From now on host memory holds some of the experts at a time, and a disk all of them.
    pub fn set_ram(&mut self, ram: RamCache) {
        let n_experts = self.options.n_experts;
        self.wanted = Wanted {
            reads: Vec::with_capacity(n_experts),
            n_awaited: 0,
            waiting: Vec::with_capacity(n_experts),
        };
        self.ram = Some(ram);
    }

    /// What host memory holds; `None` where that is everything.
    pub fn ram(&self) -> Option<&RamCache> {
        self.ram.as_ref()
    }

    /// Both mirrors, of the slots and of host memory.
    pub fn caches_mut(&mut self) -> (&mut ExpertCache, Option<&mut RamCache>) {
        (&mut self.cache, self.ram.as_mut())
    }

    /// What the last route point wants from the disk, and what host memory holds. Asserts that this is not everything.
    pub fn from_disk(&mut self) -> (&Wanted, &mut RamCache) {
        (&self.wanted, self.ram.as_mut().expect("host memory that does not hold every expert"))
    }

    /// Bytes a second that come from the disk, from now on.
    pub fn set_disk_rate(&mut self, rate: f64) {
        if rate.is_finite() && rate > 0.0 && !self.options.deterministic {
            self.disk_rate = rate;
        }
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
    /// Where host memory does not hold every expert, what it lacks is the host's, which computes it as it comes; or the device's,
    /// where that does all. What to read is then in [`Self::from_disk`].
    ///
    /// # Errors
    /// [`PlanError::NotAnExpert`], [`PlanError::TooFewSlots`] and [`PlanError::TooFewRecords`]; the cache then has the slots that it
    /// had.
    pub fn plan(&mut self, layer: u32, ids: &[i32], reply: &mut RouteReply) -> Result<Planned, PlanError> {
        let n_hits = self.sort(layer, ids)?;
        let (choices, n_misses) = (self.options.choices, self.misses.len());
        let n_disk = n_misses - self.n_in_ram;
        // Bytes from the disk go to the host, unless the device does everything.
        let n_split = if choices.host && self.options.mode != Mode::Gpu { self.n_in_ram } else { n_misses };
        let room = if choices.fetch { self.cache.n_admissible() } else { 0 };
        let reached = if choices.read_in_place { n_split } else { n_split.min(room) };
        let records = self.ram.as_ref().map_or(n_misses, |ram| ram.n_records(layer));
        let mut most = reached.min(records);
        if n_disk > 0 && most < n_misses {
            // What the host computes comes through one record at least.
            most = most.min(records - 1);
        }
        let least = if choices.host { 0 } else { n_misses };
        if least > most {
            self.cache.release();
            let (needed, n_slots) = (n_hits + n_misses, self.cache.n_slots());
            return Err(match least > reached {
                true => PlanError::TooFewSlots { layer, needed, n_slots },
                false => PlanError::TooFewRecords { layer, needed: n_misses, n_records: records },
            });
        }
        let (rates, expert) = (self.rates(), self.options.expert);
        let hits_seconds = rates.hits_seconds(expert, n_hits as f64);
        let (rows, host_rows) = self.miss_rows.split_at(n_split);
        let disk_seconds = (n_disk as u64 * expert.record_bytes) as f64 / self.disk_rate;
        let disk = match n_split < n_misses {
            true => FromDisk { host_rows, host_seconds: disk_seconds, link_seconds: 0.0 },
            false => FromDisk { host_rows, host_seconds: 0.0, link_seconds: disk_seconds },
        };
        let misses = Misses { expert, rows, n_worthy: self.n_worthy.min(n_split), hits_seconds, disk };
        let split = match self.options.mode {
            Mode::Auto | Mode::Hybrid => rates.q_star(&misses, least..=most),
            Mode::Gpu => rates.split(&misses, most),
            Mode::Cpu => rates.split(&misses, least),
            Mode::Share(share) => {
                rates.split(&misses, ((share * n_split as f64).round() as usize).clamp(least, most))
            }
        };
        self.want(layer, split.n_link);
        let ram = self.ram.as_ref();
        let banked = |expert: u32| match ram {
            Some(ram) => {
                let record = ram.record_of(layer, expert).expect("what the link brings has a record");
                Banked { expert, record }
            }
            None => Banked::own(expert),
        };
        let (link, host) = self.misses.split_at(split.n_link);
        let (fetched, in_place) = link.split_at(link.len().min(room));
        for &expert in fetched {
            let slot = self.cache.admit(layer, expert, &mut reply.table).expect("there is room for it");
            reply.fetch.push(Fetch { from: banked(expert), slot });
        }
        reply.read_in_place.extend(in_place.iter().map(|&expert| banked(expert)));
        reply.host.extend_from_slice(host);
        let (n_fetched, n_in_place, n_host) = (fetched.len(), in_place.len(), host.len());
        self.cache.release();
        let planned = Planned { n_hits, n_fetched, n_in_place, n_host, n_disk, split };
        self.count(layer, &planned, split.seconds - hits_seconds - rates.combine_seconds);
        Ok(planned)
    }

    /// Finds records for the misses that lie on the disk: all of the first `n_link` misses, and of the others those for which there is
    /// room now.
    fn want(&mut self, layer: u32, n_link: usize) {
        let Wanted { reads, n_awaited, waiting } = &mut self.wanted;
        reads.clear();
        waiting.clear();
        *n_awaited = n_link.saturating_sub(self.n_in_ram);
        let Some(ram) = &mut self.ram else { return };
        for &expert in &self.misses[self.n_in_ram..] {
            match ram.admit(layer, expert) {
                Some(record) => reads.push(Banked { expert, record }),
                None => waiting.push(expert),
            }
        }
        assert!(*n_awaited <= reads.len(), "there is a record for all that the link brings");
    }

    /// Learns the `ids` of a route point that nobody asked about, because its step read its misses in place: counts the
    /// uses and gives slots to at most `most` of the misses. Fills `table` and `fetch` of the empty reply.
    ///
    /// # Errors
    /// [`PlanError::NotAnExpert`]. Asserts that host memory holds every expert.
    pub fn catch_up(
        &mut self,
        layer: u32,
        ids: &[i32],
        most: usize,
        reply: &mut RouteReply,
    ) -> Result<Planned, PlanError> {
        assert!(self.ram.is_none(), "a step reads in place what is in host memory");
        let n_hits = self.sort(layer, ids)?;
        let n_fetched = self.misses.len().min(self.cache.n_admissible()).min(most);
        for &expert in &self.misses[..n_fetched] {
            let slot = self.cache.admit(layer, expert, &mut reply.table).expect("there is room for it");
            reply.fetch.push(Fetch { from: Banked::own(expert), slot });
        }
        self.cache.release();
        let n_in_place = self.misses.len();
        let (rates, expert) = (self.rates(), self.options.expert);
        let link_seconds = n_in_place as f64 * expert.record_bytes as f64 / rates.link_alone;
        let seconds = rates.hits_seconds(expert, n_hits as f64) + link_seconds + rates.combine_seconds;
        let split = Split { n_link: n_in_place, link_seconds, host_seconds: 0.0, seconds };
        let planned = Planned { n_hits, n_in_place, split, ..Planned::default() };
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
        // What a disk takes is explained by no rate of link and host.
        if self.decodes && n_misses > 0 && planned.n_disk == 0 && !self.options.deterministic {
            self.observed.interval(&planned.split, seconds);
        }
    }

    /// The host took `seconds` for what was planned, from the question on: its threads had to wake, which the plan counts by itself.
    pub fn observe_host(&mut self, planned: &Planned, seconds: f64) {
        if !self.options.deterministic {
            let worked = seconds - self.options.rates.wake_seconds;
            self.observed.host(planned.split.host_seconds, worked);
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
        let in_place = self.options.choices.read_in_place && self.ram.is_none();
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
        self.n_in_ram = self.misses.len();
        if let Some(ram) = &mut self.ram {
            ram.begin(layer);
            self.on_disk.clear();
            self.misses.retain(|&expert| {
                let is_there = ram.touch(layer, expert).is_some();
                if !is_there {
                    self.on_disk.push(expert);
                }
                is_there
            });
            self.n_in_ram = self.misses.len();
            self.misses.extend_from_slice(&self.on_disk);
        }
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
        counters.disk += planned.n_disk as u64;
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
        assert_eq!((reply.read_in_place, reply.host), ([3, 9].map(Banked::own).to_vec(), vec![7, 1]));
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
        assert_eq!(reply.fetch.iter().map(|fetch| fetch.from.expert).collect::<Vec<_>>(), [4, 5]);
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

    /// What two layers' banks hold: the expert of each record.
    type Bytes = std::collections::BTreeMap<(u32, u32), u32>;

    /// Does what the reply to a route point and its reads ask for, as the host does; gives every expert that was computed, or why not.
    fn obey(
        planner: &mut Planner,
        layer: u32,
        reply: &RouteReply,
        bytes: &mut Bytes,
    ) -> Result<Vec<u32>, String> {
        let (wanted, ram) = planner.from_disk();
        let link: Vec<Banked> =
            reply.fetch.iter().map(|f| f.from).chain(reply.read_in_place.clone()).collect();
        let on_disk = &wanted.reads[wanted.n_awaited..];
        let n_there = reply.host.len() - on_disk.len() - wanted.waiting.len();
        let (there, rest) = reply.host.split_at(n_there);
        let expected: Vec<u32> =
            on_disk.iter().map(|from| from.expert).chain(wanted.waiting.clone()).collect();
        if rest != expected {
            return Err(format!("the host's {rest:?} are not {expected:?}"));
        }
        let mut kept: Vec<Banked> = there
            .iter()
            .map(|&expert| Banked { expert, record: ram.record_of(layer, expert).unwrap() })
            .chain(link.iter().copied())
            .collect();
        for (i, from) in wanted.reads.iter().enumerate() {
            let is_own = i < wanted.n_awaited && link.contains(from);
            if kept.iter().any(|kept| kept.record == from.record && !(is_own && kept == from)) {
                return Err(format!("the read of {from:?} overwrites one of {kept:?}"));
            }
            bytes.insert((layer, from.record), from.expert);
            kept.push(*from);
        }
        if let Some(lost) = kept.iter().find(|from| bytes.get(&(layer, from.record)) != Some(&from.expert)) {
            return Err(format!("{lost:?} is not in its record"));
        }
        let mut given: Vec<Banked> = kept[..n_there].iter().chain(on_disk).copied().collect();
        let mut computed: Vec<u32> = kept.iter().map(|from| from.expert).collect();
        for &expert in &wanted.waiting {
            let Some(record) = ram.admit(layer, expert).or_else(|| {
                ram.let_go(layer, given.pop()?.record);
                ram.admit(layer, expert)
            }) else {
                return Err(format!("there is never room for {expert}"));
            };
            if link.iter().any(|from| from.record == record) {
                return Err(format!("{expert} overwrites what the device reads"));
            }
            bytes.insert((layer, record), expert);
            given.push(Banked { expert, record });
            computed.push(expert);
        }
        computed.sort_unstable();
        computed.dedup();
        Ok(computed)
    }

    #[test]
    fn what_lies_on_the_disk_goes_to_the_host_and_what_is_in_memory_over_the_link() {
        let mut planner = Planner::new(options(Mode::Share(1.0), ALL, 2)).unwrap();
        planner.set_ram(RamCache::new(16, &[3, 3], Policy::Lru));
        planner.set_disk_rate(3e9);
        let (first, reply) = planned(&mut planner, 0, &[4, 5]).unwrap();
        assert_eq!((first.n_disk, reply.host, reply.fetch.len()), (2, vec![4, 5], 0));
        let (wanted, _) = planner.from_disk();
        assert_eq!((wanted.reads.len(), wanted.n_awaited, wanted.waiting.len()), (2, 0, 0));
        let (second, reply) = planned(&mut planner, 0, &[4, 5, 6, 7]).unwrap();
        assert_eq!((second.n_disk, second.n_fetched, reply.host), (2, 2, vec![6, 7]));
        let (wanted, _) = planner.from_disk();
        assert_eq!((wanted.reads.len(), &wanted.waiting[..]), (1, &[7][..]), "one record is left for both");
        assert!(second.split.seconds > 2.0 * Q30.record_bytes as f64 / 3e9, "the disk is in the prediction");
        let counters = planner.counters();
        assert_eq!((counters.disk, counters.host, counters.fetched), (4, 4, 2));
        assert_eq!(planner.next_step(), StepKind::CoExecuted);
    }

    #[test]
    fn a_device_that_does_everything_needs_all_of_it_in_memory() {
        let choices = Choices { fetch: true, read_in_place: false, host: false };
        let mut planner = Planner::new(options(Mode::Gpu, choices, 8)).unwrap();
        planner.set_ram(RamCache::new(16, &[3, 3], Policy::Lru));
        let (three, reply) = planned(&mut planner, 0, &[4, 5, 6]).unwrap();
        assert_eq!((three.n_fetched, reply.fetch.len(), planner.from_disk().0.n_awaited), (3, 3, 3));
        let refused = planned(&mut planner, 1, &[4, 5, 6, 7]).map(|(planned, _)| planned);
        assert_eq!(refused, Err(PlanError::TooFewRecords { layer: 1, needed: 4, n_records: 3 }));
        assert_eq!(planned(&mut planner, 0, &[4, 5, 6]).unwrap().0.n_hits, 3);
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
                for Fetch { from, slot } in &reply.fetch {
                    prop_assert_eq!(table[(layer * 16 + from.expert) as usize], *slot as i32);
                    records[*slot as usize] = Some(layer * 16 + from.expert);
                }
                prop_assert_eq!(planner.cache().table(), &table[..]);
                for (entry, &slot) in table.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                    prop_assert_eq!(records[slot as usize], Some(entry as u32));
                }
                let mut counts = [0; 4];
                for expert in 0..16u32 {
                    let entry = (layer * 16 + expert) as usize;
                    let fetched = reply.fetch.iter().filter(|fetch| fetch.from.expert == expert).count();
                    let places = [
                        usize::from(table[entry] >= 0 && fetched == 0),
                        fetched,
                        reply.read_in_place.iter().filter(|from| from.expert == expert).count(),
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

        /// The same over a disk: whatever host memory holds, each routed expert has one place, its bytes are there when it is
        /// computed, and nothing that is still needed is overwritten.
        #[test]
        fn each_routed_expert_comes_from_somewhere(
            mode in mode(),
            choices in any::<(bool, bool, bool)>(),
            n_slots in 0..24usize,
            n_records in (1..17usize, 1..17usize),
            lru in any::<bool>(),
            points in prop::collection::vec(
                (0..2u32, (1..9usize).prop_flat_map(|n_rows| prop::collection::vec(-1..16i32, n_rows * 4))),
                1..30,
            ),
        ) {
            let choices = Choices { fetch: choices.0, read_in_place: choices.1, host: choices.2 };
            let Ok(mut planner) = Planner::new(options(mode, choices, n_slots)) else { return Ok(()) };
            let n_records = [n_records.0, n_records.1];
            let policy = if lru { Policy::Lru } else { Policy::DEFAULT };
            planner.set_ram(RamCache::new(16, &n_records, policy));
            planner.set_disk_rate(2e9);
            let mut bytes = Bytes::new();
            for (layer, ids) in points {
                let (planned, reply) = match planned(&mut planner, layer, &ids) {
                    Err(PlanError::TooFewSlots { .. }) => {
                        prop_assert!(!choices.host && !choices.read_in_place);
                        continue;
                    }
                    Err(PlanError::TooFewRecords { needed, .. }) => {
                        prop_assert!(!choices.host && needed > n_records[layer as usize]);
                        continue;
                    }
                    planned => planned.unwrap(),
                };
                let computed = obey(&mut planner, layer, &reply, &mut bytes);
                let computed = computed.map_err(TestCaseError::fail)?;
                let n_link = planned.n_fetched + planned.n_in_place;
                prop_assert_eq!(reply.fetch.len() + reply.read_in_place.len(), n_link);
                prop_assert_eq!(reply.host.len(), planned.n_host);
                prop_assert_eq!(computed.len(), n_link + planned.n_host, "each once");
                let mut routed: Vec<i32> = ids.iter().copied().filter(|id| *id >= 0).collect();
                routed.sort_unstable();
                routed.dedup();
                prop_assert_eq!(routed.len(), planned.n_hits + computed.len());
                prop_assert!(computed.iter().all(|expert| routed.contains(&(*expert as i32))));
            }
        }
    }
}
