//! A route point inside one graph: the device writes its question into mapped memory and rings a bell; the host, which spins
//! on the bell, writes its answer and a reply word behind it. The kernels are in `bell.cu`.
//!
//! Between launch and end of a step the host calls the driver for nothing but to see whether it still works. Whoever leaves a
//! step early sets the abort word, and no kernel waits longer than a second, so that the graph always comes to its end.

use std::{
    hint,
    ops::Range,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Relaxed, Release},
    },
    time::{Duration, Instant},
};

use bytemuck::{Pod, Zeroable};
use freetoken_backend::{
    Buffer, Error, ExpertMlp, HostMemory, LinkSample, NOWHERE, Result, RouteAsk, RouteReply, RouteServer,
};

use super::{ALIGN, Point, Sizes, pool_of, sections};
use crate::{
    kernels::{self, MAX_DECODE_ROWS},
    launch::{Arg, Launch},
    memory::{self, Device, PinnedMemory, WAIT_LIMIT},
};

/// Experts of a layer at most: so many fit into a block's copy of an answer.
const MAX_EXPERTS: usize = 512;
/// Words of an answer for each expert of the layer: its slot, a fetch, two changes of the table.
const ANSWER_WORDS: usize = 7;
/// Bits of a count in a reply word.
const COUNT_BITS: u32 = 12;

/// Words that host and device share, as `bell.cu` numbers them: the first three are written by the host.
const REPLY: usize = 0;
const ROWS: usize = 1;
const ABORT: usize = 2;
/// Written by the device, as all behind it: a wait of the device came to nothing.
const FAILED: usize = 8;
const FIRST_BELL: usize = 16;

/// The front of the device's state: the number of its last question, and whether the step failed.
const STATE_SEQUENCE: Range<usize> = 0..4;
const STATE_FAILED: Range<usize> = 4..8;

/// Blocks that bring records over the link, eight loads of 16 bytes a thread under way. A handful fills the link.
const FETCH_BLOCKS: u32 = 16;
const FETCH_THREADS: u32 = 512;
/// Blocks that take the host's rows.
const ROW_BLOCKS: u32 = 16;
const ROW_THREADS: u32 = 256;
const RING_THREADS: u32 = 512;

/// Looks at a bell between two looks at the clock.
const SPINS: usize = 64;
/// The driver is asked whether it still works once in so much time.
const QUERY: Duration = Duration::from_millis(1);

/// Whether a route point can be answered inside a graph: by its size, and since its bank has every expert. What a bank lacks is read
/// from a disk first, which may take longer than the device waits.
pub(crate) fn fits(mlp: &ExpertMlp) -> bool {
    let (pool, layer) = pool_of(mlp);
    mlp.p.n_rows <= MAX_DECODE_ROWS
        && pool.n_experts <= MAX_EXPERTS
        && pool.n_records(layer) >= pool.n_experts
}

/// Words that host and device write while a graph runs.
pub(crate) struct Words(PinnedMemory);

impl Words {
    /// Makes every wait of the device end at once.
    pub(crate) fn abort(&self) {
        self.0.word(ABORT).store(1, Release);
    }

    /// Whether a wait of the device came to nothing.
    pub(crate) fn failed(&self) -> bool {
        self.0.word(FAILED).load(Acquire) != 0
    }

    /// Says that what the host wrote for this question can be read.
    fn release(&self, word: usize, sequence: u32, value: u32) {
        self.0.word(word).store(u64::from(sequence) << 32 | u64::from(value), Release);
    }

    /// What the bell of a route point says, once it rings for this question.
    fn rung(&self, point: usize, sequence: u32) -> Option<u32> {
        let word = self.0.word(FIRST_BELL + point).load(Acquire);
        ((word >> 32) as u32 == sequence).then_some(word as u32)
    }
}

/// What the words announce.
pub(crate) struct Papers {
    /// What the host reads: link, ids, weights and table of each route point, then the rows of the one that waits.
    asked: PinnedMemory,
    /// What the host writes: the answer to the one that waits, then rows.
    answered: PinnedMemory,
}

/// What the route points of a program share.
pub(crate) struct Bells {
    pub(crate) words: Words,
    pub(crate) papers: Papers,
    /// On the device: counters of the kernels, then a copy of the answer.
    state: Buffer,
    /// Where rows start in both papers.
    asked_rows: usize,
    answered_rows: usize,
    /// Route points so far, and bytes of their questions.
    n_points: u32,
    placed: usize,
    /// The number of the last question when all replays that were begun are done.
    sequence: u32,
}

/// Bytes of link, ids, weights and table in what a route point asks, from the start of its own.
fn asked(sizes: &Sizes) -> [Range<usize>; 4] {
    sections([4, sizes.n_routes(), sizes.n_routes(), sizes.row.n_experts])
}

impl Bells {
    /// Room for these route points, of which there is one at least.
    pub(crate) fn new<'a>(
        device: &Arc<Device>,
        points: impl Iterator<Item = &'a ExpertMlp> + Clone,
    ) -> Result<Self> {
        let sizes = points.map(Sizes::of);
        let largest = |n: fn(&Sizes) -> usize| sizes.clone().map(|sizes| n(&sizes)).max().unwrap_or_default();
        let asked_rows = sizes.clone().map(|sizes| asked(&sizes)[3].end.next_multiple_of(ALIGN)).sum();
        let n_experts = largest(|sizes| sizes.row.n_experts);
        let answered_rows = (ANSWER_WORDS * n_experts * 4).next_multiple_of(ALIGN);
        let rows = 4 * largest(|sizes| sizes.n_rows * sizes.hidden);
        let host_rows = 4 * largest(|sizes| sizes.n_routes() * sizes.hidden);
        Ok(Bells {
            words: Words(device.pin((FIRST_BELL + sizes.count()) * size_of::<u64>())?),
            papers: Papers {
                asked: device.pin(asked_rows + rows)?,
                answered: device.pin(answered_rows + host_rows)?,
            },
            state: Buffer::new(device.alloc(ALIGN + answered_rows)?),
            asked_rows,
            answered_rows,
            n_points: 0,
            placed: 0,
            sequence: 0,
        })
    }

    /// Begins a replay. The number of the question before its first.
    pub(crate) fn begin(&mut self) -> u32 {
        let before = self.sequence;
        self.sequence = before.wrapping_add(self.n_points);
        before
    }

    /// Forgets a step that broke off. Nothing may be queued.
    pub(crate) fn reset(&self, device: &Device) -> Result<()> {
        self.words.0.word(ABORT).store(0, Relaxed);
        self.words.0.word(FAILED).store(0, Relaxed);
        let state = memory::span(&self.state.whole());
        device.driver.write_word(&device.compute, state.slice(STATE_SEQUENCE), self.sequence)?;
        device.driver.write_word(&device.compute, state.slice(STATE_FAILED), 0)
    }
}

/// `Bell` of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Parameters {
    x: u64,
    ids: u64,
    weights: u64,
    parts: u64,
    table: u64,
    bank: u64,
    words: u64,
    answer: u64,
    rows: u64,
    bell: u64,
    asked_link: u64,
    asked_ids: u64,
    asked_weights: u64,
    asked_table: u64,
    asked_rows: u64,
    state: u64,
    arrivals: u64,
    n_rows: u32,
    top_k: u32,
    hidden: u32,
    n_experts: u32,
    first_entry: u32,
    padding: u32,
}

/// A route point as it was recorded.
pub(crate) struct BellPoint {
    point: Point,
    /// Counts the route points of the program.
    index: u32,
    /// Bytes of link, ids, weights and table, and of the rows, in what is asked.
    asked: [Range<usize>; 4],
    asked_rows: Range<usize>,
    /// Bytes of the host's rows in what is answered.
    answered_rows: Range<usize>,
    parameters: Parameters,
    /// The experts' work over the answer.
    arrivals: ExpertMlp,
}

impl BellPoint {
    /// Prepares the next route point. Asserts that its pool has a bank for the layer, made by this device.
    pub(crate) fn new(device: &Arc<Device>, mlp: &ExpertMlp, bells: &mut Bells) -> Self {
        let point = Point::new(mlp);
        let sizes = point.sizes;
        let (index, start) = (bells.n_points, bells.placed);
        let asked = asked(&sizes).map(|part| start + part.start..start + part.end);
        bells.n_points += 1;
        bells.placed = asked[3].end.next_multiple_of(ALIGN);
        let asked_rows = bells.asked_rows..bells.asked_rows + 4 * sizes.n_rows * sizes.hidden;
        let answered_rows = bells.answered_rows..bells.answered_rows + 4 * sizes.n_routes() * sizes.hidden;
        let arrivals = bells.state.view(ALIGN..ALIGN + 4 * sizes.row.n_experts);
        let address = |view| memory::span(view).address();
        let asked_at = |part: &Range<usize>| bells.papers.asked.span().slice(part.clone()).address();
        let answered = bells.papers.answered.span();
        let words = bells.words.0.span().address();
        let parameters = Parameters {
            x: address(&mlp.x),
            ids: address(&mlp.ids),
            weights: address(&mlp.weights),
            parts: address(&mlp.parts),
            table: address(&point.pool.table),
            bank: memory::host_span(device, &point.bank).address(),
            words,
            answer: answered.address(),
            rows: answered.slice(answered_rows.clone()).address(),
            bell: words + ((FIRST_BELL + index as usize) * size_of::<u64>()) as u64,
            asked_link: asked_at(&asked[0]),
            asked_ids: asked_at(&asked[1]),
            asked_weights: asked_at(&asked[2]),
            asked_table: asked_at(&asked[3]),
            asked_rows: asked_at(&asked_rows),
            state: address(&bells.state.whole()),
            arrivals: address(&arrivals),
            n_rows: mlp.p.n_rows,
            top_k: mlp.p.top_k,
            hidden: mlp.p.hidden,
            n_experts: mlp.p.n_experts,
            first_entry: sizes.row.first_entry as u32,
            padding: 0,
        };
        let arrivals = point.answered(arrivals);
        BellPoint { point, index, asked, asked_rows, answered_rows, parameters, arrivals }
    }

    /// Its layer, as the host knows it.
    pub(crate) fn layer(&self) -> u32 {
        self.point.layer
    }

    /// The experts that have a slot when the device asks.
    pub(crate) fn hits(&self) -> &ExpertMlp {
        &self.point.mlp
    }

    /// The experts to which the answer gives a place.
    pub(crate) fn arrivals(&self) -> &ExpertMlp {
        &self.arrivals
    }

    /// The kernel that asks, in front of the hits.
    pub(crate) fn ring(&self) -> Launch {
        self.launch("bell_ring", 1, RING_THREADS, Vec::new())
    }

    /// The kernel that awaits the answer, applies it and fetches, between hits and arrivals.
    pub(crate) fn take(&self) -> Launch {
        let (pool, layer) = pool_of(&self.arrivals);
        let place = kernels::record_place(pool).expect("the experts' work was planned before");
        self.launch(
            "bell_take",
            FETCH_BLOCKS,
            FETCH_THREADS,
            vec![place, Arg::ChunkTable(pool.clone(), layer)],
        )
    }

    /// The kernel that takes the host's rows, behind the arrivals.
    pub(crate) fn rows(&self) -> Launch {
        let n_blocks = ROW_BLOCKS.min(self.point.sizes.n_routes() as u32);
        self.launch("bell_rows", n_blocks, ROW_THREADS, Vec::new())
    }

    fn launch(&self, kernel: &'static str, n_blocks: u32, threads: u32, more: Vec<Arg>) -> Launch {
        let mut args = vec![Arg::Params(bytemuck::bytes_of(&self.parameters).to_vec())];
        args.extend(more);
        Launch { kernel, grid: [n_blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, args, early: false }
    }

    /// Serves the route point in a replay that began behind question `before`.
    pub(crate) fn serve(
        &self,
        device: &Device,
        words: &Words,
        papers: &mut Papers,
        before: u32,
        reply: &mut RouteReply,
        server: &mut dyn RouteServer,
    ) -> Result<()> {
        let sequence = before.wrapping_add(self.index + 1);
        let waits = self.wait(device, words, sequence)?;
        let Papers { asked, answered } = papers;
        let asked = asked.bytes();
        let ask = self.ask(asked, waits);
        reply.clear();
        server.answer(&ask, reply)?;
        if !waits {
            return self.check_unasked(reply);
        }
        let (answer, rows) = answered.bytes_mut().split_at_mut(self.answered_rows.start);
        let before: &[i32] = bytemuck::cast_slice(&asked[self.asked[3].clone()]);
        let counts =
            write_answer(&self.point.sizes, reply, ask.ids, before, bytemuck::cast_slice_mut(answer))
                .map_err(|why| self.failed(why))?;
        words.release(REPLY, sequence, counts);
        if !reply.host.is_empty() {
            let rows = bytemuck::cast_slice_mut(&mut rows[..self.answered_rows.len()]);
            server.compute(&ask, &reply.host, rows)?;
            words.release(ROWS, sequence, 0);
        }
        Ok(())
    }

    /// Spins until the device asks. Whether it waits for the answer: it does not where every route hits.
    fn wait(&self, device: &Device, words: &Words, sequence: u32) -> Result<bool> {
        let rung = || words.rung(self.index as usize, sequence).map(|waits| waits != 0);
        let start = Instant::now();
        let mut asked_driver = start;
        loop {
            for _ in 0..SPINS {
                if let Some(waits) = rung() {
                    return Ok(waits);
                }
                hint::spin_loop();
            }
            if asked_driver.elapsed() < QUERY {
                continue;
            }
            let is_idle = device.driver.is_idle(&device.compute)?;
            asked_driver = Instant::now();
            // Rung, perhaps, after the last look and before the stream became idle.
            if let Some(waits) = rung() {
                return Ok(waits);
            }
            if words.failed() {
                return Err(too_late(self.layer()));
            }
            if is_idle {
                return Err(self.failed("the device came to its end without a question".into()));
            }
            if start.elapsed() > WAIT_LIMIT {
                return Err(self.failed(format!("the device did not ask within {} s", WAIT_LIMIT.as_secs())));
            }
        }
    }

    /// The question. Rows are there only if the device waits.
    fn ask<'a>(&self, paper: &'a [u8], waits: bool) -> RouteAsk<'a> {
        let [link, ids, weights, _] = self.asked.clone();
        let link: &[u64] = bytemuck::cast_slice(&paper[link]);
        let (bytes, nanoseconds) = (link[0], link[1]);
        let link =
            (bytes > 0 && nanoseconds > 0).then(|| LinkSample { bytes, seconds: nanoseconds as f64 / 1e9 });
        let rows = if waits { self.asked_rows.clone() } else { 0..0 };
        self.point.ask(&paper[ids], &paper[weights], &paper[rows], link)
    }

    /// Nobody reads the reply to a question that did not wait.
    fn check_unasked(&self, reply: &RouteReply) -> Result<()> {
        let RouteReply { table, fetch, read_in_place, host } = reply;
        if table.is_empty() && fetch.is_empty() && read_in_place.is_empty() && host.is_empty() {
            return Ok(());
        }
        Err(self.failed("every route hits, and the reply is not empty".into()))
    }

    fn failed(&self, why: String) -> Error {
        Error::StepFailed { layer: self.layer(), why }
    }
}

/// The error of a step in which the device gave up waiting.
pub(crate) fn too_late(layer: u32) -> Error {
    Error::StepFailed { layer, why: "the host took longer than a second to answer, or to compute".into() }
}

/// Writes the answer: where each expert is, fetches, changes of the table. Its reply word counts both and says whether rows
/// will come. The error says what is wrong with the reply.
fn write_answer(
    sizes: &Sizes,
    reply: &RouteReply,
    ids: &[i32],
    before: &[i32],
    answer: &mut [i32],
) -> std::result::Result<u32, String> {
    let (slots, lists) = answer.split_at_mut(sizes.row.n_experts);
    slots.copy_from_slice(before);
    reply.settle(&sizes.row, ids, slots)?;
    for (slot, &before) in slots.iter_mut().zip(before) {
        // Computed while the host decided.
        if before >= 0 && (0..sizes.row.n_slots as i32).contains(slot) {
            *slot = NOWHERE;
        }
    }
    let fetched = reply.fetch.iter().flat_map(|fetch| [fetch.from.record as i32, fetch.slot as i32]);
    let changed = reply.table.iter().flat_map(|change| [change.entry as i32, change.slot]);
    lists.iter_mut().zip(fetched.chain(changed)).for_each(|(word, value)| *word = value);
    let (n_fetched, n_changes) = (reply.fetch.len() as u32, reply.table.len() as u32);
    let has_rows = u32::from(!reply.host.is_empty());
    Ok(n_fetched | n_changes << COUNT_BITS | has_rows << (2 * COUNT_BITS))
}

#[cfg(test)]
mod tests {
    use freetoken_backend::TableChange;

    use freetoken_backend::{Banked, Fetch, ON_HOST, TableRow};

    use super::*;

    /// Layer 1 of 2, five experts, four slots, two rows of two routes.
    const SIZES: Sizes = Sizes {
        n_rows: 2,
        top_k: 2,
        hidden: 8,
        row: TableRow { n_experts: 5, n_slots: 4, n_records: 3, first_entry: 5, n_entries: 10 },
    };

    #[test]
    fn an_answer_names_what_was_missing_and_counts_its_lists() {
        let change = |entry, slot| TableChange { entry, slot };
        let reply = RouteReply {
            table: vec![change(9, -1), change(6, 0)],
            fetch: vec![Fetch { from: Banked { expert: 1, record: 2 }, slot: 0 }],
            read_in_place: vec![Banked { expert: 3, record: 1 }],
            host: vec![2],
        };
        let mut answer = [99; 5 * ANSWER_WORDS];
        // Expert 4 leaves its slot to expert 1; expert 0 hits.
        let counts = write_answer(&SIZES, &reply, &[1, 2, 3, 0], &[2, -1, -1, -1, 0], &mut answer);
        assert_eq!(counts, Ok(1 | 2 << 12 | 1 << 24));
        assert_eq!(answer[..5], [NOWHERE, 0, ON_HOST, 4 + 1, NOWHERE]);
        assert_eq!(answer[5..12], [2, 0, 9, -1, 6, 0, 99]);
    }

    #[test]
    fn the_longest_answer_fits() {
        let n = MAX_EXPERTS as u32;
        assert!(2 * n < 1 << COUNT_BITS);
        assert_eq!(size_of::<Parameters>(), 17 * 8 + 6 * 4);
        let sizes = Sizes {
            row: TableRow {
                n_experts: MAX_EXPERTS,
                n_slots: MAX_EXPERTS,
                n_records: MAX_EXPERTS,
                n_entries: MAX_EXPERTS,
                first_entry: 0,
            },
            ..SIZES
        };
        let slots = |slot: fn(u32) -> i32| (0..n).map(move |entry| TableChange { entry, slot: slot(entry) });
        let reply = RouteReply {
            table: slots(|_| -1).chain(slots(|entry| entry as i32)).collect(),
            fetch: (0..n).map(|expert| Fetch { from: Banked::own(expert), slot: expert }).collect(),
            ..RouteReply::default()
        };
        let mut answer = vec![99; MAX_EXPERTS * ANSWER_WORDS];
        write_answer(&sizes, &reply, &[0; 4], &[-1; MAX_EXPERTS], &mut answer).unwrap();
        assert_eq!(answer[answer.len() - 2..], [MAX_EXPERTS as i32 - 1; 2]);
    }
}
