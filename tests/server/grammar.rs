//! Answers that must have a form, and bounds on thinking.

use serde_json::{Value, json};

use crate::{
    chat::tools,
    fake::{Script, client, client_of, client_of_channels},
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

/// A message that has the form of [`schema`] as its content, or calls one of [`tools`].
fn is_json_or_call(message: &Value) -> &'static str {
    let parsed = |text: &Value| serde_json::from_str::<Value>(text.as_str().unwrap_or_default());
    match &message["tool_calls"] {
        Value::Null => {
            let person = parsed(&message["content"]).unwrap_or_else(|error| panic!("{error}: {message}"));
            assert!(person["name"].is_string() && person["age"].is_u64(), "{message}");
            "json"
        }
        calls => {
            let arguments = parsed(&calls[0]["function"]["arguments"]).expect("JSON");
            assert!(arguments["x"].is_number() && message["content"].is_null(), "{message}");
            "call"
        }
    }
}

#[tokio::test]
async fn a_form_and_tools_are_either_of_both() {
    let mut both = schema();
    both["tools"] = tools();
    let call = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": 5}}\n</tool_call>";
    for (text, kind) in [
        ("{\"name\": \"Bob\", \"age\": 20}", "json"),
        ("<think>\nHm.\n</think>\n\n{\"name\": \"Bob\", \"age\": 20}", "json"),
        (call, "call"),
        (
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"x\": \"five\", \"z\": 1}}\n</tool_call>",
            "call",
        ),
    ] {
        assert_eq!(is_json_or_call(&message(text, both.clone()).await), kind, "{text}");
    }
    is_json_or_call(&message("Sure! I will add.", both.clone()).await);
    for (choice, kind) in [("required", "call"), ("none", "json")] {
        both["tool_choice"] = choice.into();
        assert_eq!(is_json_or_call(&message("Sure!", both.clone()).await), kind, "{choice}");
    }
}

/// The message of a model that answers in channels and would like to say `text`.
async fn channels(text: &'static str, more: Value) -> Value {
    let client = client_of_channels([Script::Guided(text)]);
    client.post(PATH, ask(more)).await.ok()["choices"][0]["message"].clone()
}

const PERSON: &str = "<|channel|>analysis<|message|>Who is it?<|end|><|start|>assistant<|channel|>final<|message|>\
                      {\"name\": \"Bob\", \"age\": 20}<|return|>";
const CALL: &str = "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant\
                    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"x\": 5}<|call|>";

#[tokio::test]
async fn content_is_json_in_channels_too() {
    let kept = channels(PERSON, schema()).await;
    assert_eq!(kept["content"], "{\"name\": \"Bob\", \"age\": 20}");
    assert_eq!(kept["reasoning_content"], "Who is it?");
    let mut forced = schema();
    forced["thinking_budget"] = 0.into();
    for text in ["Sure!", PERSON, "<|channel|>final<|message|>Sure! {}<|return|>", ""] {
        let message = channels(text, forced.clone()).await;
        assert_eq!(
            (is_json_or_call(&message), &message["reasoning_content"]),
            ("json", &Value::Null),
            "{text}"
        );
    }
}

#[tokio::test]
async fn a_call_is_made_in_channels_where_one_is_demanded() {
    let kept = channels(CALL, json!({ "tools": tools(), "tool_choice": "required" })).await;
    assert_eq!((&kept["tool_calls"][0]["function"]["name"], &kept["content"]), (&json!("add"), &Value::Null));
    assert_eq!((&kept["reasoning_content"], is_json_or_call(&kept)), (&json!("I add."), "call"));
    for (choice, name) in [
        (json!("required"), None),
        (json!({ "type": "function", "function": { "name": "subtract" } }), Some("subtract")),
    ] {
        for text in ["<|channel|>final<|message|>No.<|return|>", CALL, ""] {
            let more = json!({ "tools": tools(), "tool_choice": choice, "thinking_budget": 0 });
            let message = channels(text, more).await;
            let function = &message["tool_calls"][0]["function"];
            assert!(name.is_none_or(|name| function["name"] == name), "{message}");
            assert_eq!(is_json_or_call(&message), "call", "{text}");
        }
    }
}

#[tokio::test]
async fn a_model_of_channels_may_call_or_answer_in_a_form() {
    let mut both = schema();
    both["tools"] = tools();
    assert_eq!(is_json_or_call(&channels(CALL, both.clone()).await), "call");
    assert_eq!(is_json_or_call(&channels(PERSON, both).await), "json");
    let mut strict = tools();
    strict[0]["function"]["strict"] = true.into();
    let strict = json!({ "tools": strict, "thinking_budget": 100 });
    let said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>\
                <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{\"x\": \"five\"}<|call|>";
    let message = channels(said, strict.clone()).await;
    let function = &message["tool_calls"][0]["function"];
    let arguments: Value =
        serde_json::from_str(function["arguments"].as_str().expect("a text")).expect("JSON");
    assert!(arguments["x"].is_number(), "{message}");
    assert_eq!(message["content"], "I add.");
    // A tool that is not strict takes what the model likes.
    let free =
        "<|channel|>commentary to=functions.subtract <|constrain|>json<|message|>{\"x\": \"five\"}<|call|>";
    let message = channels(free, strict.clone()).await;
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"x\": \"five\"}");
    let message = channels("<|channel|>final<|message|>Just text.<|return|>", strict).await;
    assert_eq!(message["content"], "Just text.");
}

#[tokio::test]
async fn thinking_in_channels_ends_where_its_budget_does() {
    let text = "<|channel|>analysis<|message|>one two three four five<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>";
    let free = channels(text, json!({ "thinking_budget": 1000 })).await;
    assert_eq!(
        (&free["reasoning_content"], &free["content"]),
        (&json!("one two three four five"), &json!("Done."))
    );
    let bound = channels(text, json!({ "thinking_budget": 4 })).await;
    let thought = bound["reasoning_content"].as_str().expect("a text");
    assert!("one two three".starts_with(thought) && !thought.is_empty(), "{bound}");
    let none = channels("<|channel|>final<|message|>Done.<|return|>", json!({ "thinking_budget": 0 })).await;
    assert_eq!((&none["reasoning_content"], &none["content"]), (&Value::Null, &json!("Done.")));
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
    // Neither its calls nor its tokens.
    for taught in ["[TOOL_CALLS]", "<|channel|><|message|>"] {
        let body = ask(json!({ "tools": [add], "tool_choice": "required" }));
        client_of(taught, []).post(PATH, body).await.error(400);
    }
}
