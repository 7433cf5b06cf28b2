//! [`Scheduler`]: continuous batching. One thread owns the engine; between two of its steps it takes new requests, drops those
//! whose client left, computes a bounded piece of one prompt, and one token of every request that decodes.
//!
//! First come, first served. A request is taken when its prompt fits the cache as it is now, not for the most that its answer may
//! take; where room runs out later, the youngest goes back to the queue and is computed again.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread,
    time::Instant,
};

use freetoken_backend::PAGE_TOKENS;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::{
    Cache, Ended, Event, Events, Experts, Refusal, Request, Routed, Service, States, Stats, Stop, Token,
    Usage, row_draw::RowDraw,
};
use crate::{
    engine::{
        Division, Engine, EngineError, Sequence,
        sampling::{SamplingParams, TokenCounts},
    },
    moe::{Counters, Elastic},
};

/// Seconds of a piece of a prompt while others decode.
const PIECE_SECONDS: f64 = 0.02;
/// Fewest tokens of a piece.
const LEAST_PIECE: usize = 16;
/// Weight of one piece in the average time of a token.
const PIECE_WEIGHT: f64 = 0.25;
/// Seconds after which a refused client may try again, before any request has ended.
const RETRY_SECONDS: f64 = 5.0;

/// How many requests are taken.
#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    /// Requests whose tokens are computed at a time.
    pub max_running: usize,
    /// Requests that may wait behind them.
    pub max_waiting: usize,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        SchedulerOptions { max_running: 4, max_waiting: 64 }
    }
}

/// Answers many requests at a time. Dropping it ends the thread behind the requests that it has.
pub struct Scheduler {
    letters: Mutex<Sender<Letter>>,
    stats: Arc<Mutex<Stats>>,
    start: Instant,
    context: usize,
    vocab: usize,
    options: SchedulerOptions,
}

/// What the thread is told.
enum Letter {
    Request(Box<Request>, UnboundedSender<Event>),
    Divide(Division, Sender<Result<Cache, String>>),
}

impl Scheduler {
    /// Takes over an engine that was made for [`SchedulerOptions::max_running`] sequences.
    ///
    /// # Errors
    /// The system's, where it makes no thread.
    pub fn start(engine: Engine, options: SchedulerOptions) -> std::io::Result<Self> {
        let (letters, inbox) = channel();
        let stats = Arc::new(Mutex::new(Stats::default()));
        let (context, vocab) = (engine.context(), engine.model().sizes().vocab);
        let worker = Worker::new(engine, options, stats.clone());
        worker.publish();
        thread::Builder::new().name("engine".into()).spawn(move || worker.run(&inbox))?;
        Ok(Scheduler { letters: Mutex::new(letters), stats, start: Instant::now(), context, vocab, options })
    }
}

impl Service for Scheduler {
    fn submit(&self, request: Request) -> Result<Events, Refusal> {
        assert!(!request.prompt.is_empty(), "a prompt has one token at least");
        let biased = request.logit_bias.iter().map(|(id, _)| *id as usize);
        assert!(biased.max().is_none_or(|id| id < self.vocab), "biases are for tokens of the model");
        let n_tokens = request.prompt.len();
        let mut stats = lock(&self.stats);
        let context = self.context.min(stats.cache.kv_tokens);
        if n_tokens >= context {
            return Err(Refusal::TooLong { n_tokens, context });
        }
        let free_places = self.options.max_running.saturating_sub(stats.n_running);
        if stats.n_waiting >= self.options.max_waiting + free_places {
            let mean = stats.uptime_seconds / stats.n_ended.max(1) as f64;
            let seconds = if stats.n_ended > 0 { mean.clamp(1.0, 60.0) } else { RETRY_SECONDS };
            return Err(Refusal::Full { n_waiting: stats.n_waiting, retry_seconds: seconds.ceil() as u32 });
        }
        let (events, heard) = unbounded_channel();
        let letter = Letter::Request(Box::new(request), events);
        lock(&self.letters).send(letter).map_err(|_| Refusal::ShuttingDown)?;
        stats.n_waiting += 1;
        Ok(heard)
    }

    fn context(&self) -> usize {
        self.context
    }

    fn stats(&self) -> Stats {
        Stats { uptime_seconds: self.start.elapsed().as_secs_f64(), ..lock(&self.stats).clone() }
    }

    fn divide(&self, division: Division) -> Result<Cache, String> {
        let (reply, done) = channel();
        let gone = |_| "the engine's thread has ended".to_owned();
        lock(&self.letters).send(Letter::Divide(division, reply)).map_err(|_| gone(()))?;
        done.recv().map_err(|_| gone(()))?
    }
}

/// A request that has pages.
struct Running {
    request: Box<Request>,
    events: UnboundedSender<Event>,
    sequence: Sequence,
    usage: Usage,
    /// What penalties count, of a request that draws on the host.
    counts: Option<TokenCounts>,
    draws_on_host: bool,
}

impl Running {
    /// Tokens at which the prompt is looked at next where layers are recurrent: the last full page of its next common beginning, or
    /// of all of it, then its end. What is computed until there can be kept.
    fn next_stop(&self) -> usize {
        let n_computed = self.sequence.n_computed();
        let n_tokens = self.sequence.tokens().len();
        let stops = self.request.anchors.iter().copied().chain([n_tokens]);
        let full = stops.map(|n| n.min(n_tokens) / PAGE_TOKENS * PAGE_TOKENS);
        full.filter(|&n| n > n_computed).min().unwrap_or(n_tokens)
    }

    /// Whether its prompt is computed.
    fn decodes(&self) -> bool {
        self.sequence.pending().len() == 1 && self.usage.completion_tokens > 0
    }
}

/// A request without pages.
struct Waiting {
    request: Box<Request>,
    events: UnboundedSender<Event>,
    /// What was drawn before it lost its pages.
    drawn: Vec<u32>,
    usage: Usage,
}

/// How a request left.
enum Left {
    Ended(Stop),
    Cancelled,
    Failed(String),
}

/// The thread's half.
struct Worker {
    engine: Engine,
    options: SchedulerOptions,
    stats: Arc<Mutex<Stats>>,
    waiting: VecDeque<Waiting>,
    /// In the order in which they came.
    running: Vec<Running>,
    row: RowDraw,
    /// Seconds of a prompt's token, on average.
    token_seconds: Option<f64>,
    /// Sums since the start, as they will be published.
    sums: Stats,
}

impl Worker {
    fn new(engine: Engine, options: SchedulerOptions, stats: Arc<Mutex<Stats>>) -> Self {
        let row = RowDraw::new(engine.model().sizes().vocab);
        let (waiting, running) = (VecDeque::new(), Vec::with_capacity(options.max_running));
        let sums = Stats::default();
        Worker { engine, options, stats, waiting, running, row, token_seconds: None, sums }
    }

    fn run(mut self, inbox: &Receiver<Letter>) {
        while self.receive(inbox) {
            self.drop_cancelled();
            self.admit();
            self.prefill();
            self.decode();
            self.publish();
        }
    }

    /// Takes what came, and waits for something where there is nothing to do. False where nothing can come any more and all is done.
    fn receive(&mut self, inbox: &Receiver<Letter>) -> bool {
        let is_idle = self.running.is_empty() && self.waiting.is_empty();
        let mut next =
            if is_idle { inbox.recv().map_err(|_| TryRecvError::Disconnected) } else { inbox.try_recv() };
        loop {
            match next {
                Ok(Letter::Request(request, events)) => {
                    let usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
                    self.waiting.push_back(Waiting { request, events, drawn: Vec::new(), usage });
                }
                Ok(Letter::Divide(division, reply)) => {
                    let divided = self.divide(division);
                    // Nobody hears it where the client left.
                    drop(reply.send(divided));
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return !is_idle,
            }
            next = inbox.try_recv();
        }
    }

    fn drop_cancelled(&mut self) {
        while let Some(i) = self.running.iter().position(|running| running.events.is_closed()) {
            self.leave(i, Left::Cancelled);
        }
        let before = self.waiting.len();
        self.waiting.retain(|waiting| !waiting.events.is_closed());
        let n_left = (before - self.waiting.len()) as u64;
        self.sums.n_ended += n_left;
        self.sums.n_cancelled += n_left;
    }

    /// Gives pages to requests that wait, in order, while they fit beside those that run.
    fn admit(&mut self) {
        while self.running.len() < self.options.max_running
            && let Some(first) = self.waiting.front()
        {
            let n_tokens = first.request.prompt.len() + first.drawn.len();
            // A page more, and one for each that runs, so that all can go on for a while.
            let needed = n_tokens.div_ceil(PAGE_TOKENS) + 1 + self.running.len();
            let pages = self.engine.pages();
            if needed > pages.total - pages.running && !self.running.is_empty() {
                return;
            }
            let Waiting { mut request, events, drawn, mut usage } =
                self.waiting.pop_front().expect("looked at above");
            let draws_on_host = RowDraw::is_needed(&request);
            let params = if draws_on_host { SamplingParams::GREEDY } else { request.sampling };
            let capacity = (n_tokens + request.max_tokens).min(self.engine.context());
            let mut sequence = Sequence::new(&request.prompt, params, capacity);
            drawn.iter().for_each(|&id| sequence.push(id));
            let mut counts = TokenCounts::of_prompt(&request.prompt, &request.sampling, capacity)
                .filter(|_| draws_on_host);
            counts.iter_mut().for_each(|counts| drawn.iter().for_each(|&id| counts.add_output(id)));
            let most = self.engine.context() - request.prompt.len();
            request.max_tokens = request.max_tokens.min(most);
            // Without what others have computed it is only slower.
            let n_cached = self.engine.adopt(&mut sequence).unwrap_or(0);
            if drawn.is_empty() {
                usage.cached_tokens = n_cached;
                self.sums.cached_tokens += n_cached as u64;
            }
            let running = Running { request, events, sequence, usage, counts, draws_on_host };
            // A client that left is found by the next look at all of them.
            drop(running.events.send(Event::Prefill { n_computed: n_cached, n_cached }));
            self.running.push(running);
        }
    }

    /// Computes a piece of the oldest prompt that is not computed.
    fn prefill(&mut self) {
        let Some(i) = self.running.iter().position(|running| !running.decodes()) else { return };
        let others_decode = self.running.iter().any(Running::decodes);
        let running = &mut self.running[i];
        let n_before = running.sequence.n_computed();
        let n = self.engine.chunk(running.sequence.pending().len());
        let is_cut = others_decode && !self.engine.streams(n);
        let n = if is_cut { n.min(piece(self.token_seconds)) } else { n };
        let stop =
            if self.engine.is_recurrent() { running.next_stop() } else { running.sequence.tokens().len() };
        let n = n.min(stop - n_before);
        let start = Instant::now();
        let is_done = match self.engine.compute_unit(&mut running.sequence, n) {
            Ok(is_done) => is_done,
            Err(EngineError::CacheFull) if self.running.len() > 1 => return self.put_back(i),
            Err(error) => return self.leave(i, Left::Failed(error.to_string())),
        };
        if !is_done {
            return;
        }
        let n_computed = running.sequence.n_computed();
        self.sums.prefilled_tokens += (n_computed - n_before) as u64;
        if !self.engine.streams(n) {
            let seconds = start.elapsed().as_secs_f64() / n as f64;
            let mean = self.token_seconds.get_or_insert(seconds);
            *mean += PIECE_WEIGHT * (seconds - *mean);
        }
        let is_kept = n_computed == stop;
        if let Some(Err(error)) = is_kept.then(|| self.engine.keep(&running.sequence)) {
            return self.leave(i, Left::Failed(error.to_string()));
        }
        let n_cached = running.usage.cached_tokens;
        drop(running.events.send(Event::Prefill { n_computed, n_cached }));
        if running.sequence.pending().is_empty() {
            match self.engine.pick(&running.sequence) {
                Ok(()) => _ = self.choose(i, 0),
                Err(error) => self.leave(i, Left::Failed(error.to_string())),
            }
        }
    }

    /// Computes a token of every request whose prompt is computed.
    fn decode(&mut self) {
        loop {
            let mut sequences: Vec<&mut Sequence> =
                self.running.iter_mut().filter(|r| r.decodes()).map(|r| &mut r.sequence).collect();
            if sequences.is_empty() {
                return;
            }
            match self.engine.step(&mut sequences) {
                Ok(()) => break,
                // The youngest makes room for the others.
                Err(EngineError::CacheFull) if self.running.len() > 1 => {
                    self.put_back(self.running.len() - 1)
                }
                Err(error) => {
                    while let Some(i) = self.running.iter().position(Running::decodes) {
                        self.leave(i, Left::Failed(error.to_string()));
                    }
                    return;
                }
            }
        }
        let (mut i, mut row) = (0, 0);
        while i < self.running.len() {
            // A sequence of the step has no pending token until its next one is chosen.
            let in_step = self.running[i].sequence.pending().is_empty();
            let stays = !in_step || self.choose(i, row);
            row += usize::from(in_step);
            i += usize::from(stays);
        }
    }

    /// Draws the next token of a request from a row of the last step, and sends it. Whether the request goes on.
    fn choose(&mut self, i: usize, row: usize) -> bool {
        let token = match self.drawn(i, row) {
            Ok(token) => token,
            Err(error) => {
                self.leave(i, Left::Failed(error.to_string()));
                return false;
            }
        };
        let id = token.id;
        let running = &mut self.running[i];
        running.usage.completion_tokens += 1;
        self.sums.decoded_tokens += 1;
        if running.events.send(Event::Token(token)).is_err() {
            self.leave(i, Left::Cancelled);
            return false;
        }
        let goes_on = running.request.constraint.as_mut().is_none_or(|constraint| constraint.accept(id));
        let stop = if running.request.eos.contains(&id) || !goes_on {
            Some(Stop::Eos)
        } else if running.usage.completion_tokens >= running.request.max_tokens {
            Some(Stop::Length)
        } else {
            None
        };
        if let Some(stop) = stop {
            self.leave(i, Left::Ended(stop));
            return false;
        }
        running.sequence.push(id);
        running.counts.iter_mut().for_each(|counts| counts.add_output(id));
        true
    }

    fn drawn(&mut self, i: usize, row: usize) -> Result<Token, EngineError> {
        let running = &mut self.running[i];
        if running.draws_on_host {
            self.engine.logits(row, &mut self.row.logits)?;
            let position = running.sequence.tokens().len();
            Ok(self.row.draw(&mut running.request, running.counts.as_ref(), position)?)
        } else {
            let id = self.engine.draw(row, &running.sequence)?;
            Ok(Token { id, logprob: None, top: Vec::new() })
        }
    }

    /// Takes the pages of a request, which waits again before all others.
    fn put_back(&mut self, i: usize) {
        let Running { request, events, mut sequence, usage, .. } = self.take(i);
        let drawn = sequence.tokens()[request.prompt.len()..].to_vec();
        self.end(&mut sequence);
        self.waiting.push_front(Waiting { request, events, drawn, usage });
    }

    /// Gives back what a sequence has, and keeps what is computed of it.
    fn end(&mut self, sequence: &mut Sequence) {
        // A device that cannot be read fails the next step too, which tells why.
        drop(self.engine.end(sequence));
    }

    /// Lets a request go and tells its client.
    fn leave(&mut self, i: usize, left: Left) {
        let Running { events, mut sequence, usage, .. } = self.take(i);
        match left {
            Left::Failed(_) => self.engine.release(&mut sequence),
            Left::Ended(_) | Left::Cancelled => self.end(&mut sequence),
        }
        self.sums.n_ended += 1;
        let last = match left {
            Left::Ended(stop) => Event::Ended(Ended { stop, usage }),
            Left::Failed(why) => Event::Failed(why),
            Left::Cancelled => {
                self.sums.n_cancelled += 1;
                return;
            }
        };
        // Published first: whoever hears the end finds it in the sums. Nobody hears it where the client left.
        self.publish();
        drop(events.send(last));
    }

    /// Takes a request out; its chunk may be half way through the layers.
    fn take(&mut self, i: usize) -> Running {
        let reads = self.running.iter().position(|running| !running.decodes()) == Some(i);
        let mut running = self.running.remove(i);
        if reads {
            self.engine.abandon(&mut running.sequence);
        }
        running
    }

    fn divide(&mut self, division: Division) -> Result<Cache, String> {
        // A chunk that is half way through the layers is done first.
        let open =
            self.running.iter_mut().find(|running| !running.decodes()).filter(|_| self.engine.is_open());
        if let Some(running) = open {
            while !self.engine.compute_unit(&mut running.sequence, 0).map_err(|error| error.to_string())? {}
        }
        let mut sequences: Vec<&mut Sequence> = self.running.iter_mut().map(|r| &mut r.sequence).collect();
        self.engine.divide(division, &mut sequences).map_err(|error| error.to_string())?;
        self.publish();
        Ok(self.cache())
    }

    fn cache(&self) -> Cache {
        let (engine, pages) = (&self.engine, self.engine.pages());
        let experts = engine.elastic().map(|elastic| {
            let counters = elastic.counters();
            Experts {
                n_slots: elastic.n_slots(),
                n_experts: elastic.n_experts(),
                record_bytes: elastic.record_bytes() as u64,
                routed: routed(&counters.decode),
                streamed: counters.prefill.n_fetched,
            }
        });
        let states = engine.kept_states().map(|kept| States {
            n_slots: kept.n_slots,
            n_in_slots: kept.n_in_slots,
            n_host: kept.n_host,
            n_in_host: kept.n_in_host,
            state_bytes: kept.state_bytes as u64,
            slot_hits: kept.counters.slot_hits,
            host_hits: kept.counters.host_hits,
            spilled: kept.counters.spilled,
            dropped: kept.counters.dropped,
        });
        Cache {
            kv_tokens: pages.total * PAGE_TOKENS,
            kv_tokens_running: pages.running * PAGE_TOKENS,
            kv_tokens_kept: pages.kept * PAGE_TOKENS,
            kv_token_bytes: engine.page_bytes() / PAGE_TOKENS as u64,
            state_bytes: engine.state_device_bytes(),
            states,
            experts,
        }
    }

    fn publish(&self) {
        let cache = self.cache();
        let mut stats = lock(&self.stats);
        // Letters that were not read yet wait too.
        let n_unread = stats.n_waiting + stats.n_running + stats.n_ended as usize;
        let n_known = self.waiting.len() + self.running.len() + self.sums.n_ended as usize;
        let n_unread = n_unread.saturating_sub(n_known);
        // The same memory every time: this is behind every step.
        let mut layers = std::mem::take(&mut stats.layers);
        layers.clear();
        layers.extend(self.engine.elastic().into_iter().flat_map(Elastic::layer_counters).map(routed));
        *stats = Stats {
            n_running: self.running.len(),
            n_waiting: self.waiting.len() + n_unread,
            cache,
            layers,
            ..self.sums.clone()
        };
    }
}

fn routed(counters: &Counters) -> Routed {
    let Counters { hits, fetched, in_place, host, .. } = *counters;
    Routed { hits, fetched, in_place, on_host: host }
}

/// Tokens of a piece of a prompt that takes about [`PIECE_SECONDS`].
fn piece(token_seconds: Option<f64>) -> usize {
    let fits = token_seconds.map_or(LEAST_PIECE as f64, |seconds| PIECE_SECONDS / seconds.max(1e-9));
    1 << (fits as usize).clamp(LEAST_PIECE, 1 << 20).ilog2()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
