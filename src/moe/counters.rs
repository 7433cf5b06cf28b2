//! What was done at route points, summed.

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
