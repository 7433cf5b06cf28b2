//! What was asked and what it took, for `/v1/requests`, `/v1/stats` and `/metrics`: times and counts, never a word of a prompt
//! or an answer.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use super::{access::Slot, error::ApiError};
use crate::scheduler::Usage;

/// Requests that are remembered one by one.
pub(super) const MOST_ENTRIES: usize = 512;

/// Upper bounds of the classes of a histogram, in seconds.
pub(super) const BOUNDS: [f64; 12] =
    [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0];

/// Requests of the server's life.
#[derive(Debug, Default)]
pub(super) struct Journal(Mutex<Book>);

/// One request.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Entry {
    /// Grows by one a request; a client asks for what came `since`.
    pub(super) id: u64,
    /// Seconds since 1970.
    pub(super) started: f64,
    /// The route.
    pub(super) path: &'static str,
    /// Status of the answer; 499 where the client left before its end.
    pub(super) status: u16,
    /// Whether the answer was streamed.
    pub(super) stream: bool,
    /// From the request to the end of the answer.
    pub(super) seconds: f64,
    /// From the request to the first token.
    pub(super) seconds_to_first_token: Option<f64>,
    /// Tokens of the prompt.
    pub(super) prompt_tokens: usize,
    /// Of those, that were not computed.
    pub(super) cached_tokens: usize,
    /// Tokens drawn.
    pub(super) completion_tokens: usize,
    /// The type of the error, where there was one.
    pub(super) error: Option<String>,
}

/// Sums over all requests.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Totals {
    /// Requests that are answered now.
    pub(super) n_active: usize,
    /// Requests that ended, by route and status.
    #[serde(skip)]
    pub(super) ended: BTreeMap<(&'static str, u16), u64>,
    /// Tokens of prompts.
    pub(super) prompt_tokens: u64,
    /// Of those, that were not computed.
    pub(super) cached_tokens: u64,
    /// Tokens drawn.
    pub(super) completion_tokens: u64,
    /// From request to first token.
    #[serde(skip)]
    pub(super) to_first_token: Histogram,
    /// From request to end.
    #[serde(skip)]
    pub(super) whole: Histogram,
}

/// Seconds in classes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Histogram {
    /// Observations at most as large as each of [`BOUNDS`].
    pub(super) at_most: [u64; BOUNDS.len()],
    /// Observations.
    pub(super) count: u64,
    /// Their sum.
    pub(super) seconds: f64,
}

#[derive(Debug, Default)]
struct Book {
    entries: VecDeque<Entry>,
    n_opened: u64,
    totals: Totals,
}

/// A request that is answered now; dropping it ends its entry.
#[derive(Debug)]
pub(super) struct Ticket {
    journal: Arc<Journal>,
    start: Instant,
    open: Mutex<Open>,
    _slot: Slot,
}

#[derive(Debug)]
struct Open {
    entry: Entry,
    /// Whether the answer came to its end.
    whole: bool,
}

impl Journal {
    /// Opens an entry.
    pub(super) fn open(self: &Arc<Self>, path: &'static str, slot: Slot) -> Arc<Ticket> {
        let mut book = self.book();
        book.n_opened += 1;
        book.totals.n_active += 1;
        let entry = Entry {
            id: book.n_opened,
            started: unix_seconds(),
            path,
            status: 200,
            stream: false,
            seconds: 0.0,
            seconds_to_first_token: None,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            error: None,
        };
        let open = Mutex::new(Open { entry, whole: false });
        Arc::new(Ticket { journal: self.clone(), start: Instant::now(), open, _slot: slot })
    }

    /// The sums.
    pub(super) fn totals(&self) -> Totals {
        self.book().totals.clone()
    }

    /// Entries that ended, of those with a greater id than `since` the newest `limit`, oldest first.
    pub(super) fn entries(&self, since: u64, limit: usize) -> Vec<Entry> {
        let book = self.book();
        let newest = book.entries.iter().rev().filter(|entry| entry.id > since).take(limit);
        let mut entries: Vec<Entry> = newest.cloned().collect();
        entries.reverse();
        entries
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, entry: Entry) {
        let mut book = self.book();
        let totals = &mut book.totals;
        totals.n_active -= 1;
        *totals.ended.entry((entry.path, entry.status)).or_default() += 1;
        totals.prompt_tokens += entry.prompt_tokens as u64;
        totals.cached_tokens += entry.cached_tokens as u64;
        totals.completion_tokens += entry.completion_tokens as u64;
        totals.whole.observe(entry.seconds);
        if let Some(seconds) = entry.seconds_to_first_token {
            totals.to_first_token.observe(seconds);
        }
        if book.entries.len() == MOST_ENTRIES {
            book.entries.pop_front();
        }
        book.entries.push_back(entry);
    }
}

impl Histogram {
    fn observe(&mut self, seconds: f64) {
        self.count += 1;
        self.seconds += seconds;
        for (n, bound) in self.at_most.iter_mut().zip(BOUNDS) {
            *n += u64::from(seconds <= bound);
        }
    }
}

impl Ticket {
    /// The answer is streamed.
    pub(super) fn streams(&self) {
        self.open().entry.stream = true;
    }

    /// A token came.
    pub(super) fn token(&self) {
        let seconds = self.start.elapsed().as_secs_f64();
        self.open().entry.seconds_to_first_token.get_or_insert(seconds);
    }

    /// What it took so far.
    pub(super) fn usage(&self, usage: Usage) {
        let entry = &mut self.open().entry;
        entry.prompt_tokens = usage.prompt_tokens;
        entry.cached_tokens = usage.cached_tokens;
        entry.completion_tokens = usage.completion_tokens;
    }

    /// The answer came to its end.
    pub(super) fn ended(&self) {
        self.open().whole = true;
    }

    /// The request failed.
    pub(super) fn failed(&self, status: u16, error: &ApiError) {
        let mut open = self.open();
        open.whole = true;
        open.entry.status = status;
        open.entry.error = error.openai()["type"].as_str().map(str::to_owned);
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let open = self.open.get_mut().unwrap_or_else(PoisonError::into_inner);
        open.entry.seconds = self.start.elapsed().as_secs_f64();
        if !open.whole {
            open.entry.status = 499;
        }
        self.journal.end(open.entry.clone());
    }
}

/// Seconds since 1970.
pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}
