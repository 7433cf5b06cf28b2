//! What leaves first where entries cost differently to get back: GreedyDual with frequencies (Young 1991; Cao and Irani 1997;
//! Cherkasova 1998). An entry's priority is the clock at its last use and, on top of it, its uses times what it is worth; the least
//! leaves, and the clock rises to its priority. So what costs much or is used often stays longer, but nothing stays for ever.
//!
//! It knows numbers alone. Entries that share a budget are measured in one unit, whichever that is.

/// Uses that count, at most: what nobody asks for any more leaves within so many turnovers of the budget.
const MOST_USES: u64 = 8;

/// Time of a budget: how much worth had to leave so far.
#[derive(Debug, Default)]
pub(super) struct Clock {
    now: u64,
    /// Counts uses, so that no two have the same age.
    turn: u64,
}

/// When an entry was used, and how often.
#[derive(Debug, Clone, Copy)]
pub(super) struct Age {
    since: u64,
    n_uses: u64,
    /// Of the last use.
    pub(super) turn: u64,
}

/// The least leaves first; of equals the one whose use is longest ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Priority {
    value: u64,
    turn: u64,
}

impl Clock {
    /// The age of an entry that comes in.
    pub(super) fn begin(&mut self) -> Age {
        self.turn += 1;
        Age { since: self.now, n_uses: 1, turn: self.turn }
    }

    /// The age of an entry that is there still.
    pub(super) fn renew(&mut self, age: &mut Age) {
        *age = Age { n_uses: age.n_uses, ..self.begin() };
    }

    /// The same for one that somebody asked for.
    pub(super) fn count_use(&mut self, age: &mut Age) {
        self.renew(age);
        age.n_uses = MOST_USES.min(age.n_uses + 1);
    }

    /// Notes that an entry of this priority leaves.
    pub(super) fn leave(&mut self, priority: Priority) {
        self.now = self.now.max(priority.value);
    }
}

impl Age {
    /// Of an entry that is worth so much.
    pub(super) fn priority(&self, worth: u64) -> Priority {
        Priority { value: self.since + self.n_uses * worth, turn: self.turn }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_worth_is_a_matter_of_age_and_more_of_it_stays_longer() {
        let mut clock = Clock::default();
        let [mut a, b] = [clock.begin(), clock.begin()];
        assert!(a.priority(5) < b.priority(5) && a.priority(6) > b.priority(5));
        clock.renew(&mut a);
        assert!(a.priority(5) > b.priority(5));
        clock.count_use(&mut a);
        assert!(a.priority(5) > b.priority(9) && a.priority(5) < b.priority(11));
    }

    #[test]
    fn nothing_stays_for_ever() {
        let mut clock = Clock::default();
        let mut often = clock.begin();
        (0..1000).for_each(|_| clock.count_use(&mut often));
        let mut turnovers = 0;
        while clock.begin().priority(1) <= often.priority(1) {
            let once = clock.begin();
            clock.leave(once.priority(1));
            turnovers += 1;
        }
        assert_eq!(turnovers, MOST_USES - 1);
    }
}
