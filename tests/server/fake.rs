//! A service that follows a script, and a client of the server in front of it.

use std::{
    collections::VecDeque,
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request as HttpRequest, Response, StatusCode},
};
use freetoken::{
    engine::Division,
    formats::tokenizer::Tokenizer,
    model_files::ModelFiles,
    scheduler::{Cache, Ended, Event, Events, Logprob, Refusal, Request, Service, Stats, Stop, Token, Usage},
    server::{ServedModel, Server, Settings, app},
};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tower::ServiceExt;

/// Tokens that prompt and answer may have together.
pub(super) const CONTEXT: usize = 4096;
/// Prompt tokens that every answer says were cached.
pub(super) const CACHED: usize = 3;
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_moe-bf16");

/// A template of the Hermes dialect, with a switch for thinking.
const TEMPLATE: &str = "\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}\
{{- '</tools> Call with <tool_call></tool_call>.<|im_end|>\\n' }}{%- endif %}\
{%- for message in messages %}\
{{- '<|im_start|>' + message.role + '\\n' }}\
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}\
{{- message.content }}\
{%- for call in message.tool_calls or [] %}\
{{- '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}{%- endfor %}\
{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";

/// What the service does with a request.
pub(super) enum Script {
    /// Says a text and ends.
    Says(&'static str, Stop),
    /// The same, where a constraint allows it; says what it must otherwise.
    Guided(&'static str),
    /// Says a text and then nothing more.
    Hangs(&'static str),
    /// Says a text and fails.
    Fails(&'static str),
    /// Says a text, and its thread ends.
    Dies(&'static str),
    /// Is not taken.
    Refused(Refusal),
}

#[derive(Default)]
struct State {
    scripts: VecDeque<Script>,
    requests: Vec<Asked>,
    open: Vec<UnboundedSender<Event>>,
}

/// What a test sees of a request.
pub(super) struct Asked {
    pub(super) request: Request,
    pub(super) prompt: String,
}

/// The service.
pub(super) struct Fake {
    state: Mutex<State>,
    tokenizer: Arc<ModelFiles>,
}

/// A server with a model of a few hundred tokens, and a client.
pub(super) struct Client {
    pub(super) fake: Arc<Fake>,
    pub(super) server: Arc<Server>,
    app: Router,
}

/// An answer.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) text: String,
}

/// One server-sent event.
#[derive(Debug)]
pub(super) struct SseEvent {
    pub(super) name: String,
    pub(super) data: Value,
}

/// Tokens of a model that answers in channels.
const CHANNELS: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"];

/// A model whose template teaches a dialect by this word, with further special tokens.
fn files(taught: &str, tokens: &[&str]) -> Arc<ModelFiles> {
    let dir = tempfile::tempdir().expect("a folder");
    for file in ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"] {
        fs::copy(Path::new(GOLDEN).join(file), dir.path().join(file)).expect("the golden file is copied");
    }
    let path = dir.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).expect("read")).expect("JSON");
    let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
    for token in tokens {
        let last = added.last().expect("there are some").clone();
        let id = last["id"].as_u64().expect("an id") + 1;
        added.push(
            json!({ "id": id, "content": token, "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false }),
        );
    }
    fs::write(path, tokenizer.to_string()).expect("written");
    let template = format!("{{# {taught} #}}{TEMPLATE}");
    let config = json!({ "chat_template": template, "eos_token": "<|im_end|>" });
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).expect("written");
    Arc::new(ModelFiles::open(Some(dir.path())).expect("a model"))
}

/// A server that serves, with these settings, where requests are answered by these scripts in turn.
pub(super) fn client_with(settings: Settings, scripts: impl IntoIterator<Item = Script>) -> Client {
    loading_client(settings).serving(scripts)
}

/// A server whose model's template teaches a dialect by this word.
pub(super) fn client_of(taught: &str, scripts: impl IntoIterator<Item = Script>) -> Client {
    Client::new(Settings::local("tiny"), files(taught, &[])).serving(scripts)
}

/// A server whose model answers in channels.
pub(super) fn client_of_channels(scripts: impl IntoIterator<Item = Script>) -> Client {
    Client::new(Settings::local("tiny"), files("<|channel|><|message|>", &CHANNELS)).serving(scripts)
}

/// The same with the settings of a server for this machine alone.
pub(super) fn client(scripts: impl IntoIterator<Item = Script>) -> Client {
    client_with(Settings::local("tiny"), scripts)
}

/// A server whose model is still loading.
pub(super) fn loading_client(settings: Settings) -> Client {
    Client::new(settings, files("<tool_call>", &[]))
}

impl Client {
    fn new(settings: Settings, files: Arc<ModelFiles>) -> Self {
        let model = ServedModel::new(files.clone()).expect("a model with a tokenizer");
        let server = Arc::new(Server::new(settings, model));
        let fake = Arc::new(Fake { state: Mutex::default(), tokenizer: files });
        Client { fake, app: app(server.clone()), server }
    }

    fn serving(self, scripts: impl IntoIterator<Item = Script>) -> Self {
        self.fake.state.lock().expect("no test panicked").scripts.extend(scripts);
        self.server.serve(self.fake.clone());
        self
    }

    pub(super) async fn send(&self, request: HttpRequest<Body>) -> Response<Body> {
        self.app.clone().oneshot(request).await.expect("routes do not fail")
    }

    pub(super) async fn raw(&self, path: &str, body: impl Into<Body>) -> Answer {
        self.answer(HttpRequest::post(path).body(body.into()).expect("a request")).await
    }

    pub(super) async fn answer(&self, request: HttpRequest<Body>) -> Answer {
        let response = self.send(request).await;
        let (parts, body) = response.into_parts();
        let bytes = to_bytes(body, usize::MAX).await.expect("a body");
        let text = String::from_utf8(bytes.to_vec()).expect("answers are UTF-8");
        Answer { status: parts.status, headers: parts.headers, text }
    }

    pub(super) async fn post(&self, path: &str, body: Value) -> Answer {
        self.raw(path, body.to_string()).await
    }

    pub(super) async fn get(&self, path: &str) -> Answer {
        self.answer(HttpRequest::get(path).body(Body::empty()).expect("a request")).await
    }

    /// The requests that the service saw so far.
    pub(super) fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut self.fake.state.lock().expect("no test panicked").requests)
    }

    /// Waits until nobody hears the answers that hang.
    pub(super) async fn all_left(&self) {
        for _ in 0..500 {
            if self.fake.state.lock().expect("no test panicked").open.iter().all(|events| events.is_closed())
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("a request goes on that nobody hears");
    }
}

impl Answer {
    pub(super) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {}", self.text))
    }

    /// The body of an answer that went well.
    pub(super) fn ok(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        self.json()
    }

    /// The message of an error in OpenAI's form.
    pub(super) fn error(&self, status: u16) -> Value {
        assert_eq!(self.status.as_u16(), status, "{}", self.text);
        self.json()["error"].clone()
    }

    /// The events of a stream, comments left out.
    pub(super) fn events(&self) -> Vec<SseEvent> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text);
        assert_eq!(self.headers["content-type"], "text/event-stream");
        events(&self.text)
    }
}

pub(super) fn events(text: &str) -> Vec<SseEvent> {
    let mut events = Vec::new();
    for frame in text.split("\n\n").filter(|frame| !frame.is_empty() && !frame.starts_with(':')) {
        let field = |name: &str| frame.lines().find_map(|line| line.strip_prefix(name));
        let data = field("data: ").unwrap_or_else(|| panic!("an event without data: {frame}"));
        let data = if data == "[DONE]" { json!("[DONE]") } else { serde_json::from_str(data).expect("JSON") };
        events.push(SseEvent { name: field("event: ").unwrap_or_default().to_owned(), data });
    }
    events
}

impl Fake {
    fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer.tokenizer().expect("it has one")
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.tokenizer().encode(text, false).expect("encodes")
    }

    /// The tokens that a script says, and how it ends.
    fn tokens(&self, text: &str, request: &mut Request, guided: bool) -> Vec<u32> {
        let mut wanted: VecDeque<u32> = self.encode(text).into();
        let Some(constraint) = request.constraint.as_mut().filter(|_| guided) else { return wanted.into() };
        let vocab = self.tokenizer().vocab_size();
        let mut said = Vec::new();
        while said.len() < request.max_tokens {
            let mut mask = vec![0u32; vocab.div_ceil(32)];
            constraint.allow(&mut mask);
            let allowed = |id: u32| mask[id as usize / 32] >> (id % 32) & 1 == 1;
            let end = request.eos.iter().copied().find(|id| allowed(*id));
            let token = match wanted.front() {
                Some(&id) if allowed(id) => wanted.pop_front().expect("it is there"),
                // What it must say to get on, and where it may end there is nothing that it must.
                _ => match end {
                    Some(end) => end,
                    None => (0..vocab as u32).find(|id| allowed(*id)).expect("a grammar allows something"),
                },
            };
            let goes_on = constraint.accept(token);
            if Some(token) == end {
                break;
            }
            said.push(token);
            if !goes_on {
                break;
            }
        }
        said
    }
}

impl Service for Fake {
    fn submit(&self, mut request: Request) -> Result<Events, Refusal> {
        let (events, heard) = unbounded_channel();
        let mut state = self.state.lock().expect("no test panicked");
        let script = state.scripts.pop_front().expect("a script for every request");
        let (text, guided) = match script {
            Script::Refused(refusal) => return Err(refusal),
            Script::Guided(text) => (text, true),
            Script::Says(text, _) | Script::Hangs(text) | Script::Fails(text) | Script::Dies(text) => {
                (text, false)
            }
        };
        let prompt = self.tokenizer().decode(&request.prompt, false).expect("decodes");
        let mut tokens = self.tokens(text, &mut request, guided);
        let cut = tokens.len() > request.max_tokens;
        tokens.truncate(request.max_tokens);
        let ends = !cut && matches!(script, Script::Says(_, Stop::Eos) | Script::Guided(_));
        tokens.extend(request.eos.first().filter(|_| ends));
        let prompt_tokens = request.prompt.len();
        let n_cached = CACHED.min(prompt_tokens);
        let send = |event| events.send(event).expect("somebody hears it");
        send(Event::Prefill { n_computed: n_cached, n_cached });
        send(Event::Prefill { n_computed: prompt_tokens, n_cached });
        for &id in &tokens {
            let top = 0..request.logprobs.unwrap_or_default() as u32;
            let top = top.map(|i| Logprob { id: (id + i) % 256, logprob: -0.5 - i as f32 }).collect();
            send(Event::Token(Token { id, logprob: request.logprobs.map(|_| -0.5), top }));
        }
        let usage = Usage { prompt_tokens, cached_tokens: n_cached, completion_tokens: tokens.len() };
        match script {
            Script::Says(_, _) if cut => send(Event::Ended(Ended { stop: Stop::Length, usage })),
            Script::Says(_, stop) => send(Event::Ended(Ended { stop, usage })),
            Script::Guided(_) => send(Event::Ended(Ended { stop: Stop::Eos, usage })),
            Script::Fails(_) => send(Event::Failed("the device is gone".into())),
            Script::Hangs(_) => state.open.push(events),
            Script::Dies(_) | Script::Refused(_) => {}
        }
        state.requests.push(Asked { request, prompt });
        Ok(heard)
    }

    fn context(&self) -> usize {
        CONTEXT
    }

    fn stats(&self) -> Stats {
        let cache = Cache { kv_tokens: 4096, ..Cache::default() };
        Stats { cache, decoded_tokens: 7, ..Stats::default() }
    }

    fn divide(&self, division: Division) -> Result<Cache, String> {
        match division.kv_tokens {
            Some(kv_tokens) if kv_tokens <= 8192 => Ok(Cache { kv_tokens, ..Cache::default() }),
            _ => Err("8192 tokens would fit".into()),
        }
    }
}
