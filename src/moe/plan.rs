//! The planner: from the ids of a route point to the reply. Each routed expert gets exactly one place: hits stay where
//! they are, the first misses come over the link, the host computes the rest.
//!
//! It owns the mirror of the slot table and the counters, and knows what the device can do only as [`Choices`].

#[cfg(test)]
mod tests;

use freetoken_backend::{Banked, Fetch, RouteReply};

use super::{
    Counters,
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
