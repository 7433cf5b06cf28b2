//! What a client sends and gets, through every chat template of a conformance folder: messages are adapted and rendered, and
//! what was rendered of an assistant's message is read back.
//!
//! `FREETOKEN_TEMPLATES` names the folder, as in `templates.rs`.

use freetoken::chat::{
    boundaries::message_ends,
    reader::{Answered, Reader, ToolCall},
    template::{ChatTemplate, Prompt},
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, env, fs, path::PathBuf};

/// Templates in the reference folder.
const N_TEMPLATES: usize = 21;

/// A template of the folder.
struct Subject {
    name: String,
    template: ChatTemplate,
    eos: String,
}

fn folder() -> Option<PathBuf> {
    let folder = env::var_os("FREETOKEN_TEMPLATES").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("SKIPPED: FREETOKEN_TEMPLATES is not set; no conversation was rendered and read back");
    }
    folder
}

fn cases() -> Option<Vec<Value>> {
    let text =
        fs::read_to_string(folder()?.join("cases.json")).expect("FREETOKEN_TEMPLATES holds cases.json");
    Some(serde_json::from_str(&text).expect("cases.json is a list of cases"))
}

fn subject(case: &Value) -> Subject {
    let name = case["template"].as_str().expect("a case names its template");
    let source =
        fs::read_to_string(folder().expect("set").join(name)).expect("the template is in the folder");
    let eos = case["eos_token"].as_str().expect("every case has one");
    let template =
        ChatTemplate::new(&source, case["bos_token"].as_str(), Some(eos)).expect("the template parses");
    Subject { name: name.into(), template, eos: eos.into() }
}

/// One of each template, in the order of their names.
fn subjects() -> Option<Vec<Subject>> {
    let cases = cases()?;
    let named: BTreeMap<&str, &Value> =
        cases.iter().map(|case| (case["template"].as_str().expect("named"), case)).collect();
    Some(named.into_values().map(subject).collect())
}

impl Subject {
    fn render(
        &self,
        messages: &[Value],
        tools: Option<&[Value]>,
        kwargs: &Value,
        generate: bool,
    ) -> Result<String, String> {
        let mut kwargs: Map<String, Value> = kwargs.as_object().expect("an object").clone();
        kwargs.shift_remove("add_generation_prompt");
        let prompt = Prompt {
            messages,
            tools,
            add_generation_prompt: generate,
            kwargs: &kwargs,
            now: "2026-01-05T12:34:56".parse().expect("ISO 8601"),
        };
        self.template.render(&prompt).map_err(|error| error.to_string())
    }
}

/// What a message says, as far as a template could print it: arguments as values.
fn said(message: &Value) -> (String, String, Vec<(String, Value)>) {
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
    let calls = message["tool_calls"].as_array().into_iter().flatten().map(|call| {
        let function = &call["function"];
        let arguments = match &function["arguments"] {
            Value::String(text) => serde_json::from_str(text).expect("JSON"),
            arguments => arguments.clone(),
        };
        (function["name"].as_str().expect("named").to_owned(), without_nulls(arguments))
    });
    (text("reasoning_content"), text("content"), calls.collect())
}

fn said_back(answered: &Answered) -> (String, String, Vec<(String, Value)>) {
    let call = |call: &ToolCall| {
        let arguments = serde_json::from_str(&call.arguments)
            .unwrap_or_else(|error| panic!("{error}: {}", call.arguments));
        (call.name.clone(), without_nulls(arguments))
    };
    (answered.reasoning.clone(), answered.content.clone(), answered.tool_calls.iter().map(call).collect())
}

/// Reads what `text` has behind its beginning `prompt`, up to the end of the turn.
fn read_back(subject: &Subject, prompt: &str, text: &str, tools: Option<&[Value]>) -> Answered {
    let written = &text[prompt.len()..];
    let ends = [subject.eos.as_str(), "<|im_end|>", "<turn|>", "<|tool_response>"];
    let end = ends.iter().filter_map(|end| written.find(end)).min().unwrap_or(written.len());
    let mut reader = Reader::new(subject.template.dialect(), prompt, tools, "1");
    let mut answered = Answered::default();
    answered.extend(reader.push(&written[..end]));
    answered.extend(reader.finish());
    answered
}

/// A value without fields that are null: some templates leave them out.
fn without_nulls(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(|field| *field = without_nulls(field.take()));
        }
        Value::Array(members) => members.iter_mut().for_each(|member| *member = without_nulls(member.take())),
        _ => {}
    }
    value
}

#[test]
fn what_is_rendered_is_read_back() {
    let Some(cases) = cases() else { return };
    let mut n_compared = BTreeMap::new();
    let mut differences = Vec::new();
    for case in &cases {
        let subject = subject(case);
        let tools = case["tools"].as_array().map(Vec::as_slice);
        let messages = subject.template.adapted(case["messages"].as_array().expect("a list"));
        for (at, message) in messages.iter().enumerate() {
            if message["role"] != "assistant"
                || message["tool_calls"].is_null() && message["reasoning_content"].is_null()
            {
                continue;
            }
            let label = format!("{} {} message {at}", subject.name, case["case"]);
            let asked = subject.render(&messages[..at], tools, &case["kwargs"], true);
            let answered = subject.render(&messages[..=at], tools, &case["kwargs"], false);
            let (prompt, text) = match (asked, answered) {
                (Ok(prompt), Ok(text)) => (prompt, text),
                // Two templates call what only changes lists of Python.
                (Err(error), _) | (_, Err(error)) if error.contains("no method named append") => continue,
                (Err(error), _) | (_, Err(error)) => {
                    differences.push(format!("{label}: {error}"));
                    continue;
                }
            };
            // What a message says and a template leaves out cannot be read back.
            let (mut reasoning, mut content, calls) = said(message);
            let shared = prompt.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
            let shared = text.floor_char_boundary(shared);
            if shared + 40 < prompt.len() {
                // Harmony's template forgets what was thought before, once the answer is there.
                assert!(prompt.contains("<|channel|>analysis"), "{label}");
                continue;
            }
            let shared = text[..shared].rfind(['\n', '>', ']']).map_or(0, |at| at + 1);
            [&mut reasoning, &mut content]
                .into_iter()
                .filter(|said| !text[shared..].contains(said.as_str()))
                .for_each(String::clear);
            let back = said_back(&read_back(&subject, &prompt[..shared], &text, tools));
            if back != (reasoning, content, calls) {
                differences.push(format!(
                    "{label}\n{:?}\n{back:?}\n{:?}",
                    said(message),
                    &text[text.floor_char_boundary(shared.saturating_sub(30))..]
                ));
            }
            *n_compared.entry(subject.name.clone()).or_insert(0) += 1;
        }
    }
    eprintln!("messages read back: {n_compared:#?}");
    assert_eq!(n_compared.len(), N_TEMPLATES);
    assert!(differences.is_empty(), "{}", differences.join("\n\n"));
}

/// What clients send that templates do not all expect. The texts in capitals are to be seen by the model.
fn unusual() -> Vec<(&'static str, Vec<Value>, Vec<&'static str>)> {
    let user = |text: &str| json!({"role": "user", "content": text});
    let system = |text: &str| json!({"role": "system", "content": text});
    let call = |id: &str, arguments: &str| json!({"id": id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}});
    let result = |id: &str, text: &str| json!({"role": "tool", "tool_call_id": id, "content": text});
    let parts = json!([{"type": "text", "text": "FIRST"}, {"type": "text", "text": "SECOND"}]);
    let calls = json!([call("call_7_0", r#"{"city": "PARIS"}"#), call("call_7_1", r#"{"city": "ROME"}"#)]);
    vec![
        (
            "parts",
            vec![json!({"role": "system", "content": parts}), json!({"role": "user", "content": parts})],
            vec!["FIRST", "SECOND"],
        ),
        (
            "developer",
            vec![json!({"role": "developer", "content": "RULE"}), user("QUERY")],
            vec!["RULE", "QUERY"],
        ),
        ("systems", vec![system("RULE"), system("OTHER"), user("QUERY")], vec!["RULE", "OTHER", "QUERY"]),
        (
            "system in the middle",
            vec![
                system("RULE"),
                user("QUERY"),
                json!({"role": "assistant", "content": "SAID"}),
                system("NEWS"),
                user("MORE"),
            ],
            vec!["RULE", "QUERY", "SAID", "NEWS", "MORE"],
        ),
        ("system at the end", vec![user("QUERY"), system("NEWS")], vec!["QUERY", "NEWS"]),
        ("users", vec![user("QUERY"), user("MORE")], vec!["QUERY", "MORE"]),
        (
            "parallel calls without content",
            vec![
                user("QUERY"),
                json!({"role": "assistant", "content": null, "reasoning_content": "THOUGHT", "tool_calls": calls}),
                result("call_7_1", "HOT"),
                result("call_7_0", "COLD"),
            ],
            vec!["QUERY", "PARIS", "ROME", "HOT", "COLD"],
        ),
        (
            "a call beside thinking and a text",
            vec![
                user("QUERY"),
                json!({"role": "assistant", "content": "SAID", "reasoning_content": "THOUGHT", "tool_calls": [calls[0]]}),
                result("call_7_0", "COLD"),
            ],
            vec!["QUERY", "PARIS", "COLD"],
        ),
        (
            "a call that was cut",
            vec![
                user("QUERY"),
                json!({"role": "assistant", "content": "", "tool_calls": [call("call_7_0", r#"{"city": "PARI"#)]}),
                result("call_7_0", "FAILED"),
            ],
            vec!["QUERY", "PARI", "FAILED"],
        ),
    ]
}

#[test]
fn every_template_takes_what_the_api_allows() {
    let Some(subjects) = subjects() else { return };
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tools = [
        json!({"type": "function", "function": {"name": "get_weather", "description": "of a city", "parameters": parameters}}),
    ];
    let mut failures = Vec::new();
    for subject in &subjects {
        for (what, messages, texts) in unusual() {
            let adapted = subject.template.adapted(&messages);
            match subject.render(&adapted, Some(&tools), &json!({}), true) {
                Err(error) if error.contains("no method named append") => {}
                Err(error) => failures.push(format!("{} {what}: {error}", subject.name)),
                Ok(prompt) => {
                    let mut rest = prompt.as_str();
                    for text in &texts {
                        // Results stand behind their calls, in an order that is the template's.
                        let found = if what.starts_with("parallel") { &prompt } else { rest }.find(text);
                        match found {
                            Some(at) if !what.starts_with("parallel") => rest = &rest[at..],
                            Some(_) => {}
                            None => failures.push(format!(
                                "{} {what}: no {text} in its place in {prompt:?}",
                                subject.name
                            )),
                        }
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn messages_end_where_the_next_begins() {
    let Some(subjects) = subjects() else { return };
    let message = |(role, content)| json!({"role": role, "content": content});
    let messages = [
        ("system", "RULE"),
        ("user", "QUERY"),
        ("assistant", "SAID"),
        ("user", "MORE"),
        ("assistant", "DONE"),
        ("user", "LAST"),
    ]
    .map(message);
    let order = ["RULE", "QUERY", "SAID", "MORE", "DONE", "LAST"];
    for subject in &subjects {
        let text = subject
            .render(&messages, None, &json!({}), true)
            .unwrap_or_else(|error| panic!("{}: {error}", subject.name));
        let kwargs = Map::new();
        let now = "2026-01-05T12:34:56".parse().expect("ISO 8601");
        let prompt =
            Prompt { messages: &messages, tools: None, add_generation_prompt: true, kwargs: &kwargs, now };
        let ends = message_ends(&subject.template, &prompt, &text, messages.len());
        let places: Vec<usize> = order.iter().map(|word| text.find(word).expect("rendered")).collect();
        for (word, window) in order.iter().zip(places.windows(2)) {
            let between =
                ends.iter().filter(|&&end| end >= window[0] + word.len() && end <= window[1]).count();
            assert_eq!(between, 1, "{} behind {word}: {ends:?} {places:?} {text:?}", subject.name);
        }
        let last = places[5] + "LAST".len();
        let silent = subject.render(&messages, None, &json!({}), false).expect("renders as well");
        let expected = usize::from(silent != text);
        let behind = ends.iter().filter(|&&end| end >= last).count();
        assert_eq!(behind, expected, "{}: {ends:?} {text:?}", subject.name);
    }
}
