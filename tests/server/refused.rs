//! Requests that cannot be honoured: each is refused with the field's name, and none is half done.

use axum::{body::Body, http::Request};
use freetoken::{
    scheduler::{Refusal, Stop},
    server::Settings,
};
use serde_json::{Value, json};

use crate::fake::{Answer, CONTEXT, Script, client, client_with};

const CHAT: &str = "/v1/chat/completions";

fn ask(more: Value) -> Value {
    let mut body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Hi." }] });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

#[tokio::test]
async fn fields_that_cannot_be_honoured_are_named() {
    let client = client([]);
    let format = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "x", "schema": schema } } });
    for (more, param, message) in [
        (json!({ "model": null }), "model", "model is missing"),
        (json!({ "model": 1 }), "model", "model is 1, but must be a string"),
        (json!({ "messages": null }), "messages", "messages is missing"),
        (json!({ "messages": [] }), "messages", "messages is empty"),
        (json!({ "messages": "Hi." }), "messages", "messages is \"Hi.\", but must be an array"),
        (json!({ "messages": [1] }), "messages[0]", "messages[0] is 1, but must be an object"),
        (json!({ "messages": [{ "content": "x" }] }), "messages[0].role", "messages[0].role is missing"),
        (
            json!({ "messages": [{ "role": "user" }] }),
            "messages[0].content",
            "messages[0].content is missing",
        ),
        (
            json!({ "messages": [{ "role": "tool", "content": "x" }] }),
            "messages[0].tool_call_id",
            "messages[0].tool_call_id is",
        ),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "x" } }] }] }),
            "messages[0].content[0].type",
            "messages[0].content[0].type is \"image_url\"",
        ),
        (json!({ "max_tokens": 0 }), "max_tokens", "max_tokens is 0"),
        (json!({ "max_tokens": -5 }), "max_tokens", "max_tokens is -5"),
        (json!({ "max_completion_tokens": 0.5 }), "max_completion_tokens", "max_completion_tokens is 0.5"),
        (json!({ "temperature": "hot" }), "temperature", "temperature is \"hot\", but must be a number"),
        (json!({ "temperature": -1 }), "temperature", "temperature is -1, but must be from 0"),
        (json!({ "top_p": 0 }), "top_p", "top_p is 0"),
        (json!({ "top_k": -2 }), "top_k", "top_k is -2"),
        (json!({ "min_p": 2 }), "min_p", "min_p is 2"),
        (json!({ "presence_penalty": 3 }), "presence_penalty", "presence_penalty is 3"),
        (json!({ "n": 0 }), "n", "n is 0"),
        (json!({ "n": 1000 }), "n", "n is 1000"),
        (json!({ "seed": "x" }), "seed", "seed is \"x\""),
        (json!({ "stop": [1] }), "stop", "stop is"),
        (json!({ "stop": "" }), "stop", "stop string 0 is empty"),
        (json!({ "stop": vec!["x"; 17] }), "stop", "17 stop strings were given"),
        (json!({ "logit_bias": { "100000": 1 } }), "logit_bias", "logit_bias is of"),
        (json!({ "logit_bias": { "5": 101 } }), "logit_bias.5", "logit_bias.5 is 101"),
        (json!({ "top_logprobs": 2 }), "top_logprobs", "top_logprobs needs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs", "top_logprobs is 21"),
        (json!({ "stream_options": { "include_usage": true } }), "stream_options", "stream_options is only"),
        (json!({ "stream": "yes" }), "stream", "stream is \"yes\""),
        (json!({ "tools": [{ "type": "function" }] }), "tools[0].function", "tools[0].function is missing"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "" } }] }),
            "tools[0].function.name",
            "tools[0].function.name is",
        ),
        (json!({ "tool_choice": "required" }), "tool_choice", "tool_choice demands a call"),
        (json!({ "tool_choice": "perhaps" }), "tool_choice", "tool_choice is \"perhaps\""),
        (
            json!({ "tool_choice": { "type": "function", "function": { "name": "x" } } }),
            "tool_choice",
            "tool_choice names a function",
        ),
        (
            json!({ "response_format": { "type": "xml" } }),
            "response_format.type",
            "response_format.type is \"xml\"",
        ),
        (
            format(json!({ "type": "object", "patternProperties": { "(": {} } })),
            "response_format",
            "response_format makes no grammar",
        ),
        (json!({ "reasoning_effort": "huge" }), "reasoning_effort", "reasoning_effort is \"huge\""),
        (json!({ "store": true }), "store", "store is true"),
        (json!({ "audio": {} }), "audio", "audio is an object"),
        (json!({ "functions": [] }), "functions", "functions is an array"),
        (json!({ "colour": "red" }), "colour", "colour is not a field"),
    ] {
        let error = client.post(CHAT, ask(more)).await.error(400);
        assert_eq!(error["param"], param, "{error}");
        let said = error["message"].as_str().expect("a text");
        assert!(said.starts_with(message), "{said}");
    }
    for (more, param) in [
        (json!({ "echo": true }), "echo"),
        (json!({ "suffix": "x" }), "suffix"),
        (json!({ "best_of": 3 }), "best_of"),
        (json!({ "prompt": [] }), "prompt"),
        (json!({ "prompt": [1, "x"] }), "prompt"),
        (json!({ "prompt": [-1] }), "prompt"),
        (json!({ "prompt": vec!["x"; 17] }), "prompt"),
        (json!({ "logprobs": 21 }), "logprobs"),
    ] {
        let mut body = json!({ "model": "m", "prompt": "x" });
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        assert_eq!(client.post("/v1/completions", body).await.error(400)["param"], param);
    }
    assert!(client.asked().is_empty());
}

#[tokio::test]
async fn bodies_that_are_no_json_objects() {
    let client = client([]);
    let nested = "[".repeat(100_000);
    for body in ["", "{", "[]", "1", "{\"model\": \"m\",}", "\"x\"", nested.as_str()] {
        let error = client.raw(CHAT, body.to_owned()).await.error(400);
        assert!(error["message"].as_str().is_some_and(|message| message.starts_with("the body ")), "{error}");
    }
}

/// A request that each path answers.
fn answered() -> [(&'static str, Value); 5] {
    let messages = json!([{ "role": "user", "content": "Hi." }]);
    [
        (CHAT, json!({ "model": "tiny", "messages": messages })),
        ("/v1/completions", json!({ "model": "tiny", "prompt": "Hi." })),
        ("/v1/responses", json!({ "model": "tiny", "input": "Hi." })),
        ("/v1/messages", json!({ "model": "tiny", "max_tokens": 5, "messages": messages })),
        ("/v1/messages/count_tokens", json!({ "model": "tiny", "messages": messages })),
    ]
}

/// Checks an error's status, and that its body has the form of the path's protocol and nothing more.
fn has_form(path: &str, answer: &Answer, status: u16, [openai, anthropic]: [&str; 2]) {
    let keys = |value: &Value| {
        let mut keys: Vec<String> = value.as_object()?.keys().cloned().collect();
        keys.sort();
        Some(keys.join(" "))
    };
    assert_eq!(
        (answer.status.as_u16(), &answer.headers["content-type"]),
        (status, &"application/json".parse().expect("a value")),
        "{path}: {}",
        answer.text
    );
    let body = answer.json();
    let is_anthropic = path.starts_with("/v1/messages");
    let (outer, inner) =
        if is_anthropic { ("error type", "message type") } else { ("error", "code message param type") };
    assert_eq!(
        (keys(&body).as_deref(), keys(&body["error"]).as_deref()),
        (Some(outer), Some(inner)),
        "{path}: {body}"
    );
    assert_eq!(body["error"]["type"], if is_anthropic { anthropic } else { openai }, "{path}: {body}");
    assert!(!is_anthropic || body["type"] == "error", "{path}: {body}");
    assert!(body["error"]["message"].as_str().is_some_and(|message| message.len() > 10), "{path}: {body}");
}

#[tokio::test]
async fn hostile_requests_have_the_status_and_the_form_of_their_path() {
    const INVALID: [&str; 2] = ["invalid_request_error"; 2];
    let strict = client_with(Settings { strict_model: true, ..Settings::local("tiny") }, []);
    let client = client([]);
    for (path, body) in answered() {
        let text = body.to_string();
        let with = |field: &str, value: Value| {
            let mut changed = body.clone();
            changed[field] = value;
            changed.to_string().into_bytes()
        };
        let said = ["messages", "prompt", "input"]
            .into_iter()
            .find(|field| !body[*field].is_null())
            .expect("one of them");
        for bytes in [
            text.as_bytes()[..text.len() - 1].to_vec(),
            [text.as_bytes(), b"}"].concat(),
            text.replace("Hi.", "\\ud800").into_bytes(),
            [text.split_once("Hi.").expect("it is there").0.as_bytes(), b"\xff\xfe\"}"].concat(),
            [b"\xef\xbb\xbf", text.as_bytes()].concat(),
            "{\"a\":".repeat(50_000).into_bytes(),
            with("model", json!(1)),
            with("model", json!({ "name": "tiny" })),
            with(said, json!(5)),
            with(said, json!({})),
            with(said, json!([[{}]])),
            with("max_tokens", json!("many")),
            with("colour", json!("red")),
        ] {
            has_form(path, &client.raw(path, bytes).await, 400, INVALID);
        }
        let large = client.raw(path, vec![b' '; 100 << 20]).await;
        has_form(path, &large, 413, ["invalid_request_error", "request_too_large"]);
        let other = strict.raw(path, with("model", json!("other"))).await;
        has_form(path, &other, 404, ["invalid_request_error", "not_found_error"]);
        assert!(
            path.starts_with("/v1/messages") || other.json()["error"]["code"] == "model_not_found",
            "{}",
            other.text
        );
    }
    assert!(client.asked().is_empty() && strict.asked().is_empty());
}

#[tokio::test]
async fn more_tokens_than_there_are_is_no_error() {
    for (path, mut body) in answered().into_iter().filter(|(path, _)| !path.ends_with("count_tokens")) {
        body[if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" }] =
            json!(1_000_000_000_u64);
        let client = client([Script::Says("Hello.", Stop::Eos)]);
        client.post(path, body).await.ok();
        let asked = client.asked().remove(0).request;
        assert_eq!(asked.max_tokens, CONTEXT - asked.prompt.len(), "{path}");
    }
}

#[tokio::test]
async fn a_body_of_100_megabytes_is_refused_before_it_is_read() {
    let client = client([]);
    let error = client.raw(CHAT, vec![b' '; 100 << 20]).await.error(413);
    assert!(error["message"].as_str().is_some_and(|message| message.contains("33554432 bytes")), "{error}");
    let announced =
        Request::post(CHAT).header("content-length", 100 << 20).body(Body::empty()).expect("a request");
    client.answer(announced).await.error(413);
}

#[tokio::test]
async fn a_prompt_that_leaves_no_room() {
    let client = client([]);
    let long = "word ".repeat(CONTEXT);
    for (path, body) in [
        (CHAT, ask(json!({ "messages": [{ "role": "user", "content": long }] }))),
        ("/v1/completions", json!({ "model": "m", "prompt": long })),
        ("/v1/responses", json!({ "model": "m", "input": long })),
    ] {
        let error = client.post(path, body).await.error(400);
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().expect("a text");
        assert!(
            message.starts_with("prompt is too long: ") && message.contains(" tokens > 4095 maximum"),
            "{message}"
        );
    }
    client.post("/v1/completions", json!({ "model": "m", "prompt": "" })).await.error(400);
}

#[tokio::test]
async fn a_full_queue_says_when_to_try_again() {
    let client = client([Script::Refused(Refusal::Full { n_waiting: 64, retry_seconds: 7 })]);
    let answer = client.post(CHAT, ask(json!({}))).await;
    assert_eq!(answer.headers["retry-after"], "7");
    assert_eq!(answer.error(429)["code"], "rate_limit_exceeded");
}

#[tokio::test]
async fn paths_and_methods_that_there_are_not() {
    let client = client([]);
    client.get("/v1/nothing").await.error(404);
    client.get(CHAT).await.error(405);
    assert_eq!(client.get("/v1/messages").await.json()["type"], "error");
}
