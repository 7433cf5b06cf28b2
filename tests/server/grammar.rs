//! Answers that must have a form, and bounds on thinking.

use serde_json::{Value, json};

use crate::{
    chat::tools,
    fake::{Script, client, client_of},
};

const PATH: &str = "/v1/chat/completions";

fn ask(more: Value) -> Value {
    let mut body =
        json!({ "model": "any", "max_tokens": 300, "messages": [{ "role": "user", "content": "Hi." }] });
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// The message, where the model would like to say `text`.
async fn message(text: &'static str, more: Value) -> Value {
    let client = client([Script::Guided(text)]);
    client.post(PATH, ask(more)).await.ok()["choices"][0]["message"].clone()
}

fn schema() -> Value {
    let schema = json!({
        "type": "object",
        "properties": { "name": { "type": "string", "enum": ["Ann", "Bob"] }, "age": { "$ref": "#/$defs/age" } },
        "required": ["name", "age"],
        "additionalProperties": false,
        "$defs": { "age": { "type": "integer", "minimum": 10, "maximum": 99 } },
    });
    json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "person", "schema": schema } } })
}

#[tokio::test]
async fn content_is_json_of_the_schema_whatever_the_model_likes() {
    for text in ["Sure! Here it is: {}", "{\"name\": \"Bob\", \"age\": 20}", "{\n  \"name\": 1", ""] {
        let message = message(text, schema()).await;
        let content = message["content"].as_str().expect("a text");
        let person: Value =
            serde_json::from_str(content).unwrap_or_else(|error| panic!("{error}: {content}"));
        assert!(["Ann", "Bob"].contains(&person["name"].as_str().expect("a name")), "{content}");
        assert!(person["age"].as_u64().is_some_and(|age| (10..100).contains(&age)), "{content}");
    }
    let kept = message("{\"name\": \"Bob\", \"age\": 20}", schema()).await;
    assert_eq!(kept["content"], "{\"name\": \"Bob\", \"age\": 20}");
}

#[tokio::test]
async fn any_object_will_do_for_json_object() {
    let message = message("{\"a\": [1, 2]}", json!({ "response_format": { "type": "json_object" } })).await;
    assert_eq!(message["content"], "{\"a\": [1, 2]}");
}

#[tokio::test]
async fn a_grammar_begins_behind_thinking() {
    let message =
        message("<think>\nLet me see.\n</think>\n\n{\"name\": \"Ann\", \"age\": 33}", schema()).await;
    assert_eq!(message["content"], "{\"name\": \"Ann\", \"age\": 33}");
    assert_eq!(message["reasoning_content"].as_str().map(str::trim), Some("Let me see."));
    let mut without = schema();
    without["reasoning_effort"] = "none".into();
    let message =
        self::message("<think>\nLet me see.\n</think>\n\n{\"name\": \"Ann\", \"age\": 33}", without).await;
    assert!(message["reasoning_content"].is_null(), "{message}");
}

#[tokio::test]
async fn a_call_is_made_where_one_is_demanded() {
    for (choice, text, name) in [
        (json!("required"), "No.", None),
        (
            json!("required"),
            "<tool_call>\n{\"name\": \"subtract\", \"arguments\": {\"x\": 5}}\n</tool_call>",
            Some("subtract"),
        ),
        (json!({ "type": "function", "function": { "name": "subtract" } }), "No.", Some("subtract")),
        (
            json!({ "type": "function", "function": { "name": "add" } }),
            "<tool_call>\n{\"name\": \"subtract\", \"arguments\": {\"x\": 5}}\n</tool_call>",
            Some("add"),
        ),
    ] {
        let message = message(text, json!({ "tools": tools(), "tool_choice": choice })).await;
        let calls = message["tool_calls"].as_array().unwrap_or_else(|| panic!("{message}"));
        assert_eq!(calls.len(), 1, "{message}");
        let function = &calls[0]["function"];
        assert!(name.is_none_or(|name| function["name"] == name), "{message}");
        let arguments = function["arguments"].as_str().expect("a text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(arguments["x"].is_number(), "{message}");
    }
}

#[tokio::test]
async fn strict_tools_are_kept_to_where_the_model_calls_one() {
    let mut strict = tools();
    strict[0]["function"]["strict"] = true.into();
    let body = json!({ "tools": strict });
    assert_eq!(message("Just text.", body.clone()).await["content"], "Just text.");
    let text =
        "I add. <tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": \"one\", \"z\": 2}}\n</tool_call>";
    let message = message(text, body).await;
    let function = &message["tool_calls"][0]["function"];
    assert_eq!(function["name"], "add", "{message}");
    let arguments: Value =
        serde_json::from_str(function["arguments"].as_str().expect("a text")).expect("JSON");
    assert!(
        arguments["x"].is_number() && arguments.as_object().map(|fields| fields.len()) == Some(1),
        "{message}"
    );
    assert!(message["content"].as_str().is_some_and(|text| text.starts_with("I add.")), "{message}");
}

#[tokio::test]
async fn thinking_ends_where_its_budget_does() {
    let text = "<think>one two three four five six seven</think>\n\nDone.";
    let free = message(text, json!({ "thinking_budget": 1000 })).await;
    assert_eq!(free["reasoning_content"], "one two three four five six seven");
    let bound = message(text, json!({ "thinking": { "type": "enabled", "budget_tokens": 5 } })).await;
    let thought = bound["reasoning_content"].as_str().expect("a text");
    assert!("one two three".starts_with(thought) && !thought.is_empty(), "{bound}");
    let none = message(text, json!({ "thinking_budget": 0 })).await;
    assert!(none["reasoning_content"].is_null(), "{none}");
}

#[tokio::test]
async fn a_form_and_tools_are_one_promise_too_many() {
    let mut both = schema();
    both["tools"] = tools();
    let error = client([]).post(PATH, ask(both)).await.error(400);
    assert_eq!(error["param"], "response_format");
}

#[tokio::test]
async fn calls_are_forced_in_the_dialect_of_the_model() {
    let wait = json!({ "type": "function", "function": { "name": "wait" } });
    let add = tools()[0].clone();
    for (taught, call) in [
        ("<tool_call>", "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 5}}\n</tool_call>"),
        (
            "<function=",
            "<tool_call>\n<function=add>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>",
        ),
        ("<arg_key>", "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"),
        ("<|python_tag|>", "{\"name\": \"add\", \"parameters\": {\"x\": 5}}"),
    ] {
        let client = client_of(taught, [Script::Guided(call), Script::Guided("No.")]);
        for (tool, arguments) in [(&add, json!({ "x": 5 })), (&wait, json!({}))] {
            let name = &tool["function"]["name"];
            let choice = json!({ "type": "function", "function": { "name": name } });
            let body = ask(json!({ "tools": [tool], "tool_choice": choice }));
            let message = client.post(PATH, body).await.ok()["choices"][0]["message"].clone();
            let function = &message["tool_calls"][0]["function"];
            assert_eq!(&function["name"], name, "{taught}: {message}");
            let said = function["arguments"].as_str().unwrap_or_else(|| panic!("{taught}: {message}"));
            assert_eq!(serde_json::from_str::<Value>(said).ok(), Some(arguments), "{taught}: {message}");
        }
    }
    let error = client_of("<|channel|><|message|>", []);
    let body = ask(json!({ "tools": [add], "tool_choice": "required" }));
    error.post(PATH, body).await.error(400);
}
