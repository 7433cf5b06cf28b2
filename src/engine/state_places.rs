//! Places for kept states in two tiers: slots of the device, and host memory. It knows which are free, and nothing of what is in
//! them.

/// Where a kept state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Place {
    /// A slot of the device.
    Slot(u32),
    /// Host memory, by number.
    Host(u32),
}

/// Places of one kind.
#[derive(Debug, Default)]
pub(super) struct Tier {
    n: usize,
    /// Numbers below this one were handed out before.
    n_seen: u32,
    free: Vec<u32>,
}

impl Tier {
    fn new(n: usize, n_used: usize) -> Self {
        assert!(n_used <= n, "{n_used} states in {n} places");
        Tier { n, n_seen: n_used as u32, free: Vec::new() }
    }

    /// All.
    pub(super) fn n(&self) -> usize {
        self.n
    }

    /// Those that are taken.
    pub(super) fn n_used(&self) -> usize {
        self.n_seen as usize - self.free.len()
    }

    /// Adds places, until there are `n`.
    pub(super) fn grow(&mut self, n: usize) {
        self.n = self.n.max(n);
    }

    /// A free place, taken.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
            let next = self.n_seen;
            ((next as usize) < self.n).then(|| {
                self.n_seen += 1;
                next
            })
        })
    }
}

/// Both tiers.
#[derive(Debug, Default)]
pub(super) struct StatePlaces {
    pub(super) slots: Tier,
    pub(super) host: Tier,
}

impl StatePlaces {
    /// So many slots and places in host memory, all of them free.
    pub(super) fn new(n_slots: usize, n_host: usize) -> Self {
        Self::with_used(n_slots, n_host, [0, 0])
    }

    /// The same, the first ones of each taken.
    pub(super) fn with_used(n_slots: usize, n_host: usize, [slots, host]: [usize; 2]) -> Self {
        StatePlaces { slots: Tier::new(n_slots, slots), host: Tier::new(n_host, host) }
    }

    /// Of both tiers.
    pub(super) fn n(&self) -> usize {
        self.slots.n.saturating_add(self.host.n)
    }

    /// Taken ones of both tiers.
    pub(super) fn n_used(&self) -> usize {
        self.slots.n_used() + self.host.n_used()
    }

    /// Makes a place free.
    pub(super) fn give_back(&mut self, place: Place) {
        match place {
            Place::Slot(n) => self.slots.free.push(n),
            Place::Host(n) => self.host.free.push(n),
        }
    }
}
