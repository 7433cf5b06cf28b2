//! Every field of a request does something, or is refused by its name, or only labels the request: one table for all paths.

use freetoken::scheduler::Stop;
use serde_json::{Value, json};

use crate::{
    chat::tools,
    fake::{Script, client},
};

const PATHS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];

/// What the model says: thinking, a text with a stop string, and two calls.
const SAID: &str = "<think>\nOne two.\n</think>\n\nHello STOP there.\
    <tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 5}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"subtract\", \"arguments\": {\"x\": 6}}\n</tool_call>";

/// A request that each path answers, with tools where there are any.
fn base(path: &str) -> Value {
    let messages = json!([{ "role": "user", "content": "Hi." }]);
    let functions = tools();
    let functions = functions.as_array().expect("a list").iter().map(|tool| &tool["function"]);
    match path {
        "/v1/chat/completions" => json!({ "model": "m", "seed": 1, "messages": messages, "tools": tools() }),
        "/v1/completions" => json!({ "model": "m", "seed": 1, "prompt": "Hi." }),
        "/v1/responses" => {
            let flat = functions
                .map(|f| json!({ "type": "function", "name": f["name"], "parameters": f["parameters"] }));
            json!({ "model": "m", "seed": 1, "input": "Hi.", "tools": flat.collect::<Vec<_>>() })
        }
        _ => {
            let flat = functions.map(|f| json!({ "name": f["name"], "input_schema": f["parameters"] }));
            json!({ "model": "m", "seed": 1, "max_tokens": 300, "messages": messages, "tools": flat.collect::<Vec<_>>() })
        }
    }
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// A text without ids and times, which no two answers share.
fn lasting(text: &str) -> String {
    let is_part = |c: char| c.is_ascii_hexdigit();
    let pieces = text.split_inclusive(|c| !is_part(c));
    pieces.map(|piece| if piece.len() > 10 { &piece[piece.len() - 1..] } else { piece }).collect()
}

/// What a request came to: what the service saw, and what was answered; or the error, with the field that is to blame.
async fn outcome(path: &str, body: Value) -> Result<String, (String, String)> {
    let client = client((0..2).map(|_| Script::Says(SAID, Stop::Eos)));
    let answer = client.post(path, body).await;
    if answer.status == 200 {
        let seen = client.asked().into_iter().map(|asked| {
            let r = asked.request;
            let guided = r.constraint.is_some();
            format!(
                "{} {:?} {:?} {} {:?} {:?} {guided}\n",
                asked.prompt, r.sampling, r.logit_bias, r.max_tokens, r.eos, r.logprobs
            )
        });
        return Ok(seen.collect::<String>() + &lasting(&answer.text));
    }
    assert_eq!(answer.status, 400, "{path}: {}", answer.text);
    assert!(client.asked().is_empty(), "{path}: refused, and yet asked");
    let error = &answer.json()["error"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Err((text(&error["message"]), text(&error["param"])))
}

/// Fields, and what they are on each of [`PATHS`]: `H`onoured, `R`efused by name, or a `L`abel that changes nothing.
fn fields() -> Vec<(Value, &'static str)> {
    let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let flat = json!({ "type": "json_schema", "name": "x", "schema": schema });
    vec![
        (json!({ "temperature": 0.5 }), "HHHH"),
        (json!({ "top_p": 0.5 }), "HHHH"),
        (json!({ "top_k": 7 }), "HHHH"),
        (json!({ "min_p": 0.25 }), "HHHH"),
        (json!({ "presence_penalty": 1.5 }), "HHHH"),
        (json!({ "frequency_penalty": 1.5 }), "HHHH"),
        (json!({ "repetition_penalty": 1.5 }), "HHHH"),
        (json!({ "seed": 7 }), "HHHH"),
        (json!({ "logit_bias": { "5": -100 } }), "HHHH"),
        (json!({ "ignore_eos": true }), "HHHH"),
        (json!({ "n": 2 }), "HHRR"),
        (json!({ "max_tokens": 3 }), "HHRH"),
        (json!({ "max_completion_tokens": 3 }), "HRRR"),
        (json!({ "max_output_tokens": 3 }), "RRHR"),
        (json!({ "stop": ["STOP"] }), "HHHR"),
        (json!({ "stop_sequences": ["STOP"] }), "RRRH"),
        (json!({ "logprobs": true }), "HRRR"),
        (json!({ "logprobs": 2 }), "RHRR"),
        (json!({ "top_logprobs": 2 }), "RRRR"),
        (json!({ "stream": true }), "HHHH"),
        (json!({ "stream_options": { "include_usage": true } }), "RRRR"),
        (json!({ "stream_options": { "colour": true } }), "RRRR"),
        // Calls.
        (json!({ "tools": [] }), "HRHH"),
        (json!({ "tool_choice": "none" }), "HRHR"),
        (json!({ "tool_choice": { "type": "none" } }), "RRRH"),
        (json!({ "tool_choice": "required" }), "HRHR"),
        (json!({ "tool_choice": { "type": "any" } }), "RRRH"),
        (json!({ "tool_choice": { "type": "function", "function": { "name": "add" } } }), "HRHR"),
        (json!({ "tool_choice": { "type": "function", "name": "add" } }), "HRHR"),
        (json!({ "tool_choice": { "type": "tool", "name": "add" } }), "RRRH"),
        (json!({ "tool_choice": { "type": "auto", "disable_parallel_tool_use": true } }), "RRRH"),
        (json!({ "parallel_tool_calls": false }), "HRHR"),
        // Of tools that other servers run.
        (json!({ "max_tool_calls": 1 }), "RRLR"),
        (json!({ "functions": [{ "name": "f" }] }), "RRRR"),
        (json!({ "function_call": "auto" }), "RRRR"),
        (json!({ "mcp_servers": [{ "name": "s" }] }), "RRRR"),
        (json!({ "web_search_options": {} }), "RRRR"),
        // Forms.
        (json!({ "response_format": { "type": "json_object" } }), "HRRR"),
        (json!({ "response_format": format }), "HRRR"),
        (json!({ "text": { "format": { "type": "json_object" } } }), "RRHR"),
        (json!({ "text": { "format": flat } }), "RRHR"),
        (json!({ "text": { "verbosity": "high" } }), "RRRR"),
        (json!({ "verbosity": "high" }), "RRRR"),
        (json!({ "output_config": { "format": flat } }), "RRRH"),
        (json!({ "output_format": flat }), "RRRH"),
        // Thinking.
        (json!({ "reasoning_effort": "none" }), "HRRR"),
        (json!({ "reasoning": { "effort": "none" } }), "RRHR"),
        (json!({ "reasoning": { "colour": "red" } }), "RRRR"),
        (json!({ "output_config": { "effort": "none" } }), "RRRH"),
        (json!({ "thinking": { "type": "disabled" } }), "HRRH"),
        (json!({ "thinking": { "type": "enabled", "budget_tokens": 5 } }), "HRRH"),
        (json!({ "thinking": { "type": "enabled", "display": "omitted" } }), "RRRR"),
        (json!({ "thinking_budget": 5 }), "HRRR"),
        (json!({ "chat_template_kwargs": { "enable_thinking": false } }), "HRHH"),
        // Prompts.
        (json!({ "system": "Be kind." }), "RRRH"),
        (json!({ "instructions": "Be kind." }), "RRHR"),
        (json!({ "echo": true }), "RRRR"),
        (json!({ "suffix": "x" }), "RRRR"),
        (json!({ "best_of": 3 }), "RRRR"),
        (json!({ "prediction": { "type": "content", "content": "x" } }), "RRRR"),
        (json!({ "truncation": "auto" }), "RRRR"),
        (json!({ "context_management": { "edits": [{ "type": "clear_tool_uses_20250919" }] } }), "RRRR"),
        // What is stored, and what is no text.
        (json!({ "store": true }), "RRRR"),
        (json!({ "store": false }), "LRLR"),
        (json!({ "background": true }), "RRRR"),
        (json!({ "previous_response_id": "resp_1" }), "RRRR"),
        (json!({ "conversation": "conv_1" }), "RRRR"),
        (json!({ "include": ["message.output_text.logprobs"] }), "RRRR"),
        (json!({ "include": ["reasoning.encrypted_content"] }), "RRLR"),
        (json!({ "container": "c" }), "RRRR"),
        (json!({ "modalities": ["audio"] }), "RRRR"),
        (json!({ "audio": { "voice": "x" } }), "RRRR"),
        // Labels.
        (json!({ "user": "me" }), "LLLR"),
        (json!({ "metadata": { "user_id": "me" } }), "LLHL"),
        (json!({ "service_tier": "auto" }), "LRLL"),
        (json!({ "safety_identifier": "me" }), "LRLR"),
        (json!({ "prompt_cache_key": "me" }), "LRLR"),
        (json!({ "cache_control": { "type": "ephemeral" } }), "LRRL"),
        (json!({ "colour": "red" }), "RRRR"),
    ]
}

#[tokio::test]
async fn every_field_is_honoured_or_refused_by_name() {
    let mut others = Vec::new();
    for (i, path) in PATHS.into_iter().enumerate() {
        let plain = outcome(path, base(path)).await.expect("the base is answered");
        assert_eq!(outcome(path, base(path)).await.as_ref(), Ok(&plain), "{path}: twice the same");
        for (more, kinds) in fields() {
            let name = more.as_object().and_then(|fields| fields.keys().next()).expect("one field");
            let found = match outcome(path, with(&base(path), &more)).await {
                Ok(outcome) if outcome == plain => 'L',
                Ok(_) => 'H',
                Err((message, param)) => {
                    let names =
                        [message.as_str(), param.as_str()].into_iter().filter(|text| !text.is_empty());
                    assert!(
                        names.into_iter().all(|text| text.starts_with(name.as_str())),
                        "{path}: {more}: {message} ({param})"
                    );
                    'R'
                }
            };
            if Some(found) != kinds.chars().nth(i) {
                others.push(format!("{path}: {more} is {found} and should be one of {kinds}"));
            }
        }
    }
    assert!(others.is_empty(), "{}", others.join("\n"));
}

#[tokio::test]
async fn usage_ends_a_stream_where_it_is_asked_for() {
    for path in &PATHS[..2] {
        let streamed = with(&base(path), &json!({ "stream": true }));
        let usage = json!({ "stream_options": { "include_usage": true } });
        let plain = outcome(path, streamed.clone()).await.expect("a stream");
        let counted = outcome(path, with(&streamed, &usage)).await.expect("a stream");
        assert!(
            !plain.contains("\"usage\"") && counted.contains("\"completion_tokens_details\""),
            "{path}: {counted}"
        );
    }
}
