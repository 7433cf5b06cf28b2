//! `/v1/messages` and `/v1/messages/count_tokens`.

use freetoken::{
    scheduler::{Refusal, Stop},
    server::Settings,
};
use serde_json::{Value, json};
use tokio::time::Duration;

use crate::fake::{CACHED, CONTEXT, Script, client, client_with, events, loading_client};

const PATH: &str = "/v1/messages";
const CALL: &str =
    "<think>Hm.</think>I add.<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 1}}\n</tool_call>";

fn ask(more: Value) -> Value {
    let messages = json!([{ "role": "user", "content": "Hi." }]);
    let mut body = json!({ "model": "any", "max_tokens": 100, "messages": messages });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn tools() -> Value {
    let schema = json!({ "type": "object", "properties": { "x": { "type": "integer" } } });
    json!([{ "name": "add", "description": "Adds.", "input_schema": schema, "cache_control": { "type": "ephemeral" } }])
}

fn says(text: &'static str) -> Script {
    Script::Says(text, Stop::Eos)
}

#[tokio::test]
async fn a_message_has_every_field() {
    let client = client([says("Hello.")]);
    let body = client.post(PATH, ask(json!({}))).await.ok();
    assert!(body["id"].as_str().is_some_and(|id| id.starts_with("msg_")));
    let expected = json!({
        "id": body["id"], "type": "message", "role": "assistant", "model": "any",
        "content": [{ "type": "text", "text": "Hello." }], "stop_reason": "end_turn", "stop_sequence": null,
        "usage": body["usage"],
    });
    assert_eq!(body, expected);
    let prompt = client.asked()[0].request.prompt.len();
    assert_eq!(body["usage"]["input_tokens"], prompt - CACHED);
    assert_eq!(body["usage"]["cache_read_input_tokens"], CACHED);
}

#[tokio::test]
async fn a_stream_opens_and_closes_each_block_in_order() {
    let client = client([says(CALL)]);
    let body = ask(json!({ "stream": true, "tools": tools() }));
    let events = client.post(PATH, body).await.events();
    let mut order: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    order.retain(|name| *name != "ping");
    order.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected: Vec<&str> = ["message_start"]
        .into_iter()
        .chain([block; 3].concat())
        .chain(["message_delta", "message_stop"])
        .collect();
    assert_eq!(order, expected);
    assert!(events.iter().all(|event| event.data["type"] == event.name.as_str()));
    let starts: Vec<(&Value, &Value)> = events
        .iter()
        .filter(|event| event.name == "content_block_start")
        .map(|event| (&event.data["index"], &event.data["content_block"]["type"]))
        .collect();
    assert_eq!(
        starts,
        [(&json!(0), &json!("thinking")), (&json!(1), &json!("text")), (&json!(2), &json!("tool_use"))]
    );
    let delta = |kind: &str, field: &str| -> String {
        let deltas = events.iter().map(|event| &event.data["delta"]).filter(|delta| delta["type"] == kind);
        deltas.filter_map(|delta| delta[field].as_str()).collect()
    };
    assert_eq!(delta("thinking_delta", "thinking"), "Hm.");
    assert_eq!(delta("text_delta", "text"), "I add.");
    assert_eq!(delta("input_json_delta", "partial_json"), "{\"x\": 1}");
    let end = &events[events.len() - 2].data;
    assert_eq!(end["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
    assert_eq!(end["usage"]["cache_read_input_tokens"], CACHED);
    assert!(end["usage"]["output_tokens"].as_u64().is_some_and(|n| n > 10));
    assert!(end["usage"]["output_tokens_details"]["thinking_tokens"].as_u64() > Some(0));
}

#[tokio::test]
async fn blocks_of_a_whole_message() {
    let client = client([says(CALL)]);
    let body = client.post(PATH, ask(json!({ "tools": tools() }))).await.ok();
    let id = &body["content"][2]["id"];
    let expected = json!([
        { "type": "thinking", "thinking": "Hm.", "signature": "" },
        { "type": "text", "text": "I add." },
        { "type": "tool_use", "id": id, "name": "add", "input": { "x": 1 } },
    ]);
    assert_eq!((&body["content"], &body["stop_reason"]), (&expected, &json!("tool_use")));
}

#[tokio::test]
async fn reasons_to_stop() {
    let client = client([says("a stop b"), says("a long answer"), says("")]);
    let body = client.post(PATH, ask(json!({ "stop_sequences": ["stop"] }))).await.ok();
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("stop_sequence"), &json!("stop")));
    let body = client.post(PATH, ask(json!({ "max_tokens": 2 }))).await.ok();
    assert_eq!(body["stop_reason"], "max_tokens");
    let events = client.post(PATH, ask(json!({ "stream": true }))).await.events();
    let blocks = events.iter().filter(|event| event.name == "content_block_start").count();
    assert_eq!(blocks, 1, "an empty message has an empty block");
}

#[tokio::test]
async fn blocks_reach_the_template_in_its_form() {
    let client = client([says("a")]);
    let mark = json!({ "type": "ephemeral", "ttl": "1h" });
    let body = json!({
        "model": "m", "max_tokens": 5, "metadata": { "user_id": "u" },
        "system": [
            { "type": "text", "text": "x-anthropic-billing-header: 123" },
            { "type": "text", "text": "S.", "cache_control": mark },
        ],
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "U." }] },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "T.", "signature": "s" },
                { "type": "redacted_thinking", "data": "d" },
                { "type": "text", "text": "A." },
                { "type": "tool_use", "id": "1", "name": "add", "input": { "x": 1 } },
            ] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "1", "content": [{ "type": "text", "text": "no" }], "is_error": true },
                { "type": "text", "text": "Why?" },
            ] },
        ],
    });
    client.post(PATH, body).await.ok();
    let expected = "<|im_start|>system\nS.<|im_end|>\n<|im_start|>user\nU.<|im_end|>\n\
                    <|im_start|>assistant\n<think>T.</think>A.<tool_call>add {\"x\": 1}</tool_call><|im_end|>\n\
                    <|im_start|>tool\nError: no<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(client.asked()[0].prompt, expected);
}

#[tokio::test]
async fn examples_of_a_tools_input_reach_the_model() {
    let client = client([says("a")]);
    let mut tools = tools();
    tools[0]["input_examples"] = json!([{ "x": 41 }]);
    client.post(PATH, ask(json!({ "tools": tools }))).await.ok();
    let prompt = client.asked().remove(0).prompt;
    assert!(prompt.contains("\"examples\": [{\"x\": 41}]"), "{prompt}");
}

#[tokio::test]
async fn an_inner_system_message_stays_where_it_is() {
    let client = client([says("a")]);
    let messages = json!([
        { "role": "user", "content": "U." },
        { "role": "system", "content": "12 tokens left." },
    ]);
    client.post(PATH, ask(json!({ "messages": messages }))).await.ok();
    let asked = client.asked().remove(0);
    assert!(asked.prompt.starts_with("<|im_start|>user\nU.<|im_end|>\n<|im_start|>system\n12 tokens left."));
    assert!(!asked.request.anchors.is_empty() && asked.request.anchors.is_sorted());
}

#[tokio::test]
async fn errors_have_their_form() {
    let full = Refusal::Full { n_waiting: 64, retry_seconds: 5 };
    let client = client([Script::Refused(full), Script::Fails("a"), Script::Fails("a")]);
    let overloaded = client.post(PATH, ask(json!({}))).await;
    assert_eq!(overloaded.headers["retry-after"], "5");
    assert_eq!(overloaded.error(529)["type"], "overloaded_error");
    let failed = client.post(PATH, ask(json!({}))).await;
    assert_eq!(failed.json()["type"], "error");
    assert_eq!(failed.error(500)["type"], "api_error");
    let events = client.post(PATH, ask(json!({ "stream": true }))).await.events();
    let last = events.last().expect("an event");
    assert_eq!((last.name.as_str(), &last.data["error"]["type"]), ("error", &json!("api_error")));
    assert_eq!(events[events.len() - 2].name, "content_block_stop");
    let long = "word ".repeat(CONTEXT);
    let error =
        client.post(PATH, ask(json!({ "messages": [{ "role": "user", "content": long }] }))).await.error(400);
    let message = error["message"].as_str().expect("a text");
    assert!(
        message.starts_with("prompt is too long: ") && message.contains(" tokens > 4095 maximum"),
        "{message}"
    );
    assert_eq!(error["type"], "invalid_request_error");
}

#[tokio::test]
async fn a_silent_stream_pings() {
    let settings = Settings { keep_alive: Duration::from_millis(20), ..Settings::local("tiny") };
    let client = client_with(settings, [Script::Hangs("")]);
    let body = ask(json!({ "stream": true })).to_string();
    let request = axum::http::Request::post(PATH).body(body.into()).expect("a request");
    let text = crate::chat::read_for(client.send(request).await, Duration::from_millis(300)).await;
    assert!(events(&text).iter().filter(|event| event.name == "ping").count() >= 3, "{text}");
}

#[tokio::test]
async fn tokens_are_counted_as_the_request_would_have_them_also_while_loading() {
    let client = client([says("a")]);
    let body = ask(json!({ "tools": tools(), "system": "S." }));
    let mut counted = body.clone();
    counted.as_object_mut().expect("an object").remove("max_tokens");
    let n = client.post("/v1/messages/count_tokens", counted.clone()).await.ok();
    client.post(PATH, body).await.ok();
    assert_eq!(n["input_tokens"], client.asked()[0].request.prompt.len());
    let loading = loading_client(Settings::local("tiny"));
    assert_eq!(loading.post("/v1/messages/count_tokens", counted).await.ok(), n);
    assert_eq!(loading.post(PATH, ask(json!({}))).await.error(503)["type"], "overloaded_error");
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused() {
    let client = client([]);
    let image =
        json!([{ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "" } }]);
    for (more, expected) in [
        (json!({ "max_tokens": 0 }), "max_tokens is 0"),
        (json!({ "max_tokens": null }), "max_tokens is missing"),
        (json!({ "messages": [] }), "messages is empty"),
        (
            json!({ "messages": [{ "role": "user", "content": image }] }),
            "messages.0.content.0.type is \"image\"",
        ),
        (json!({ "messages": [{ "role": "robot", "content": "" }] }), "messages.0.role is \"robot\""),
        (json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }), "tools.0.type is"),
        (json!({ "tool_choice": { "type": "tool", "name": "nothing" } }), "tool_choice names a function"),
        (json!({ "tool_choice": { "type": "any" } }), "tool_choice demands a call"),
        (json!({ "thinking": { "type": "perhaps" } }), "thinking.type is \"perhaps\""),
        (
            json!({ "thinking": { "type": "adaptive", "display": "omitted" } }),
            "thinking.display is \"omitted\"",
        ),
        (json!({ "mcp_servers": [{}] }), "mcp_servers is an array of 1"),
        (json!({ "stop_sequences": "x".repeat(2000) }), "stop string 0 has 2000 bytes"),
        (json!({ "colour": "red" }), "colour is not a field"),
    ] {
        let error = client.post(PATH, ask(more)).await.error(400);
        let message = error["message"].as_str().expect("a text");
        assert!(message.starts_with(expected), "{message}");
    }
}
