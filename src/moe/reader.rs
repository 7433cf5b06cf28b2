//! Records on their way from a disk into host banks: a few threads that read piece by piece, so that a disk has much to do even
//! for one record. It knows neither files nor what a record is worth.

#![allow(unsafe_code)] // One block: a thread writes the piece of a bank that was given to it.

use std::{
    collections::VecDeque,
    fmt,
    ops::Range,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::Instant,
};

use freetoken_backend::{Banked, Error, FillingBank, Result};

/// Threads: as many requests are in flight.
const N_READERS: usize = 16;
/// Seconds over which the rate of the disk is an average, at most twice of it.
const RATE_SECONDS: f64 = 1.0;

/// Where the records of experts are read from, again and again. Errors are sentences that name file and place.
pub trait RecordSource: fmt::Debug + Send + Sync {
    /// Records can be read in pieces of so many bytes, each by itself; `None` where they come whole.
    fn piece_bytes(&self) -> Option<usize>;

    /// Reads the bytes of a record from `start` on, as many as `into` has: a piece, or all of it.
    ///
    /// # Errors
    /// A sentence.
    fn read(&self, layer: u32, expert: u32, start: usize, into: &mut [u8])
    -> std::result::Result<(), String>;

    /// Refuses a record that was read and is wrong.
    ///
    /// # Errors
    /// A sentence.
    fn check(&self, layer: u32, expert: u32, record: &[u8]) -> std::result::Result<(), String>;
}

/// What was read, and how long that took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DiskSums {
    /// Records.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Seconds in which something was being read.
    pub busy_seconds: f64,
    /// Seconds in which everything else waited for it.
    pub waited_seconds: f64,
}

impl DiskSums {
    /// What was added since.
    pub fn since(&self, before: &DiskSums) -> DiskSums {
        DiskSums {
            reads: self.reads - before.reads,
            bytes: self.bytes - before.bytes,
            busy_seconds: self.busy_seconds - before.busy_seconds,
            waited_seconds: self.waited_seconds - before.waited_seconds,
        }
    }
}

/// The threads and what they have to do.
pub struct RecordReader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    source: Arc<dyn RecordSource>,
    banks: Vec<FillingBank>,
    record_bytes: usize,
    /// Bytes of a piece; the last one of a record may be shorter.
    piece_bytes: usize,
    /// The number of each layer's first record among those of all layers.
    first: Vec<usize>,
    state: Mutex<State>,
    /// There is something to read, or nothing any more.
    work: Condvar,
    /// A record is there, or failed.
    done: Condvar,
}

struct Piece {
    layer: u32,
    from: Banked,
    number: usize,
}

struct State {
    /// For steps that wait for them, then those that are read ahead.
    waiting: [VecDeque<Piece>; 2],
    /// Of each record: pieces that are not read yet.
    left: Vec<usize>,
    /// Records whose read failed, and why.
    failed: Vec<(usize, String)>,
    /// Pieces that are waiting or being read.
    n_open: usize,
    /// Up to when busy seconds are counted, while there are open pieces.
    counted: Instant,
    sums: DiskSums,
    /// Bytes and seconds of late.
    late: (f64, f64),
    is_ending: bool,
}

impl RecordReader {
    /// Reads records of `record_bytes` into banks, one for each layer, with `n_records` records each.
    ///
    /// # Errors
    /// The system's refusal to start a thread.
    pub fn new(
        source: Arc<dyn RecordSource>,
        banks: Vec<FillingBank>,
        n_records: &[usize],
        record_bytes: usize,
    ) -> Result<Self> {
        let piece_bytes = source.piece_bytes().unwrap_or(record_bytes).clamp(1, record_bytes);
        let n_all: usize = n_records.iter().sum();
        let first = n_records.iter().scan(0, |end, n| {
            let first = *end;
            *end += n;
            Some(first)
        });
        let pieces = || VecDeque::with_capacity(n_all * record_bytes.div_ceil(piece_bytes));
        let state = State {
            waiting: [pieces(), pieces()],
            left: vec![0; n_all],
            failed: Vec::new(),
            n_open: 0,
            counted: Instant::now(),
            sums: DiskSums::default(),
            late: (0.0, 0.0),
            is_ending: false,
        };
        let shared = Arc::new(Shared {
            source,
            banks,
            record_bytes,
            piece_bytes,
            first: first.collect(),
            state: Mutex::new(state),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let mut reader = RecordReader { shared, threads: Vec::with_capacity(N_READERS) };
        for _ in 0..N_READERS {
            let shared = reader.shared.clone();
            let thread = thread::Builder::new().name("disk".into()).spawn(move || shared.serve());
            reader
                .threads
                .push(thread.map_err(|source| Error::Os { what: "starting disk threads", source })?);
        }
        Ok(reader)
    }

    /// Begins to read the record of an expert into a record of its layer's bank, which nobody else uses until it is there. What is read
    /// ahead lets everything else pass. Asserts that nothing is on its way to that place.
    pub fn request(&self, layer: u32, from: Banked, is_ahead: bool) {
        let record = self.shared.number(layer, from.record);
        let n_pieces = self.shared.record_bytes.div_ceil(self.shared.piece_bytes);
        let mut state = self.shared.lock();
        assert_eq!(state.left[record], 0, "one read at a time goes to a place");
        if state.n_open == 0 {
            state.counted = Instant::now();
        }
        state.left[record] = n_pieces;
        state.n_open += n_pieces;
        state.waiting[usize::from(is_ahead)].extend((0..n_pieces).map(|number| Piece {
            layer,
            from,
            number,
        }));
        drop(state);
        self.shared.work.notify_all();
    }

    /// Whether a read that was requested is done, well or not.
    pub fn is_done(&self, layer: u32, record: u32) -> bool {
        self.shared.lock().left[self.shared.number(layer, record)] == 0
    }

    /// Waits until a read that was requested is done.
    ///
    /// # Errors
    /// Why it failed, once.
    pub fn wait(&self, layer: u32, record: u32) -> std::result::Result<(), String> {
        let record = self.shared.number(layer, record);
        let mut state = self.shared.lock();
        if state.left[record] > 0 {
            let start = Instant::now();
            while state.left[record] > 0 {
                state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            state.sums.waited_seconds += start.elapsed().as_secs_f64();
        }
        match state.failed.iter().position(|(failed, _)| *failed == record) {
            Some(place) => Err(state.failed.swap_remove(place).1),
            None => Ok(()),
        }
    }

    /// Sums since the start.
    pub fn sums(&self) -> DiskSums {
        self.shared.lock().sums
    }

    /// Bytes a second of late, over the time in which something was being read; `None` before the first read.
    pub fn rate(&self) -> Option<f64> {
        let (bytes, seconds) = self.shared.lock().late;
        (bytes > 0.0 && seconds > 0.0).then(|| bytes / seconds)
    }
}

impl Drop for RecordReader {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_ending = true;
        state.waiting.iter_mut().for_each(VecDeque::clear);
        drop(state);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            drop(thread.join());
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of a record among those of all layers.
    fn number(&self, layer: u32, record: u32) -> usize {
        self.first[layer as usize] + record as usize
    }

    /// Reads pieces until the reader ends.
    fn serve(&self) {
        let mut state = self.lock();
        loop {
            let Some(piece) = state.waiting.iter_mut().find_map(VecDeque::pop_front) else {
                if state.is_ending {
                    return;
                }
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let read = self.read(&piece);
            state = self.finish(&piece, read);
        }
    }

    /// The bytes of a bank's record.
    fn place(&self, record: u32) -> Range<usize> {
        let start = record as usize * self.record_bytes;
        start..start + self.record_bytes
    }

    fn read(&self, Piece { layer, from, number }: &Piece) -> std::result::Result<(), String> {
        let start = number * self.piece_bytes;
        let end = self.record_bytes.min(start + self.piece_bytes);
        let record = self.place(from.record);
        let part = record.start + start..record.start + end;
        // SAFETY: the record is nobody's but this read's until it is done, as `request` asks of its callers; each piece of it is
        // given to one thread, and the pieces do not overlap.
        let into = unsafe { self.banks[*layer as usize].part(part) };
        self.source.read(*layer, from.expert, start, into)
    }

    /// Notes that a piece is read. Whoever reads the last one checks the record first.
    fn finish(
        &self,
        Piece { layer, from, .. }: &Piece,
        read: std::result::Result<(), String>,
    ) -> MutexGuard<'_, State> {
        let record = self.number(*layer, from.record);
        let fail = |state: &mut State, why: String| {
            // One sentence a record.
            if state.failed.iter().all(|(failed, _)| *failed != record) {
                state.failed.push((record, why));
            }
        };
        let mut state = self.lock();
        if let Err(why) = read {
            fail(&mut state, why);
        }
        if state.left[record] == 1 && state.failed.iter().all(|(failed, _)| *failed != record) {
            drop(state);
            let bank = self.banks[*layer as usize].memory().as_slice();
            let checked = self.source.check(*layer, from.expert, &bank[self.place(from.record)]);
            state = self.lock();
            match checked {
                Ok(()) => {
                    state.sums.reads += 1;
                    state.sums.bytes += self.record_bytes as u64;
                    state.late.0 += self.record_bytes as f64;
                }
                Err(why) => fail(&mut state, why),
            }
        }
        state.count_time();
        state.n_open -= 1;
        state.left[record] -= 1;
        if state.left[record] == 0 {
            self.done.notify_all();
        }
        state
    }
}

impl State {
    /// Adds the time since the last look, in which something was being read.
    fn count_time(&mut self) {
        let now = Instant::now();
        let seconds = (now - self.counted).as_secs_f64();
        self.counted = now;
        self.sums.busy_seconds += seconds;
        self.late.1 += seconds;
        if self.late.1 > 2.0 * RATE_SECONDS {
            self.late = (self.late.0 / 2.0, self.late.1 / 2.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering::Relaxed},
        time::Duration,
    };

    use freetoken_backend::HostBuffer;

    use super::*;
    use crate::devices;

    const RECORD: usize = 10_000;

    /// A record is its layer and its expert, over and over; one expert cannot be read, and one is wrong.
    #[derive(Debug)]
    struct Made {
        piece_bytes: Option<usize>,
        n_pieces: AtomicUsize,
    }

    impl RecordSource for Made {
        fn piece_bytes(&self) -> Option<usize> {
            self.piece_bytes
        }

        fn read(
            &self,
            layer: u32,
            expert: u32,
            start: usize,
            into: &mut [u8],
        ) -> std::result::Result<(), String> {
            thread::sleep(Duration::from_micros(200));
            self.n_pieces.fetch_add(1, Relaxed);
            if expert == 13 && start > 0 {
                return Err(format!("no byte {start} of expert 13"));
            }
            for (i, byte) in into.iter_mut().enumerate() {
                *byte = made(layer, expert, start + i);
            }
            Ok(())
        }

        fn check(&self, _: u32, expert: u32, record: &[u8]) -> std::result::Result<(), String> {
            assert_eq!(record.len(), RECORD);
            if expert == 14 { Err("expert 14 is wrong".into()) } else { Ok(()) }
        }
    }

    fn made(layer: u32, expert: u32, at: usize) -> u8 {
        (layer as usize * 91 + expert as usize * 7 + at) as u8
    }

    fn reader(piece_bytes: Option<usize>) -> (RecordReader, Vec<Arc<HostBuffer>>, Arc<Made>) {
        let made = Arc::new(Made { piece_bytes, n_pieces: AtomicUsize::new(0) });
        let backend = devices::reference();
        let banks: Vec<FillingBank> =
            (0..2).map(|_| FillingBank::new(backend.alloc_host(4 * RECORD).unwrap())).collect();
        let memory = banks.iter().map(|bank| bank.memory().clone()).collect();
        (RecordReader::new(made.clone(), banks, &[4, 4], RECORD).unwrap(), memory, made)
    }

    #[test]
    fn records_arrive_whole_and_where_they_should() {
        for piece_bytes in [None, Some(4096), Some(RECORD), Some(1 << 20)] {
            let (reader, banks, _) = reader(piece_bytes);
            assert_eq!(reader.rate(), None);
            for round in 0..3 {
                for record in 0..4 {
                    reader.request(0, Banked { expert: 4 * round + record, record }, true);
                    reader.request(1, Banked { expert: 4 * round + record, record }, false);
                }
                for (layer, record) in [(1, 3), (0, 0), (1, 0), (0, 3), (0, 1), (1, 1), (1, 2), (0, 2)] {
                    reader.wait(layer, record).unwrap();
                    assert!(reader.is_done(layer, record));
                    let start = record as usize * RECORD;
                    let bytes = &banks[layer as usize].as_slice()[start..start + RECORD];
                    let expected = |at| made(layer, 4 * round + record, at);
                    assert!(bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
                }
            }
            let sums = reader.sums();
            assert_eq!((sums.reads, sums.bytes), (24, 24 * RECORD as u64));
            assert!(sums.busy_seconds > 0.0 && sums.waited_seconds > 0.0 && reader.rate() > Some(0.0));
        }
    }

    #[test]
    fn a_read_that_fails_says_why_once_and_its_place_can_be_used_again() {
        let (reader, ..) = reader(Some(4096));
        reader.request(0, Banked { expert: 13, record: 2 }, false);
        reader.request(0, Banked { expert: 14, record: 1 }, false);
        let why = reader.wait(0, 2).unwrap_err();
        assert!(why.starts_with("no byte") && why.ends_with("expert 13"), "{why}");
        assert_eq!(reader.wait(0, 1), Err("expert 14 is wrong".into()));
        assert_eq!(reader.sums().reads, 0);
        reader.request(0, Banked { expert: 5, record: 2 }, false);
        assert_eq!(reader.wait(0, 2), Ok(()));
    }

    #[test]
    fn a_reader_that_is_dropped_does_not_finish_what_is_waiting() {
        let (reader, _, made) = reader(Some(16));
        for layer in 0..2 {
            (0..4).for_each(|record| reader.request(layer, Banked { expert: 1, record }, layer > 0));
        }
        drop(reader);
        assert!(made.n_pieces.load(Relaxed) < 8 * RECORD / 16);
    }
}
