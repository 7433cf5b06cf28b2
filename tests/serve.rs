//! `freetoken serve`, as a user starts it and a client talks to it, with the demo model.

use std::{
    env, fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/demo");
const CHAT: &str = "/v1/chat/completions";
/// Longer than anything here takes, so that a test that hangs fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server.
struct Serving {
    child: Child,
    address: String,
    said: BufReader<std::process::ChildStderr>,
}

fn serve(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freetoken"));
    command.args(["serve", "--backend", "cpu", "--threads", "2"]).args(args);
    if !args.contains(&"--model") {
        command.args(["--model", DEMO]);
    }
    if !args.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    command.env("FREETOKEN_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/home"));
    command.env_remove("FREETOKEN_API_KEY");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

impl Serving {
    fn start(args: &[&str]) -> Self {
        let mut child = serve(args).spawn().expect("the binary starts");
        let said = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut server = Serving { child, address: String::new(), said };
        while server.line() != "ready" {}
        server
    }

    /// The next line that it says.
    fn line(&mut self) -> String {
        let mut line = String::new();
        assert!(self.said.read_line(&mut line).expect("UTF-8") > 0, "the server ended");
        if let Some((_, address)) = line.trim().split_once("listening on http://") {
            self.address = address.to_owned();
        }
        line.trim().to_owned()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream
    }

    /// Sends a request on a connection of its own.
    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        write!(stream, "{head}Content-Length: {length}\r\n\r\n{body}").expect("it is taken");
        stream
    }

    fn answer(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut text = String::new();
        self.send(method, path, body).read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        (status.expect("a status"), if chunked { unchunked(body) } else { body.to_owned() })
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.answer("POST", path, &body.to_string());
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    fn get(&self, path: &str) -> Value {
        let (status, text) = self.answer("GET", path, "");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    /// Waits until a figure of the engine is what it should be.
    fn wait_for(&self, figure: &str, value: u64) {
        until(&format!("{figure} is {value}"), || self.get("/v1/stats")["service"][figure] == value);
    }

    #[cfg(unix)]
    fn terminate(&self) {
        let killed = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        assert!(killed.is_ok_and(|status| status.success()));
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn unchunked(mut body: &str) -> String {
    let mut text = String::new();
    while let Some((length, rest)) = body.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).expect("a length");
        text.push_str(&rest[..length]);
        body = &rest[length + 2..];
        if length == 0 {
            break;
        }
    }
    text
}

fn france(more: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "What is the capital of France?" }]);
    let mut body = json!({ "model": "demo", "messages": messages, "temperature": 0 });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// A story that goes on for many tokens.
fn story() -> Value {
    let messages = json!([{ "role": "user", "content": "Tell me a story about a fox named Rusty who lost a red kite." }]);
    json!({ "model": "demo", "messages": messages, "temperature": 0, "ignore_eos": true, "stream": true })
}

#[test]
fn every_protocol_gives_the_demo_models_answer() {
    let server = Serving::start(&[]);
    assert_eq!(server.get("/health")["status"], "ok");
    assert_eq!(server.get("/v1/models")["data"][0]["id"], "demo");
    let answer = "The capital of France is Paris.";
    let chat = server.post(CHAT, &france(json!({})));
    assert_eq!(chat["choices"][0]["message"]["content"], answer);
    assert_eq!(
        (&chat["usage"]["prompt_tokens"], &chat["usage"]["completion_tokens"]),
        (&json!(15), &json!(8))
    );
    let long = json!({ "messages": [
        { "role": "system", "content": "You answer questions about countries, towns and rivers in one short sentence." },
        { "role": "user", "content": "What is the capital of France?" },
    ] });
    server.post(CHAT, &france(long.clone()));
    let again = server.post(CHAT, &france(long));
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(10), "{again}");
    let (status, stream) = server.answer("POST", CHAT, &france(json!({ "stream": true })).to_string());
    assert!(status == 200 && stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let message = server.post("/v1/messages", &france(json!({ "max_tokens": 50 })));
    assert_eq!(message["content"][0]["text"], answer);
    let input = json!({ "model": "demo", "input": "What is the capital of France?", "temperature": 0 });
    assert_eq!(server.post("/v1/responses", &input)["output"][0]["content"][0]["text"], answer);
    let raw = json!({ "model": "demo", "prompt": "Once upon a time, there was a", "temperature": 0, "max_tokens": 12 });
    let text = server.post("/v1/completions", &raw);
    assert_eq!(text["choices"][0]["text"], " kind girl named Rose. Rose had just moved to a new");
    let (_, metrics) = server.answer("GET", "/metrics", "");
    assert!(
        metrics.contains("freetoken_requests_ended_total{path=\"/v1/messages\",status=\"200\"} 1"),
        "{metrics}"
    );
}

/// An agent's exchange: what is sent again is not computed again, also behind an edited answer and a dropped thought.
fn turns_go_on_from_what_is_kept(args: &[&str]) {
    let server = Serving::start(args);
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    let system = message("system", &"You mend small programs and say what you did. ".repeat(8));
    let ask = |messages: &[&Value]| {
        let body =
            json!({ "model": "any", "messages": messages, "max_tokens": 12, "temperature": 0, "seed": 1 });
        let answer = server.post(CHAT, &body);
        let count = |what: &Value| what.as_u64().expect("a count");
        let usage = &answer["usage"];
        let cached = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        (answer["choices"][0]["message"]["content"].clone(), count(&usage["prompt_tokens"]), cached)
    };
    let (first, second) = (message("user", "Which file is it?"), message("user", "Mend it, then."));
    let thought = message("assistant", "<think>It names a path. I have not seen it.</think>It is main.rs.");
    let (answer, n_first, cached) = ask(&[&system, &first]);
    assert_eq!(cached, 0);
    // A page, and what only opens the answer.
    let kept = n_first - 16 - 24;
    let said = message("assistant", answer.as_str().expect("a text"));
    let (_, _, cached) = ask(&[&system, &first, &said, &second]);
    assert!(cached >= kept, "the next turn: {cached} of {n_first}");
    let (_, _, cached) = ask(&[&system, &first, &message("assistant", "It is lib.rs."), &second]);
    assert!(cached >= kept, "an edited answer: {cached} of {n_first}");
    let (_, n_thought, _) = ask(&[&system, &first, &thought, &second]);
    let (_, _, cached) = ask(&[&system, &first, &message("assistant", "It is main.rs."), &second]);
    assert!(cached >= kept && n_thought > n_first, "a dropped thought: {cached} of {n_first}");
    let (_, _, cached) = ask(&[&system, &second]);
    assert!(cached >= n_first / 2, "another conversation: {cached} of {n_first}");
}

#[test]
fn an_agents_turns_go_on_from_what_is_kept() {
    turns_go_on_from_what_is_kept(&[]);
    let recurrent = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/qwen3_5_moe-f32");
    turns_go_on_from_what_is_kept(&["--model", recurrent]);
}

#[test]
fn the_engine_honours_biases_seeds_log_probabilities_and_grammars() {
    let server = Serving::start(&[]);
    let token = |text: &str| server.post("/tokenize", &json!({ "prompt": text }))["tokens"][0].to_string();
    let paris = france(json!({ "logit_bias": { token(" Paris"): -100 } }));
    let text = server.post(CHAT, &paris)["choices"][0]["message"]["content"].clone();
    assert!(text.as_str().is_some_and(|text| !text.contains(" Paris")), "{text}");
    let sampled = |seed: u64| {
        let body = json!({ "model": "demo", "prompt": "Once upon", "temperature": 1.5, "seed": seed, "max_tokens": 30 });
        server.post("/v1/completions", &body)["choices"][0]["text"].clone()
    };
    assert_eq!(sampled(1), sampled(1));
    assert_ne!(sampled(1), sampled(2));
    let body = server.post(CHAT, &france(json!({ "logprobs": true, "top_logprobs": 3 })));
    for entry in body["choices"][0]["logprobs"]["content"].as_array().expect("a list") {
        let logprob = entry["logprob"].as_f64().expect("a number");
        assert!(
            logprob <= 0.0 && entry["top_logprobs"][0]["logprob"] == logprob,
            "greedy takes the best: {entry}"
        );
    }
    let schema = json!({
        "type": "object", "properties": { "city": { "type": "string", "maxLength": 20 }, "big": { "type": "boolean" } },
        "required": ["city", "big"], "additionalProperties": false,
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "city", "schema": schema } });
    let body = server.post(CHAT, &france(json!({ "response_format": format })));
    let text = body["choices"][0]["message"]["content"].as_str().expect("a text");
    let city: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(city["city"].is_string() && city["big"].is_boolean(), "{text}");
    let parameters = json!({
        "type": "object", "properties": { "city": { "enum": ["Paris", "Rome"] } }, "required": ["city"],
        "additionalProperties": false,
    });
    let tools = json!([{ "type": "function", "function": { "name": "visit", "parameters": parameters } }]);
    let body = server.post(
        CHAT,
        &france(json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false })),
    );
    let call = &body["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call["name"], "visit");
    assert!(
        call["arguments"].as_str().is_some_and(|text| text.contains("Paris") || text.contains("Rome")),
        "{call}"
    );
}

/// A long prompt that no other begins with.
fn long_prompt(n: usize, stream: bool) -> Value {
    let tokens: Vec<usize> = (0..900).map(|i| 300 + (n * 997 + i * 37) % 4000).collect();
    json!({ "model": "demo", "prompt": tokens, "max_tokens": 2, "stream": stream })
}

#[test]
fn a_client_that_leaves_frees_the_engine() {
    let mut n_left = 0;
    let server = Serving::start(&["--parallel", "2"]);
    let figure = |name: &str| server.get("/v1/stats")["service"][name].as_u64().expect("a figure");
    let mut leaves = |client: TcpStream| {
        drop(client);
        n_left += 1;
        server.wait_for("n_ended", n_left);
    };
    for stream in [true, false] {
        let long = |more: Value| {
            let mut body = story();
            body["stream"] = stream.into();
            body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
            server.send("POST", CHAT, &body.to_string())
        };
        // While it decodes.
        let before = figure("decoded_tokens");
        let decoding = long(json!({}));
        until("tokens are drawn", || figure("decoded_tokens") > before + 3);
        leaves(decoding);
        assert!(figure("n_cancelled") > 0, "it would have gone on");
        server.wait_for("n_running", 0);
        // While it waits behind others, which go on.
        let others = [long(json!({})), long(json!({ "temperature": 1 }))];
        server.wait_for("n_running", 2);
        let waiting = long(json!({}));
        server.wait_for("n_waiting", 1);
        leaves(waiting);
        assert_eq!((figure("n_running"), figure("n_waiting")), (2, 0));
        others.into_iter().for_each(&mut leaves);
        server.wait_for("n_running", 0);
        // While its prompt is read beside one that decodes; the moment may be missed, but not every time.
        let beside = long(json!({}));
        server.wait_for("n_running", 1);
        let caught = (0..8).any(|n| {
            let before = figure("prefilled_tokens");
            let cancelled = figure("n_cancelled");
            let reading = server.send(
                "POST",
                "/v1/completions",
                &long_prompt(2 * n + usize::from(stream), stream).to_string(),
            );
            until("it is read", || figure("prefilled_tokens") > before);
            leaves(reading);
            figure("n_cancelled") > cancelled && figure("prefilled_tokens") < before + 900
        });
        assert!(caught, "no client left within its prompt");
        leaves(beside);
        server.wait_for("n_running", 0);
    }
    assert_eq!(server.get("/v1/cache/status")["kv_tokens_running"], 0);
    assert_eq!(server.get("/v1/stats")["requests"]["active"], 0);
}

#[cfg(unix)]
#[test]
fn a_signal_lets_answers_finish_and_a_second_one_does_not() {
    for n_signals in [1, 2] {
        let mut server = Serving::start(&[]);
        let mut body = story();
        body["max_tokens"] = if n_signals == 1 { 30 } else { 900 }.into();
        let mut stream = server.send("POST", CHAT, &body.to_string());
        stream.read_exact(&mut [0; 400]).expect("it streams");
        server.terminate();
        let line = server.line();
        assert!(line.contains("shutting down"), "{line}");
        if n_signals == 2 {
            server.terminate();
        }
        let mut rest = String::new();
        // What is sent may end anywhere behind the second signal.
        let _ = stream.read_to_string(&mut rest);
        assert_eq!(rest.contains("[DONE]"), n_signals == 1, "{rest}");
        assert!(server.child.wait().expect("it ends").success());
        assert!(TcpStream::connect(&server.address).is_err());
    }
}

#[test]
fn nobody_elses_machine_without_a_key() {
    let refused = |args: &[&str], reason: &str| {
        let output = serve(args).output().expect("the binary starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: ") && said.contains(reason), "{said}");
    };
    refused(&["--host", "0.0.0.0"], "demands a key");
    refused(&["--host", "0.0.0.0", "--api-key", ""], "the API key is empty");
    refused(&["--api-key-file", "no-such-file"], "--api-key-file");
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve-key");
    fs::write(&file, "secret\n").expect("written");
    let server = Serving::start(&["--api-key-file", file.to_str().expect("UTF-8")]);
    assert_eq!(server.answer("GET", "/v1/models", "").0, 401);
    assert_eq!(server.answer("GET", "/health", "").0, 200);
}

#[test]
fn a_port_that_is_taken() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let output = serve(&["--port", &port]).output().expect("the binary starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("cannot listen on 127.0.0.1 port {port}")), "{said}");
}

/// The official Python clients, of which `FREETOKEN_CLIENTS` names the virtual environment.
#[test]
fn the_official_clients_are_content() {
    let Some(folder) = env::var_os("FREETOKEN_CLIENTS") else {
        eprintln!("SKIPPED: FREETOKEN_CLIENTS is not set; no official client talked to the server");
        return;
    };
    let server = Serving::start(&[]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients/clients.py");
    let python = Path::new(&folder).join("bin/python");
    let url = format!("http://{}", server.address);
    let output =
        Command::new(python).arg(script).arg(url).output().expect("FREETOKEN_CLIENTS has a bin/python");
    let (said, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{failed}");
    assert!(said.trim_end().ends_with("14 checks"), "{said}");
}

/// Every curl command of README.md and docs/serving.md works.
#[test]
fn documented_requests_are_answered() {
    let server = Serving::start(&[]);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = 0;
    for page in ["README.md", "docs/serving.md"] {
        let text = fs::read_to_string(root.join(page)).expect("the page is there").replace("\\\n", " ");
        let mut in_sh = false;
        for line in text.lines() {
            if let Some(language) = line.strip_prefix("```") {
                in_sh = language == "sh";
            } else if in_sh && line.starts_with("curl ") {
                found += 1;
                let command = line.replace("localhost:1919", &server.address);
                let output = Command::new("sh").args(["-c", &command]).output().expect("there is a shell");
                let text = String::from_utf8_lossy(&output.stdout);
                assert!(output.status.success(), "{command}\n{}", String::from_utf8_lossy(&output.stderr));
                assert!(!text.is_empty() && !text.contains("\"error\":{"), "{command}\n{text}");
            }
        }
    }
    assert!(found >= 5, "{found}");
}
