//! The server under load: many clients on loopback that ask, listen, and often leave. What they saw, and that nothing of it
//! stays behind.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use freetoken_backend::os;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime,
    sync::oneshot,
    task::JoinSet,
};

use super::{
    super::{memory::MemoryArgs, model::DeviceArgs, synth::random_token},
    report::{Report, ReportArgs, read_bandwidth},
    table::{Cell, Column, Table, column},
};
use crate::{
    engine::EngineOptions,
    model_files::ModelFiles,
    philox,
    scheduler::{Scheduler, SchedulerOptions, Service},
    server::{ServedModel, Server, Settings, listen::listen},
};

/// Clients at a time.
const N_CLIENTS: usize = 64;
/// Beginnings that prompts share.
const N_BEGINNINGS: u64 = 8;
/// Shares of the clients that leave: before an answer, and in the middle of one.
const LEAVE: [f64; 2] = [0.1, 0.2];
/// How long a client that was refused waits, and how long everything may take to end.
const PAUSE: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);
/// Tokens of the answer whose pace is watched.
const WATCHED: usize = 400;

/// The server under load: 64 clients on loopback that ask, listen and often leave; their times, and whether anything stays
/// behind.
#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// How long the clients ask.
    #[arg(value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(2..=86_400))]
    seconds: u32,
    /// A directory with config.json and *.safetensors, or the name of one under $FREETOKEN_HOME/models
    /// [default: the demo model].
    #[arg(long, short, value_name = "DIR")]
    model: Option<PathBuf>,
    /// What the clients' requests depend on.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    report: ReportArgs,
}

const COLUMNS: [Column; 13] = [
    column("load", "", 1.0, 0),
    column("seconds", "s", 1.0, 1),
    column("requests", "requests", 1.0, 0),
    column("left", "left", 1.0, 0),
    column("refused", "refused", 1.0, 0),
    column("tokens", "tokens", 1.0, 0),
    column("tokens_per_second", "tok/s", 1.0, 1),
    column("ttft_median_seconds", "ttft ms", 1e3, 1),
    column("ttft_p99_seconds", "p99", 1e3, 1),
    column("gap_median_seconds", "gap ms", 1e3, 2),
    column("gap_p99_seconds", "p99", 1e3, 2),
    column("gap_p99_over_median", "p99/median", 1.0, 2),
    column("peak_resident_bytes", "peak MB", 1e-6, 1),
];

/// Serves a model on loopback.
///
/// # Errors
/// An answer that is none, or something that stays behind.
pub(super) fn run(args: &ServeArgs) -> Result<()> {
    let backend = args.device.open()?;
    let read_bandwidth = read_bandwidth(&*backend)?;
    let files = Arc::new(ModelFiles::open(args.model.as_deref())?);
    let options = SchedulerOptions { max_running: 4, max_waiting: N_CLIENTS };
    let engine_options = EngineOptions { max_sequences: options.max_running, ..EngineOptions::default() };
    let engine_options = args.memory.options(engine_options, &*backend, &args.device)?;
    let mut engine = files.engine(backend.clone(), &engine_options, &mut |_| ())?;
    engine.prepare(options.max_running)?;
    let vocab = engine.model().sizes().vocab;
    let scheduler = Arc::new(Scheduler::start(engine, options)?);
    let server = Arc::new(Server::new(Settings::local(files.name()), ServedModel::new(files.clone())?));
    server.serve(scheduler.clone());
    let runtime = runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let table = runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let load =
            Load { address: listener.local_addr()?, seed: args.seed, vocab, context: scheduler.context() };
        let (end, ended) = oneshot::channel();
        let listening = tokio::spawn(listen(listener, server, ended));
        let mut table = Table::new(&COLUMNS);
        load.watch("one answer alone", false, &mut table).await?;
        load.watch("one answer beside long prompts", true, &mut table).await?;
        let half = Duration::from_secs(args.seconds.into()) / 2;
        load.crowd("64 clients", half, 0, &mut table).await?;
        load.crowd("64 clients, again", half, 1 << 32, &mut table).await?;
        nothing_stays(&scheduler).await?;
        drop(end);
        tokio::time::timeout(PATIENCE, listening).await.context("the server does not end")??;
        anyhow::Ok(table)
    })?;
    let (subject, caps) = (files.name(), backend.caps());
    Report { subject, caps, read_bandwidth, expert_use: &[], table }.print(&args.report)
}

/// Waits until everything has ended, and refuses what is left.
async fn nothing_stays(scheduler: &Scheduler) -> Result<()> {
    let start = Instant::now();
    loop {
        let stats = scheduler.stats();
        if stats.n_running + stats.n_waiting + stats.cache.kv_tokens_running == 0 {
            return Ok(());
        }
        ensure!(start.elapsed() < PATIENCE, "requests or pages stay behind: {stats:?}");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Who asks what.
#[derive(Clone, Copy)]
struct Load {
    address: SocketAddr,
    seed: u64,
    vocab: usize,
    context: usize,
}

/// What clients saw.
#[derive(Default)]
struct Seen {
    n_requests: usize,
    n_left: usize,
    n_refused: usize,
    n_tokens: usize,
    /// Seconds from the request to the first token.
    to_first: Vec<f64>,
    /// Seconds between two tokens.
    gaps: Vec<f64>,
}

impl Seen {
    fn add(&mut self, other: Seen) {
        self.n_requests += other.n_requests;
        self.n_left += other.n_left;
        self.n_refused += other.n_refused;
        self.n_tokens += other.n_tokens;
        self.to_first.extend(other.to_first);
        self.gaps.extend(other.gaps);
    }

    fn row(self, load: &str, elapsed: Duration, table: &mut Table) {
        let seconds = elapsed.as_secs_f64();
        let of = |mut values: Vec<f64>| -> [Option<f64>; 2] {
            values.sort_unstable_by(f64::total_cmp);
            let at = |share: f64| values.get((share * values.len() as f64) as usize).copied();
            [at(0.5), at(0.99)]
        };
        let ([first, first_p99], [gap, gap_p99]) = (of(self.to_first), of(self.gaps));
        let cell = |value: Option<f64>| value.map_or(Cell::Empty, Cell::Number);
        table.push([
            load.into(),
            seconds.into(),
            self.n_requests.into(),
            self.n_left.into(),
            self.n_refused.into(),
            self.n_tokens.into(),
            (self.n_tokens as f64 / seconds).into(),
            cell(first),
            cell(first_p99),
            cell(gap),
            cell(gap_p99),
            cell(gap.zip(gap_p99).map(|(median, p99)| p99 / median)),
            cell(os::peak_resident_bytes().map(|bytes| bytes as f64)),
        ]);
    }
}

impl Load {
    /// Watches the pace of one long answer; `beside`: while prompts that fill most of the context are read one after the other.
    async fn watch(self, name: &str, beside: bool, table: &mut Table) -> Result<()> {
        let start = Instant::now();
        let n_tokens = WATCHED.min(self.context / 2);
        let watched = tokio::spawn(async move { self.ask(&self.tokens(1, 16), n_tokens, None).await });
        let mut n_prompts = 0;
        while beside && !watched.is_finished() {
            let prompt = self.tokens(1 << 40 | n_prompts << 20, self.context * 9 / 10);
            self.ask(&prompt, 1, None).await?;
            n_prompts += 1;
        }
        let mut seen = watched.await??;
        seen.n_requests += n_prompts as usize;
        seen.row(name, start.elapsed(), table);
        Ok(())
    }

    /// Lets all clients ask until the time is over.
    async fn crowd(self, name: &str, time: Duration, first: u64, table: &mut Table) -> Result<()> {
        let start = Instant::now();
        let mut clients = JoinSet::new();
        for client in 0..N_CLIENTS as u64 {
            clients.spawn(async move {
                let mut seen = Seen::default();
                let mut n = first + (client << 16);
                while start.elapsed() < time {
                    n += 1;
                    let one = self.chance(n).await?;
                    if one.n_refused > 0 {
                        tokio::time::sleep(PAUSE).await;
                    }
                    seen.add(one);
                }
                anyhow::Ok(seen)
            });
        }
        let mut seen = Seen::default();
        while let Some(client) = clients.join_next().await {
            seen.add(client??);
        }
        seen.row(name, start.elapsed(), table);
        Ok(())
    }

    /// The `n`-th request: a beginning that others have too, an end of its own, an answer of any length, and perhaps nobody who
    /// hears it.
    async fn chance(self, n: u64) -> Result<Seen> {
        let draw = |what: u64| philox::uniform(self.seed ^ 0x10AD, 8 * n + what);
        let beginning = (draw(0) * N_BEGINNINGS as f64) as u64;
        let longest = self.context as f64;
        let mut prompt =
            self.tokens(1 << 50 | beginning << 20, (longest * (0.05 + 0.05 * beginning as f64)) as usize);
        prompt.extend(self.tokens(1 << 51 | n << 12, 1 + (draw(1) * longest / 4.0) as usize));
        let n_tokens = 1 + (draw(2) * longest / 16.0) as usize;
        let [before, within] = LEAVE;
        let leave_after = match draw(3) {
            chance if chance < before => Some(0),
            chance if chance < before + within => Some(1 + (draw(4) * n_tokens as f64) as usize),
            _ => None,
        };
        self.ask(&prompt, n_tokens, leave_after).await
    }

    fn tokens(&self, first: u64, n: usize) -> Vec<u32> {
        (0..n as u64).map(|i| random_token(self.seed, first + i, self.vocab)).collect()
    }

    /// Asks for a continuation and listens to its end, or leaves after so many tokens.
    async fn ask(self, prompt: &[u32], n_tokens: usize, leave_after: Option<usize>) -> Result<Seen> {
        let body = json!({
            "model": "any", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": true, "stream": true,
        })
        .to_string();
        let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json";
        let request = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        let mut seen = Seen { n_requests: 1, ..Seen::default() };
        let start = Instant::now();
        let mut stream = TcpStream::connect(self.address).await?;
        stream.write_all(request.as_bytes()).await?;
        if leave_after == Some(0) {
            seen.n_left = 1;
            return Ok(seen);
        }
        let (mut heard, mut piece) = (Vec::new(), vec![0; 16 << 10]);
        let (mut n_heard, mut last) = (0, start);
        loop {
            let read = tokio::time::timeout(PATIENCE, stream.read(&mut piece)).await;
            let n = read.context("no word from the server")??;
            if n == 0 {
                break;
            }
            heard.extend_from_slice(&piece[..n]);
            let n_now = count(&heard, b"\"text\":");
            if n_now > n_heard {
                let now = Instant::now();
                let seconds = (now - last).as_secs_f64();
                if n_heard == 0 {
                    seen.to_first.push(seconds)
                } else {
                    seen.gaps.push(seconds)
                }
                (n_heard, last) = (n_now, now);
            }
            if leave_after.is_some_and(|n| n_heard >= n) {
                seen.n_left = 1;
                seen.n_tokens = n_heard;
                return Ok(seen);
            }
        }
        seen.n_tokens = n_heard;
        match heard.get(9..12) {
            Some(b"200") if count(&heard, b"data: [DONE]") == 1 => Ok(seen),
            Some(b"429") => Ok(Seen { n_refused: 1, ..seen }),
            _ => bail!("an answer that is none: {}", String::from_utf8_lossy(&heard[..heard.len().min(400)])),
        }
    }
}

/// How often `word` stands in `text`.
fn count(text: &[u8], word: &[u8]) -> usize {
    text.windows(word.len()).filter(|found| *found == word).count()
}
