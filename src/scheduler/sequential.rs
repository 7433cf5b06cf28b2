//! [`Sequential`]: a service that answers one request after the other on a thread of its own, and computes of each prompt only
//! what the one before did not begin with.
//!
//! Every token is drawn from the whole row of logits on the host, which is where masks, biases and log-probabilities are easy.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Instant,
};

use freetoken_backend::PAGE_TOKENS;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::{Ended, Event, Events, Logprob, Refusal, Request, Service, Stats, Stop, Token, Usage};
use crate::engine::{
    Engine, EngineError, Sequence,
    sampling::{SamplingParams, TokenCounts, sample_row},
};

/// Seconds after which a client whose request was refused may try again.
const RETRY_SECONDS: u32 = 5;

/// Answers requests one after the other. Dropping it ends the thread behind the requests that wait.
pub struct Sequential {
    jobs: Mutex<Sender<Job>>,
    counts: Arc<Mutex<Stats>>,
    start: Instant,
    context: usize,
    vocab: usize,
    most_waiting: usize,
}

struct Job {
    request: Request,
    events: UnboundedSender<Event>,
}

impl Sequential {
    /// Takes over an engine; `most_waiting` requests may wait behind the one that is answered.
    ///
    /// # Errors
    /// The system's, where it makes no thread.
    pub fn start(engine: Engine, most_waiting: usize) -> std::io::Result<Self> {
        let (jobs, waiting) = channel();
        let kv_pages = engine.context().div_ceil(PAGE_TOKENS);
        let counts = Arc::new(Mutex::new(Stats { kv_pages, ..Stats::default() }));
        let (context, vocab) = (engine.context(), engine.model().sizes().vocab);
        let worker = Worker::new(engine, counts.clone());
        thread::Builder::new().name("engine".into()).spawn(move || worker.run(&waiting))?;
        Ok(Sequential { jobs: Mutex::new(jobs), counts, start: Instant::now(), context, vocab, most_waiting })
    }
}

impl Service for Sequential {
    fn submit(&self, request: Request) -> Result<Events, Refusal> {
        assert!(!request.prompt.is_empty(), "a prompt has one token at least");
        let biased = request.logit_bias.iter().map(|(id, _)| *id as usize);
        assert!(biased.max().is_none_or(|id| id < self.vocab), "biases are for tokens of the model");
        let n_tokens = request.prompt.len();
        if n_tokens >= self.context {
            return Err(Refusal::TooLong { n_tokens, context: self.context });
        }
        let mut counts = lock(&self.counts);
        if counts.n_waiting >= self.most_waiting.max(1) {
            return Err(Refusal::Full { n_waiting: counts.n_waiting, retry_seconds: RETRY_SECONDS });
        }
        let (events, heard) = unbounded_channel();
        lock(&self.jobs).send(Job { request, events }).map_err(|_| Refusal::ShuttingDown)?;
        counts.n_waiting += 1;
        Ok(heard)
    }

    fn context(&self) -> usize {
        self.context
    }

    fn stats(&self) -> Stats {
        Stats { uptime_seconds: self.start.elapsed().as_secs_f64(), ..lock(&self.counts).clone() }
    }
}

/// The thread's half.
struct Worker {
    engine: Engine,
    /// What is in the cache. Its parameters are never used: tokens are drawn here.
    sequence: Sequence,
    counts: Arc<Mutex<Stats>>,
    /// `[vocab]`, as the model gave them.
    logits: Vec<f32>,
    /// `[vocab]`, with biases, penalties and the mask.
    edited: Vec<f32>,
    sorted: Vec<(f32, u32)>,
    /// `[vocab / 32]`
    mask: Vec<u32>,
}

/// How a request ended that did not fail.
enum Over {
    Answered(Stop),
    ClientLeft,
}

impl Worker {
    fn new(engine: Engine, counts: Arc<Mutex<Stats>>) -> Self {
        let vocab = engine.model().sizes().vocab;
        Worker {
            sequence: empty_sequence(&engine),
            engine,
            counts,
            logits: vec![0.0; vocab],
            edited: vec![0.0; vocab],
            sorted: Vec::with_capacity(vocab),
            mask: vec![0; vocab.div_ceil(32)],
        }
    }

    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(Job { request, events }) = jobs.recv() {
            self.count(|counts| {
                counts.n_waiting -= 1;
                counts.n_running = 1;
            });
            let mut usage = Usage { prompt_tokens: request.prompt.len(), ..Usage::default() };
            let over = if events.is_closed() {
                Ok(Over::ClientLeft)
            } else {
                self.answer(request, &events, &mut usage)
            };
            let left = matches!(over, Ok(Over::ClientLeft));
            if over.is_err() {
                self.engine.release(&mut self.sequence);
                self.sequence = empty_sequence(&self.engine);
            }
            let n_kept = self.sequence.n_computed().div_ceil(PAGE_TOKENS);
            self.count(|counts| {
                counts.n_running = 0;
                counts.n_ended += 1;
                counts.n_cancelled += u64::from(left);
                (counts.kv_pages_running, counts.kv_pages_cached) = (0, n_kept);
            });
            // Nobody hears it where the client left.
            let _ = match over {
                Ok(Over::Answered(stop)) => events.send(Event::Ended(Ended { stop, usage })),
                Ok(Over::ClientLeft) => continue,
                Err(error) => events.send(Event::Failed(error.to_string())),
            };
        }
    }

    fn answer(
        &mut self,
        mut request: Request,
        events: &UnboundedSender<Event>,
        usage: &mut Usage,
    ) -> Result<Over, EngineError> {
        let prompt = std::mem::take(&mut request.prompt);
        let Some(cached) = self.prefill(&prompt, events)? else { return Ok(Over::ClientLeft) };
        usage.cached_tokens = cached;
        let mut penalties = request.sampling.penalises().then(TokenCounts::default);
        prompt.iter().for_each(|&id| penalties.iter_mut().for_each(|counts| counts.add_prompt(id)));
        let most = request.max_tokens.min(self.engine.context() - prompt.len());
        loop {
            let logits = &mut self.logits;
            self.engine.score(&mut self.sequence, 1, |row| {
                logits.copy_from_slice(row);
                Ok::<(), EngineError>(())
            })?;
            self.edit(&mut request, penalties.as_ref());
            let position = self.sequence.tokens().len() as u64;
            let id = sample_row(&self.edited, &mut self.sorted, &request.sampling, position)?;
            usage.completion_tokens += 1;
            self.count(|counts| counts.decoded_tokens += 1);
            if events.send(Event::Token(self.token(id, request.logprobs))).is_err() {
                return Ok(Over::ClientLeft);
            }
            let goes_on = request.constraint.as_mut().is_none_or(|constraint| constraint.accept(id));
            if request.eos.contains(&id) || !goes_on {
                return Ok(Over::Answered(Stop::Eos));
            }
            if usage.completion_tokens >= most {
                return Ok(Over::Answered(Stop::Length));
            }
            self.sequence.push(id);
            penalties.iter_mut().for_each(|counts| counts.add_output(id));
            let pages = self.sequence.tokens().len().div_ceil(PAGE_TOKENS);
            self.count(|counts| counts.kv_pages_running = pages);
        }
    }

    /// Computes all of a prompt but its last token, and gives how many tokens were there; `None` where the client left.
    fn prefill(
        &mut self,
        prompt: &[u32],
        events: &UnboundedSender<Event>,
    ) -> Result<Option<usize>, EngineError> {
        let (last, before) = prompt.split_last().expect("a prompt has one token at least");
        self.engine.rebase(&mut self.sequence, before);
        let n_cached = self.sequence.n_computed();
        let mut n_told = n_cached;
        let counts = &self.counts;
        let mut tell = |n_computed: usize| {
            let mut counts = lock(counts);
            counts.prefilled_tokens += (n_computed - n_told) as u64;
            counts.kv_pages_running = n_computed.div_ceil(PAGE_TOKENS);
            n_told = n_computed;
            drop(counts);
            events.send(Event::Prefill { n_computed, n_cached }).is_ok()
        };
        lock(&self.counts).cached_tokens += n_cached as u64;
        if !tell(n_cached) {
            return Ok(None);
        }
        if !before.is_empty() && self.engine.prefill(&mut self.sequence, &mut tell)?.is_none() {
            return Ok(None);
        }
        self.sequence.push(*last);
        Ok(Some(n_cached))
    }

    /// Copies the row of logits with what the request changes of it.
    fn edit(&mut self, request: &mut Request, penalties: Option<&TokenCounts>) {
        self.edited.copy_from_slice(&self.logits);
        for &(id, bias) in &request.logit_bias {
            let logit = &mut self.edited[id as usize];
            *logit = if bias <= -100.0 { f32::NEG_INFINITY } else { *logit + bias };
        }
        for edit in penalties.iter().flat_map(|counts| counts.edits(&request.sampling, 0)) {
            let logit = &mut self.edited[edit.id as usize];
            *logit = edit.apply(*logit);
        }
        if let Some(constraint) = &mut request.constraint {
            self.mask.fill(0);
            constraint.allow(&mut self.mask);
            for (id, logit) in self.edited.iter_mut().enumerate() {
                if self.mask[id / 32] >> (id % 32) & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// A drawn token with the log-probabilities that were asked for.
    fn token(&mut self, id: u32, logprobs: Option<usize>) -> Token {
        let Some(n_top) = logprobs else { return Token { id, logprob: None, top: Vec::new() } };
        let best = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mass: f64 = self.logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
        let all = f64::from(best) + mass.ln();
        let logprob = |logit: f32| (f64::from(logit) - all) as f32;
        self.sorted.clear();
        self.sorted.extend(self.logits.iter().copied().zip(0..));
        let n_top = n_top.min(self.sorted.len());
        let best_first = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if n_top > 0 {
            self.sorted.select_nth_unstable_by(n_top - 1, best_first);
        }
        let top = &mut self.sorted[..n_top];
        top.sort_unstable_by(best_first);
        let top = top.iter().map(|&(logit, id)| Logprob { id, logprob: logprob(logit) }).collect();
        Token { id, logprob: Some(logprob(self.logits[id as usize])), top }
    }

    fn count(&self, change: impl FnOnce(&mut Stats)) {
        change(&mut lock(&self.counts));
    }
}

fn empty_sequence(engine: &Engine) -> Sequence {
    Sequence::new(&[], SamplingParams::GREEDY, engine.context())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
