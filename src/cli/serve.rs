//! `freetoken serve`: the model behind OpenAI's and Anthropic's HTTP protocols. Standard output stays empty.

mod signals;

use std::{env, fs, net::IpAddr, path::PathBuf, process, sync::Arc};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use tokio::{net::TcpListener, runtime, sync::oneshot};

use self::signals::Signals;
use super::{model::ModelArgs, terminal::note};
use crate::{
    engine::{Engine, EngineOptions},
    moe::ByteCount,
    scheduler::{Scheduler, SchedulerOptions},
    server::{ServedModel, Server, Settings, listen::listen},
};

/// Where the key may be that clients must send.
const KEY_VARIABLE: &str = "FREETOKEN_API_KEY";
/// Threads for connections; the engine has its own.
const N_THREADS: usize = 2;

/// Answer over HTTP, in OpenAI's and Anthropic's protocols.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  freetoken serve\n  freetoken serve --model ~/models/Qwen3-30B-A3B --context 32768\n  \
                  freetoken serve --host 0.0.0.0 --api-key-file key.txt"
)]
pub(super) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The address to listen on. Another than this machine's own demands a key.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    host: IpAddr,
    /// The port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 1919, value_name = "N")]
    port: u16,
    /// A file with the key that clients must send. --api-key and the variable FREETOKEN_API_KEY do the same, but other
    /// users of this machine may see a command line.
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    api_key_file: Option<PathBuf>,
    /// The key that clients must send.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// The model's name for clients [default: its directory's name].
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
    /// Refuse requests for a model of another name.
    #[arg(long)]
    strict_model: bool,
    /// Requests that are answered at a time.
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    parallel: u8,
    /// Tokens that the key-value cache holds, of all requests and of what is kept for later ones [default: twice the context].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 28))]
    kv_tokens: Option<u32>,
    /// States of recurrent layers that stay on the device for later requests to go on from [default: one for each request that is
    /// answered at a time; on the CPU, whose memory is the host's, none].
    #[arg(long, value_name = "N")]
    state_slots: Option<u16>,
    /// Host memory for states that have no slot on the device.
    #[arg(long, default_value = "1GiB", value_name = "BYTES")]
    state_cache: ByteCount,
    /// Requests that may wait; more are refused.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_waiting: u16,
    /// Requests that one client may have at a time.
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    max_per_client: u16,
    /// Let pages of this origin ask, such as http://localhost:3000, or of all with *; may be given several times.
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
}

pub(super) fn run(args: ServeArgs) -> Result<()> {
    let settings = args.settings()?;
    ensure!(
        args.host.is_loopback() || settings.api_key.is_some(),
        "--host {} lets other machines ask, which demands a key: give --api-key-file FILE, or set {KEY_VARIABLE}",
        args.host
    );
    let files = Arc::new(args.model.files()?);
    let server = Arc::new(Server::new(settings, ServedModel::new(files.clone())?));
    let runtime = runtime::Builder::new_multi_thread().worker_threads(N_THREADS).enable_all().build()?;
    let listener = runtime
        .block_on(TcpListener::bind((args.host, args.port)))
        .with_context(|| format!("cannot listen on {} port {}", args.host, args.port))?;
    note(&format!("listening on http://{}", listener.local_addr()?));
    let (end, ended) = oneshot::channel();
    let listening = runtime.spawn(listen(listener, server.clone(), ended));
    let mut engine =
        args.model.engine_with(&files, args.engine_options(), &mut |bytes| server.loaded(bytes))?;
    say_states(&engine);
    let options =
        SchedulerOptions { max_running: args.parallel.into(), max_waiting: args.max_waiting.into() };
    engine.prepare(options.max_running)?;
    server.serve(Arc::new(Scheduler::start(engine, options)?));
    runtime.block_on(async {
        // Until here, a signal ends the process as it would any other.
        let mut signals = Signals::listen()?;
        note("ready");
        signals.next().await;
        note("shutting down: running requests may finish; a second signal stops them");
        drop(end);
        tokio::select! {
            _ = listening => {}
            () = signals.next() => {}
        }
        anyhow::Ok(())
    })?;
    // The engine's thread may be in the middle of a request that nobody waits for.
    process::exit(0)
}

/// Says where states are kept for later requests.
fn say_states(engine: &Engine) {
    if let Some(kept) = engine.kept_states() {
        let [slots, host] = [kept.n_slots, kept.n_host].map(|n| ByteCount((n * kept.state_bytes) as u64));
        note(&format!(
            "states kept for later requests: {} on the device ({slots}), {} in host memory ({host})",
            kept.n_slots, kept.n_host
        ));
    }
}

impl ServeArgs {
    fn engine_options(&self) -> EngineOptions {
        let options = self.model.options(self.parallel.into());
        EngineOptions {
            kv_tokens: Some(self.kv_tokens.map_or(2 * options.context, |n| n as usize)),
            state_slots: self.state_slots.map_or(self.parallel.into(), Into::into),
            state_cache: usize::try_from(self.state_cache.0).unwrap_or(usize::MAX),
            ..options
        }
    }

    fn settings(&self) -> Result<Settings> {
        let name = match &self.model.model {
            None => "demo".into(),
            Some(path) => path.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned()),
        };
        Ok(Settings {
            strict_model: self.strict_model,
            api_key: self.key()?,
            cors_origins: self.cors_origin.clone(),
            max_requests_per_client: usize::from(self.max_per_client),
            ..Settings::local(self.model_name.clone().unwrap_or(name))
        })
    }

    fn key(&self) -> Result<Option<String>> {
        let key = match (&self.api_key_file, &self.api_key) {
            (Some(file), _) => {
                let text = fs::read_to_string(file)
                    .with_context(|| format!("--api-key-file: cannot read {}", file.display()))?;
                Some(text.trim_end_matches(['\r', '\n']).to_owned())
            }
            (None, Some(key)) => Some(key.clone()),
            (None, None) => match env::var(KEY_VARIABLE) {
                Ok(key) => Some(key),
                Err(env::VarError::NotPresent) => None,
                Err(env::VarError::NotUnicode(_)) => bail!("{KEY_VARIABLE} is not UTF-8 text"),
            },
        };
        ensure!(key.as_deref() != Some(""), "the API key is empty: give one, or leave it out");
        Ok(key)
    }
}
