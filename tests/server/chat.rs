//! `/v1/chat/completions`.

use axum::{body::Body, http::Request};
use freetoken::{engine::sampling::SamplingParams, scheduler::Stop, server::Settings};
use serde_json::{Value, json};
use tokio::time::Duration;

use crate::fake::{CACHED, CONTEXT, Script, SseEvent, client, client_with, events};

const PATH: &str = "/v1/chat/completions";
const CALL: &str = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>";

fn ask(more: Value) -> Value {
    let mut body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Hi." }] });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

pub(super) fn tools() -> Value {
    let parameters = json!({ "type": "object", "properties": { "x": { "type": "integer" } }, "required": ["x"], "additionalProperties": false });
    let tool =
        |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    json!([tool("add"), tool("subtract")])
}

fn says(text: &'static str) -> Script {
    Script::Says(text, Stop::Eos)
}

/// The deltas of the first choice, and the last chunk.
fn deltas(events: &[SseEvent]) -> Vec<Value> {
    let chunks = events.iter().filter(|event| event.data["choices"][0]["index"] == 0);
    chunks.map(|event| event.data["choices"][0]["delta"].clone()).collect()
}

fn joined(deltas: &[Value], field: &str) -> String {
    deltas.iter().filter_map(|delta| delta[field].as_str()).collect()
}

#[tokio::test]
async fn an_answer_has_every_field() {
    let client = client([says("Hello.")]);
    let body = client.post(PATH, ask(json!({}))).await.ok();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "any");
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")) && body["created"].is_u64());
    let message = json!({ "role": "assistant", "content": "Hello.", "refusal": null });
    let choice = json!({ "index": 0, "message": message, "logprobs": null, "finish_reason": "stop" });
    assert_eq!(body["choices"], json!([choice]));
    let asked = client.asked().remove(0);
    assert_eq!(asked.prompt, "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n");
    let (prompt, completion) = (asked.request.prompt.len(), "Hello.".len() + 1);
    let usage = json!({
        "prompt_tokens": prompt, "completion_tokens": body["usage"]["completion_tokens"],
        "total_tokens": prompt as u64 + body["usage"]["completion_tokens"].as_u64().expect("a number"),
        "prompt_tokens_details": { "cached_tokens": CACHED },
        "completion_tokens_details": { "reasoning_tokens": 0 },
    });
    assert_eq!(body["usage"], usage);
    assert!(body["usage"]["completion_tokens"].as_u64().is_some_and(|n| n > 1 && n <= completion as u64));
}

#[tokio::test]
async fn a_stream_has_the_role_then_deltas_then_the_reason_then_usage() {
    let client = client([says("Hello.")]);
    let body = ask(json!({ "stream": true, "stream_options": { "include_usage": true } }));
    let events = client.post(PATH, body).await.events();
    let deltas = deltas(&events);
    assert_eq!(deltas[0], json!({ "role": "assistant", "content": "" }));
    assert_eq!(deltas.last(), Some(&json!({})));
    assert_eq!(joined(&deltas, "content"), "Hello.");
    let n = events.len();
    assert_eq!(events[n - 3].data["choices"][0]["finish_reason"], "stop");
    assert!(events[..n - 2].iter().all(|event| event.data["usage"].is_null()));
    assert_eq!(events[n - 2].data["choices"], json!([]));
    assert_eq!(events[n - 2].data["usage"]["prompt_tokens_details"]["cached_tokens"], CACHED);
    assert_eq!(events[n - 1].data, "[DONE]");
    assert!(events[..n - 1].iter().all(|event| event.data["object"] == "chat.completion.chunk"));
}

#[tokio::test]
async fn without_sampling_fields_the_checkpoint_decides() {
    let client = client([says("a"), says("a")]);
    client.post(PATH, ask(json!({}))).await.ok();
    let fields = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 11, "presence_penalty": 0.25,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "max_tokens": 9, "logit_bias": { "5": -100, "6": 2 },
    });
    client.post(PATH, ask(fields)).await.ok();
    let asked = client.asked();
    let defaults = SamplingParams { seed: asked[0].request.sampling.seed, ..SamplingParams::GREEDY };
    assert_eq!(asked[0].request.sampling, defaults);
    let expected = SamplingParams {
        temperature: 0.5,
        top_k: 7,
        top_p: 0.9,
        min_p: 0.1,
        repetition_penalty: 1.5,
        presence_penalty: 0.25,
        frequency_penalty: -0.5,
        seed: 11,
    };
    let request = &asked[1].request;
    assert_eq!((request.sampling, request.max_tokens), (expected, 9));
    assert_eq!(request.logit_bias, [(5, -100.0), (6, 2.0)]);
}

#[tokio::test]
async fn the_limit_is_cut_to_what_the_context_leaves() {
    let client = client([says("a"), says("a"), Script::Says("abcdef", Stop::Eos)]);
    client.post(PATH, ask(json!({}))).await.ok();
    client.post(PATH, ask(json!({ "max_tokens": 1_000_000_000 }))).await.ok();
    let body = client.post(PATH, ask(json!({ "max_tokens": 100, "max_completion_tokens": 2 }))).await.ok();
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let limits: Vec<usize> = client.asked().iter().map(|asked| asked.request.max_tokens).collect();
    let room = CONTEXT - body["usage"]["prompt_tokens"].as_u64().expect("a number") as usize;
    assert_eq!(limits, [room, room, 2]);
}

#[tokio::test]
async fn stop_strings_end_an_answer_wherever_tokens_end() {
    for (stop, expected) in [
        (json!("lo wo"), "Hel"),
        (json!(["x", "world"]), "Hello "),
        (json!("Hello world."), ""),
        (json!("worlds"), "Hello world."),
    ] {
        let client = client([says("Hello world."), says("Hello world.")]);
        let body = client.post(PATH, ask(json!({ "stop": stop }))).await.ok();
        assert_eq!(body["choices"][0]["message"]["content"], expected);
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let streamed = client.post(PATH, ask(json!({ "stop": stop, "stream": true }))).await.events();
        assert_eq!(joined(&deltas(&streamed), "content"), expected);
    }
    let client = client([says("<think>a stop b</think>\n\nx stop y")]);
    let body = client.post(PATH, ask(json!({ "stop": "stop" }))).await.ok();
    let message = &body["choices"][0]["message"];
    assert_eq!((&message["reasoning_content"], &message["content"]), (&json!("a stop b"), &json!("x ")));
}

#[tokio::test]
async fn thinking_is_told_from_content_and_counted() {
    let client = client([says("<think>\nHm.\n</think>\n\nYes."), says("<think>\nHm.\n</think>\n\nYes.")]);
    let body = client.post(PATH, ask(json!({}))).await.ok();
    let message = &body["choices"][0]["message"];
    assert_eq!(message["content"], "Yes.");
    assert_eq!(message["reasoning_content"].as_str().map(str::trim), Some("Hm."));
    let thought = body["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
    assert!(thought.is_some_and(|n| n >= 3 && n < body["usage"]["completion_tokens"].as_u64().unwrap_or(0)));
    let deltas = deltas(&client.post(PATH, ask(json!({ "stream": true }))).await.events());
    assert_eq!(joined(&deltas, "content"), "Yes.");
    assert_eq!(joined(&deltas, "reasoning_content").trim(), "Hm.");
}

#[tokio::test]
async fn calls_of_tools_come_whole_and_in_pieces() {
    let client = client([says(CALL), says(CALL)]);
    let body = client.post(PATH, ask(json!({ "tools": tools() }))).await.ok();
    let choice = &body["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("add")));
    assert_eq!(call["function"]["arguments"], "{\"x\": 1}");
    assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()));
    assert!(client.asked()[0].prompt.contains("\"subtract\""), "tools are in the prompt");

    let events = client.post(PATH, ask(json!({ "tools": tools(), "stream": true }))).await.events();
    let calls: Vec<Value> =
        deltas(&events).iter().filter_map(|delta| delta["tool_calls"].get(0).cloned()).collect();
    assert_eq!(calls[0]["function"], json!({ "name": "add", "arguments": "" }));
    assert!(calls[0]["id"].is_string() && calls.iter().all(|call| call["index"] == 0));
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!(arguments, "{\"x\": 1}");
    assert_eq!(events[events.len() - 2].data["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn without_tools_or_with_none_a_call_is_text() {
    let client = client([says(CALL), says(CALL)]);
    for body in [ask(json!({})), ask(json!({ "tools": tools(), "tool_choice": "none" }))] {
        let body = client.post(PATH, body).await.ok();
        assert_eq!(body["choices"][0]["message"]["content"], CALL);
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
    }
    assert!(client.asked().iter().all(|asked| !asked.prompt.contains("subtract")));
}

#[tokio::test]
async fn one_call_at_a_time_where_that_is_asked_for() {
    let two = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 2}}\n</tool_call>";
    let client = client([says(two), says(two)]);
    let n_calls = |body: Value| body["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len);
    assert_eq!(n_calls(client.post(PATH, ask(json!({ "tools": tools() }))).await.ok()), Some(2));
    let one = ask(json!({ "tools": tools(), "parallel_tool_calls": false }));
    let body = client.post(PATH, one).await.ok();
    assert_eq!(body["choices"][0]["finish_reason"], "tool_calls");
    assert_eq!(n_calls(body), Some(1));
}

#[tokio::test]
async fn messages_reach_the_template_in_its_form() {
    let client = client([says("a")]);
    let call =
        json!({ "id": "1", "type": "function", "function": { "name": "add", "arguments": "{\"x\": 1}" } });
    let messages = json!([
        { "role": "system", "content": "S." },
        { "role": "developer", "content": [{ "type": "text", "text": "D" }, { "type": "text", "text": "." }] },
        { "role": "user", "content": "U." },
        { "role": "assistant", "content": null, "reasoning_content": "R.", "tool_calls": [call] },
        { "role": "tool", "tool_call_id": "1", "content": "2" },
    ]);
    client.post(PATH, json!({ "model": "m", "messages": messages })).await.ok();
    let expected = "<|im_start|>system\nS.\n\nD.<|im_end|>\n<|im_start|>user\nU.<|im_end|>\n\
                    <|im_start|>assistant\n<think>R.</think><tool_call>add {\"x\": 1}</tool_call><|im_end|>\n\
                    <|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(client.asked()[0].prompt, expected);
}

#[tokio::test]
async fn several_choices_have_seeds_of_their_own() {
    let client = client([says("one"), says("two"), says("one"), says("two")]);
    let body = client.post(PATH, ask(json!({ "n": 2, "seed": 5 }))).await.ok();
    let texts: Vec<&Value> = (0..2).map(|i| &body["choices"][i]["message"]["content"]).collect();
    assert_eq!(texts, ["one", "two"]);
    let asked = client.asked();
    assert_eq!(asked.iter().map(|asked| asked.request.sampling.seed).collect::<Vec<_>>(), [5, 6]);
    assert_eq!(body["usage"]["prompt_tokens"], asked[0].request.prompt.len());
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], CACHED);
    let events = client.post(PATH, ask(json!({ "n": 2, "stream": true }))).await.events();
    let text = |index: usize| -> String {
        let chunks = events.iter().filter(|event| event.data["choices"][0]["index"] == index);
        chunks.filter_map(|event| event.data["choices"][0]["delta"]["content"].as_str()).collect()
    };
    assert_eq!((text(0), text(1)), ("one".into(), "two".into()));
}

#[tokio::test]
async fn logprobs_name_each_token() {
    let client = client([says("é!"), says("é!")]);
    let fields = json!({ "logprobs": true, "top_logprobs": 2 });
    let body = client.post(PATH, ask(fields.clone())).await.ok();
    let content = body["choices"][0]["logprobs"]["content"].as_array().expect("a list").clone();
    let bytes: Vec<u8> = content
        .iter()
        .flat_map(|entry| entry["bytes"].as_array().expect("bytes"))
        .map(|byte| byte.as_u64().expect("a byte") as u8)
        .collect();
    assert_eq!(bytes, "é!".as_bytes());
    for entry in &content {
        assert_eq!(entry["logprob"], -0.5);
        assert_eq!(entry["top_logprobs"].as_array().map(Vec::len), Some(2));
        assert_eq!(entry["top_logprobs"][1]["logprob"], -1.5);
    }
    let mut streamed = fields;
    streamed["stream"] = true.into();
    let events = client.post(PATH, ask(streamed)).await.events();
    let n: usize = events
        .iter()
        .filter_map(|event| event.data["choices"][0]["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum();
    assert_eq!(n, content.len());
}

#[tokio::test]
async fn effort_sets_what_the_template_knows() {
    let client = client([says("a"), says("a"), says("a")]);
    client.post(PATH, ask(json!({ "reasoning_effort": "none" }))).await.ok();
    client.post(PATH, ask(json!({ "thinking": { "type": "disabled" } }))).await.ok();
    client.post(PATH, ask(json!({ "reasoning_effort": "high" }))).await.ok();
    let thinks: Vec<bool> = client.asked().iter().map(|asked| !asked.prompt.contains("</think>")).collect();
    assert_eq!(thinks, [false, false, true]);
}

#[tokio::test]
async fn a_client_that_leaves_cancels() {
    let client = client([Script::Hangs("a"), Script::Hangs("a")]);
    let body = ask(json!({ "stream": true })).to_string();
    let response = client.send(Request::post(PATH).body(Body::from(body)).expect("a request")).await;
    drop(response);
    client.all_left().await;
    let whole = Request::post(PATH).body(Body::from(ask(json!({})).to_string())).expect("a request");
    assert!(tokio::time::timeout(Duration::from_millis(100), client.send(whole)).await.is_err());
    client.all_left().await;
    let requests = client.get("/v1/requests").await.ok()["requests"].clone();
    let status: Vec<&Value> =
        requests.as_array().expect("a list").iter().map(|entry| &entry["status"]).collect();
    assert_eq!(status, [499, 499]);
}

#[tokio::test]
async fn a_silent_stream_says_that_it_lives() {
    let settings = Settings { keep_alive: Duration::from_millis(20), ..Settings::local("tiny") };
    let client = client_with(settings, [Script::Hangs("")]);
    let body = ask(json!({ "stream": true })).to_string();
    let response = client.send(Request::post(PATH).body(Body::from(body)).expect("a request")).await;
    let text = read_for(response, Duration::from_millis(300)).await;
    assert!(text.matches(": keep-alive\n\n").count() >= 3, "{text}");
    assert_eq!(events(&text).len(), 1, "the role, and nothing else");
}

pub(super) async fn read_for(response: axum::response::Response, time: Duration) -> String {
    use futures_util::StreamExt;
    let mut pieces = response.into_body().into_data_stream();
    let mut text = String::new();
    let _ = tokio::time::timeout(time, async {
        while let Some(Ok(piece)) = pieces.next().await {
            text.push_str(std::str::from_utf8(&piece).expect("UTF-8"));
        }
    })
    .await;
    text
}

#[tokio::test]
async fn a_failure_is_an_error_and_in_a_stream_an_event() {
    for script in [|| Script::Fails("Hel"), || Script::Dies("Hel")] {
        let client = client([script(), script()]);
        let error = client.post(PATH, ask(json!({}))).await.error(500);
        assert_eq!(error["type"], "server_error");
        let events = client.post(PATH, ask(json!({ "stream": true }))).await.events();
        let n = events.len();
        assert_eq!(events[n - 2].data["error"]["type"], "server_error");
        assert_eq!(events[n - 1].data, "[DONE]");
        assert_eq!(joined(&deltas(&events), "content"), "Hel");
    }
}
